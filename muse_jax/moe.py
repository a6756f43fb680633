"""Flax modules of the block: they own the parameters and call the functions that compute.

router_logits -> topk_ids, topk_weights                       MuseRouter, on the D-wide input
latent -> expert_input -> activation -> expert_rows           pre_expert_proj, pre_expert_norm, MuseExperts
normed_rows -> combined -> out                                finalize (norm, then weight, then sum), post_expert_proj
One device; `muse_jax.parallel` runs the same block over a mesh.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Literal

import jax
import jax.numpy as jnp
from flax import nnx
from jax.typing import DTypeLike
from jaxtyping import Array, Float, Float32, Int32

from muse_jax.block import before_experts, combine, normed_rows, project
from muse_jax.checkpoint import QuantizedWeight, to_fnuz
from muse_jax.config import MuseConfig
from muse_jax.experts import expert_rows
from muse_jax.quantization.array import Format, QuantizedArray
from muse_jax.quantization.inputs import ActivationRule, check_rule, check_scales
from muse_jax.router import choose_experts, router_logits
from pallas_kernels.dispatch import Implementation, resolve
from pallas_kernels.target import current_target

_INIT = nnx.initializers.normal(stddev=0.02)


class MuseRouter(nnx.Module):
    """Chooses K experts a token from the D-wide input; float32 parameters `weight` [E, D] and `bias` [E]."""

    def __init__(self, config: MuseConfig, *, rngs: nnx.Rngs, implementation: Implementation | None = None):
        self.config = config
        self.implementation: Implementation | None = implementation
        shape = (config.num_experts, config.model_width)
        self.weight = nnx.Param(_INIT(rngs.params(), shape, jnp.float32))
        self.bias = nnx.Param(jnp.zeros((config.num_experts,), jnp.float32))

    def logits(self, x: Float[Array, "T D"]) -> Float32[Array, "T E"]:
        """Router logits after the output multiplier."""
        return router_logits(x, self.weight[...], self.config.output_multiplier, implementation=self.implementation)

    def route(self, logits: Float32[Array, "T E"]) -> tuple[Float32[Array, "T K"], Int32[Array, "T K"]]:
        """(topk_weights, topk_ids) of logits, experts in descending biased score."""
        return choose_experts(logits, self.bias[...], self.config, implementation=self.implementation)

    def __call__(self, x: Float[Array, "T D"]) -> tuple[Float32[Array, "T K"], Int32[Array, "T K"]]:
        """(topk_weights, topk_ids) of x."""
        return self.route(self.logits(x))


class MuseExperts(nnx.Module):
    """The routed experts: `gate_up` [E, 2F, H] and `down` [E, H, F]; returns unweighted rows.

    Quantized experts hold codes there (the values of `muse_jax.quantization.QuantizedArray.held`) and their scales in
    `gate_up_scales` and `down_scales`; `hold` takes them in, `weight` gives them back.
    """

    def __init__(
        self,
        config: MuseConfig,
        *,
        rngs: nnx.Rngs,
        dtype: DTypeLike = jnp.bfloat16,
        implementation: Implementation | None = None,
    ):
        self.implementation: Implementation | None = implementation
        e, h, f = config.num_experts, config.latent_width, config.expert_width
        self.gate_up = nnx.Param(_INIT(rngs.params(), (e, 2 * f, h), dtype))
        self.down = nnx.Param(_INIT(rngs.params(), (e, h, f), dtype))
        self.format: Format | None = None
        self.activation_rule: ActivationRule | None = None

    def hold(self, gate_up: QuantizedArray, down: QuantizedArray, activation_rule: ActivationRule | None) -> None:
        """Hold quantized weights instead; activation_rule is how MXFP4 experts have their inputs quantized."""
        if gate_up.format != down.format:
            raise ValueError(f"gate_up is {gate_up.format} and down {down.format}; expected one format")
        check_rule(activation_rule, gate_up)
        self.format, self.activation_rule = gate_up.format, activation_rule
        gate_up, down = gate_up.held(), down.held()
        self.gate_up, self.gate_up_scales = nnx.Param(gate_up.values), nnx.Param(gate_up.scales)
        self.down, self.down_scales = nnx.Param(down.values), nnx.Param(down.scales)
        if gate_up.input_scale is not None and down.input_scale is not None:
            self.gate_up_input_scale = nnx.Param(gate_up.input_scale)
            self.down_input_scale = nnx.Param(down.input_scale)

    def weight(self, name: Literal["gate_up", "down"]) -> jax.Array | QuantizedArray:
        """The named weight as the functions of `muse_jax.experts` take it."""
        values = getattr(self, name)[...]
        if self.format is None:
            return values
        input_scale = getattr(self, f"{name}_input_scale", None)
        return QuantizedArray(
            values=values,
            scales=getattr(self, f"{name}_scales")[...],
            format=self.format,
            input_scale=None if input_scale is None else input_scale[...],
        )

    def __call__(
        self, expert_input: Float[Array, "T H"], topk_ids: Int32[Array, "T K"]
    ) -> tuple[Float[Array, "T K F"], Float[Array, "T K H"]]:
        """(activation, expert_rows) of each route; masked routes have rows of exact zeros."""
        return expert_rows(
            expert_input,
            topk_ids,
            self.weight("gate_up"),
            self.weight("down"),
            activation_rule=self.activation_rule,
            implementation=self.implementation,
        )


class MuseMoE(nnx.Module):
    """The block: [..., D] in, [..., D] out, in the dtype of its parameters.

    Parameters beside those of `router` and `experts`: `pre_expert_proj` [H, D], `pre_expert_norm` [H],
    `post_expert_norm` [H] (one gain for all experts), `post_expert_proj` [D, H].
    """

    def __init__(
        self,
        config: MuseConfig,
        *,
        rngs: nnx.Rngs,
        dtype: DTypeLike = jnp.bfloat16,
        implementation: Implementation | None = None,
    ):
        resolve(implementation)
        self.config = config
        self.implementation: Implementation | None = implementation
        d, h = config.model_width, config.latent_width
        self.router = MuseRouter(config, rngs=rngs, implementation=implementation)
        self.experts = MuseExperts(config, rngs=rngs, dtype=dtype, implementation=implementation)
        self.pre_expert_proj = nnx.Param(_INIT(rngs.params(), (h, d), dtype))
        self.pre_expert_norm = nnx.Param(jnp.zeros((h,), dtype))
        self.post_expert_norm = nnx.Param(jnp.zeros((h,), dtype))
        self.post_expert_proj = nnx.Param(_INIT(rngs.params(), (d, h), dtype))

    @classmethod
    def from_weights(
        cls,
        config: MuseConfig,
        weights: Mapping[str, Any],
        *,
        dtype: DTypeLike = jnp.bfloat16,
        activation_rule: ActivationRule | None = None,
        implementation: Implementation | None = None,
    ) -> MuseMoE:
        """A block that holds `weights` (the names of `muse_jax.checkpoint.load_layer`), cast to `dtype`.

        The router stays float32, quantized experts their codes; on a chip whose FP8 is E4M3FNUZ they are converted.
        activation_rule: how MXFP4 experts have their inputs quantized; None is "even".

        Raises ValueError where a name is missing or a shape is not the configuration's.
        """
        block = nnx.eval_shape(lambda: cls(config, rngs=nnx.Rngs(0), dtype=dtype, implementation=implementation))
        for name, (owner, attribute) in _owners(block).items():
            if name not in weights:
                raise ValueError(f"weights has no {name!r}; expected {', '.join(_owners(block))}")
            wanted = getattr(owner, attribute)
            if tuple(weights[name].shape) != wanted.shape:
                raise ValueError(f"weights[{name!r}] is {tuple(weights[name].shape)}; expected {wanted.shape}")
            if not isinstance(weights[name], QuantizedWeight | QuantizedArray):
                setattr(owner, attribute, nnx.Param(jnp.asarray(weights[name], wanted.dtype)))
        quantized = [isinstance(weights[name], QuantizedWeight | QuantizedArray) for name in ("gate_up", "down")]
        if all(quantized):
            held = {name: _on_device(weights[name]) for name in ("gate_up", "down")}
            for name, weight in held.items():
                check_scales(name, weight, dtype, implementation)
            block.experts.hold(held["gate_up"], held["down"], activation_rule)
        elif any(quantized):
            raise ValueError("one of gate_up and down is quantized and the other is not; expected both or neither")
        else:
            check_rule(activation_rule, block.experts.gate_up[...])
        return block

    def weights(self) -> dict[str, Any]:
        """The parameters by the names of `muse_jax.checkpoint.load_layer`."""
        found: dict[str, Any] = {
            name: getattr(owner, attribute)[...]
            for name, (owner, attribute) in _owners(self).items()
            if owner is not self.experts
        }
        return found | {"gate_up": self.experts.weight("gate_up"), "down": self.experts.weight("down")}

    def __call__(
        self, x: Float[Array, "*batch D"], *, num_tokens: Int32[Array, ""] | int | None = None
    ) -> Float[Array, "*batch D"]:
        """The block's output for x, whose dtype must be that of the parameters.

        num_tokens: tokens from there on (in the order of a flat batch) are padding: no expert is read for them and
        their output is zero. `muse_jax.buckets` pads.
        """
        weights = self.weights()
        found = self._until_rows(weights, x.reshape(-1, x.shape[-1]), num_tokens)
        return project(weights, self._combine(weights, found), implementation=self.implementation).reshape(x.shape)

    def boundaries(self, x: Float[Array, "T D"]) -> dict[str, jax.Array]:
        """Every boundary of the block by name (`muse_jax.boundaries`), `x` and `out` included.

        `normed_rows` is float32 and computed beside the fused finalize, which keeps it in registers.
        """
        weights = self.weights()
        found = self._until_rows(weights, x)
        found["normed_rows"] = normed_rows(weights, found["expert_rows"], self.config)
        found["combined"] = self._combine(weights, found)
        found["out"] = project(weights, found["combined"], implementation=self.implementation)
        return found

    def _until_rows(
        self, weights: dict[str, Any], x: jax.Array, num_tokens: jax.Array | int | None = None
    ) -> dict[str, jax.Array]:
        """The boundaries from x to expert_rows."""
        found = before_experts(weights, x, self.config, num_tokens=num_tokens, implementation=self.implementation)
        found["activation"], found["expert_rows"] = self.experts(found["expert_input"], found["topk_ids"])
        return found

    def _combine(self, weights: dict[str, Any], found: dict[str, jax.Array]) -> jax.Array:
        rows, topk_weights, topk_ids = (found[name] for name in ("expert_rows", "topk_weights", "topk_ids"))
        return combine(weights, rows, topk_weights, topk_ids, self.config, implementation=self.implementation)


def _on_device(weight: QuantizedWeight | QuantizedArray) -> QuantizedArray:
    """The weight as this device's matrix units multiply it."""
    if isinstance(weight, QuantizedArray):
        return weight
    target = current_target()
    if weight.format == "fp8" and target is not None and target.fp8 == "e4m3fnuz":
        weight = to_fnuz(weight)
    return QuantizedArray.from_host(weight)


def _owners(block: MuseMoE) -> dict[str, tuple[nnx.Module, str]]:
    """Where each tensor of a layer lives: name -> (module, attribute)."""
    return {
        "router_weight": (block.router, "weight"),
        "router_bias": (block.router, "bias"),
        "pre_expert_proj": (block, "pre_expert_proj"),
        "pre_expert_norm": (block, "pre_expert_norm"),
        "gate_up": (block.experts, "gate_up"),
        "down": (block.experts, "down"),
        "post_expert_norm": (block, "post_expert_norm"),
        "post_expert_proj": (block, "post_expert_proj"),
    }
