"""Expert rows: what each chosen expert makes of its token, one unweighted row per route.

    activation[t, k]  = swiglu(expert_input[t] @ gate_e.T, expert_input[t] @ up_e.T)      e = topk_ids[t, k]
    expert_rows[t, k] = activation[t, k] @ down_e.T
A masked route (an id outside 0..E-1) has a row of exact zeros. Where gate_up and down are quantized, both products read
quantized rows too: expert_input quantized once a token, activation once a route (`muse_jax.quantization.inputs`).
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import NamedTuple

from jaxtyping import Array, Float, Float32, Int32

from muse_jax.quantization.array import QuantizedArray
from muse_jax.quantization.inputs import ActivationRule, check_rule, quantized_input
from pallas_kernels import expert_gemm
from pallas_kernels.dispatch import Implementation, resolve
from pallas_kernels.expert_gemm import Codes, Planes, Tile, choose_config, xla_block_rows
from pallas_kernels.route_map import Counts, RouteMap, route_map


def expert_rows(
    expert_input: Float[Array, "T H"],
    topk_ids: Int32[Array, "T K"],
    gate_up: Float[Array, "E F2 H"] | QuantizedArray,
    down: Float[Array, "E H F"] | QuantizedArray,
    *,
    spread_over: int | None = None,
    activation_rule: ActivationRule | None = None,
    implementation: Implementation | None = None,
) -> tuple[Float[Array, "T K F"], Float[Array, "T K H"]]:
    """(activation, expert_rows) in the dtype of expert_input. Activations of masked routes are undefined.

    Args:
      expert_input: latent of each token after pre_expert_norm, bfloat16 or float32.
      topk_ids: expert of each route.
      gate_up: gate rows 0..F-1 then up rows F..2F-1 of each expert.
      down: down projection of each expert.
      spread_over: experts that the routes go to, where more than these E; it only sizes the blocks.
      activation_rule: how inputs of MXFP4 experts are quantized; None is "even". FP8 experts have theirs in the weight.
      implementation: "pallas" (interpreted on a CPU), "xla", or None for the best here.
    """
    num_experts, h, f = _shape(down)
    tokens = topk_ids.shape[0]
    if _shape(gate_up) != (num_experts, 2 * f, h) or expert_input.shape != (tokens, h):
        raise ValueError(
            f"expert_input is {expert_input.shape}, topk_ids {topk_ids.shape}, gate_up {_shape(gate_up)}, "
            f"down {_shape(down)}; expected [T, H], [T, K], [E, 2F, H], [E, H, F]"
        )
    plan = _plan(topk_ids, down, (num_experts, h, f), spread_over, implementation)
    activation = _activation(expert_input, topk_ids, gate_up, plan, activation_rule)
    return activation, _rows(activation, down, plan, activation_rule)


def expert_activation(
    expert_input: Float[Array, "T H"],
    topk_ids: Int32[Array, "T K"],
    gate_up: Float[Array, "E F2 H"] | QuantizedArray,
    *,
    spread_over: int | None = None,
    activation_rule: ActivationRule | None = None,
    implementation: Implementation | None = None,
) -> Float[Array, "T K F"]:
    """The first half of `expert_rows`."""
    num_experts, two_f, h = _shape(gate_up)
    plan = _plan(topk_ids, gate_up, (num_experts, h, two_f // 2), spread_over, implementation)
    return _activation(expert_input, topk_ids, gate_up, plan, activation_rule)


def down_rows(
    activation: Float[Array, "T K F"],
    topk_ids: Int32[Array, "T K"],
    down: Float[Array, "E H F"] | QuantizedArray,
    *,
    largest: Float32[Array, "T K"] | None = None,
    spread_over: int | None = None,
    activation_rule: ActivationRule | None = None,
    implementation: Implementation | None = None,
) -> Float[Array, "T K H"]:
    """The second half of `expert_rows`, of as many tokens as are given.

    largest: the largest magnitude of each whole activation, where these are some of its columns and FP8 rows find their
      scales (`muse_jax.quantization.inputs.finds_row_scales`).
    """
    plan = _plan(topk_ids, down, _shape(down), spread_over, implementation)
    return _rows(activation, down, plan, activation_rule, largest)


def _shape(weight: Array | QuantizedArray) -> tuple[int, ...]:
    """[E, out, in]; the values of a quantized weight may hold an expert more, which nothing reads."""
    if isinstance(weight, QuantizedArray):
        return (weight.scales.shape[0], *weight.shape[1:])
    return weight.shape


class _Launch(NamedTuple):
    """Row blocks that both GEMMs walk, and how."""

    routes: RouteMap
    gate_up: Tile | None
    down: Tile | None


class _Plan(NamedTuple):
    """One launch for all experts, or one for those with few rows and one for the crowded."""

    implementation: Implementation
    launches: tuple[_Launch, ...]


def _plan(
    topk_ids: Array,
    weight: Array | QuantizedArray,
    down_shape: tuple[int, ...],
    spread_over: int | None,
    implementation: Implementation | None,
) -> _Plan:
    num_experts, h, f = down_shape
    implementation = resolve(implementation)
    rows_per_expert = topk_ids.size / (spread_over or num_experts)
    make_map = functools.partial(route_map, topk_ids, num_experts=num_experts, implementation=implementation)
    if implementation == "xla":
        return _Plan("xla", (_Launch(make_map(block_rows=xla_block_rows(rows_per_expert)), None, None),))
    kind = weight.format if isinstance(weight, QuantizedArray) else weight.dtype
    config = choose_config(rows_per_expert, kind, experts=num_experts, h=h, f=f)
    crowded = config.crowded
    # No expert has more rows than there are tokens.
    if crowded is None or config.crowded_from is None or topk_ids.shape[0] < config.crowded_from:
        return _Plan("pallas", (_Launch(make_map(block_rows=config.block_rows), config.gate_up, config.down),))
    few, many = Counts(most=config.crowded_from - 1), Counts(least=config.crowded_from)
    return _Plan(
        "pallas",
        (
            _Launch(make_map(block_rows=config.block_rows, counts=few), config.gate_up, config.down),
            _Launch(make_map(block_rows=crowded.block_rows, counts=many), crowded.gate_up, crowded.down),
        ),
    )


def _activation(
    expert_input: Array,
    topk_ids: Array,
    gate_up: Array | QuantizedArray,
    plan: _Plan,
    rule: ActivationRule | None,
) -> Array:
    tokens, routes_per_token = topk_ids.shape
    inputs, weight = _operands(expert_input, gate_up, rule, plan.implementation)  # once a token, not once a route
    run = lambda launch, into: expert_gemm.gate_up(
        inputs,
        weight,
        launch.routes,
        routes_per_token=routes_per_token,
        out_dtype=expert_input.dtype,
        implementation=plan.implementation,
        tile=launch.gate_up,
        into=into,
    )
    flat = _run_all(run, plan)
    return flat.reshape(tokens, routes_per_token, flat.shape[1])


def _rows(
    activation: Array,
    down: Array | QuantizedArray,
    plan: _Plan,
    rule: ActivationRule | None,
    largest: Array | None = None,
) -> Array:
    tokens, routes_per_token, f = activation.shape
    rows = activation.reshape(tokens * routes_per_token, f)
    inputs, weight = _operands(rows, down, rule, plan.implementation, None if largest is None else largest.reshape(-1))
    run = lambda launch, into: expert_gemm.down(
        inputs,
        weight,
        launch.routes,
        out_dtype=rows.dtype,
        implementation=plan.implementation,
        tile=launch.down,
        into=into,
    )
    flat = _run_all(run, plan)
    return flat.reshape(tokens, routes_per_token, flat.shape[1])


def _operands(
    rows: Array,
    weight: Array | QuantizedArray,
    rule: ActivationRule | None,
    implementation: Implementation,
    largest: Array | None = None,
) -> tuple[Array | Codes | Planes, Array | Codes]:
    """(rows as a product with the weight reads them, the weight)."""
    if isinstance(weight, QuantizedArray):
        return quantized_input(rows, weight, rule, largest=largest, implementation=implementation), weight.codes
    check_rule(rule, weight)
    return rows, weight


def _run_all(run: Callable[[_Launch, Array | None], Array], plan: _Plan) -> Array:
    """Every launch, each into the rows that the one before has left."""
    first, *others = plan.launches
    flat = run(first, None)
    for launch in others:
        flat = run(launch, flat)
    return flat
