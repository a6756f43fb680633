"""Every boundary of one MoE block of a checkpoint, by any implementation: what `muse-jax dump` and `demo` run.

float32    weights and x widened, everything in float32                   profile "exact" for the reference
bfloat16   as stored, rounded where vLLM on AMD rounds                     profile "vllm", or another by name

Quantized experts keep their codes and scales in both; what the experts read is quantized as their format says.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Literal

import jax.numpy as jnp
import ml_dtypes
import numpy as np
from flax import nnx
from jax.sharding import Mesh

from muse_jax.checkpoint import QuantizedWeight
from muse_jax.config import MuseConfig
from muse_jax.moe import MuseMoE
from muse_jax.parallel import ShardedMoE
from muse_jax.quantization.inputs import ActivationRule
from muse_jax.reference import PROFILES, BlockSettings, run_block
from muse_jax.schedule import Schedule

DTYPES = {"float32": np.dtype(np.float32), "bfloat16": np.dtype(ml_dtypes.bfloat16)}
Implementation = Literal["pallas", "xla", "reference"]


def block_settings(config: MuseConfig) -> BlockSettings:
    """What the reference needs of a configuration."""
    return BlockSettings(
        routes_per_token=config.routes_per_token,
        output_multiplier=config.output_multiplier,
        norm_eps=config.norm_eps,
        post_norm_eps=config.post_norm_eps,
        route_scale=config.route_scale,
        scoring=config.scoring,
        score_eps=config.score_eps,
    )


def check_profile(profile: str | None, dtype: str, implementation: Implementation | None) -> str:
    """The profile to run: the given one or the dtype's own. Raises ValueError where it is not one this run can have."""
    own = "exact" if dtype == "float32" else "vllm"
    if profile is None or profile == own:
        return own
    if profile not in PROFILES:
        raise ValueError(f"profile is {profile!r}; expected one of {', '.join(PROFILES)}")
    if implementation != "reference":
        raise ValueError(
            f"profile is {profile!r}; {implementation or 'the default implementation'} in {dtype} computes {own!r} "
            "only, use --implementation reference"
        )
    if dtype == "float32" or profile == "exact":
        wanted = "bfloat16" if dtype == "float32" else "float32"
        raise ValueError(f"profile is {profile!r} and dtype {dtype}; this profile goes with --dtype {wanted}")
    return profile


def compute_boundaries(
    weights: Mapping[str, Any],
    config: MuseConfig,
    x: np.ndarray,
    *,
    dtype: str,
    implementation: Implementation | None = None,
    profile: str | None = None,
    mesh: Mesh | None = None,
    schedule: Schedule | None = None,
    activation_rule: ActivationRule | None = None,
) -> dict[str, np.ndarray]:
    """Every boundary of a block for x [T, D], as numpy arrays in the dtypes a dump file holds.

    Args:
      weights: one layer, as `muse_jax.checkpoint.load_layer` gives it.
      config: the checkpoint's configuration.
      x: the block's input; rounded or widened to `dtype`.
      dtype: "float32" or "bfloat16".
      implementation: "pallas" (interpreted on a CPU), "xla", "reference", or None for the best here.
      profile: the reference's roundings; None takes the dtype's own.
      mesh: run over its axes dp, ep, tp; None runs on one device. The reference rounds as vLLM's ranks of ep and tp do,
        each with its own scales of FP8 rows; the others take those of whole rows, as on one device.
      schedule: how sums over the mesh are computed; None for the defaults.
      activation_rule: how inputs of MXFP4 experts are quantized: "even", "floor", "rceil", or "w4a16" for not at all;
        None is "even".

    Raises ValueError for what does not fit together.
    """
    if dtype not in DTYPES:
        raise ValueError(f"dtype is {dtype!r}; expected {' or '.join(DTYPES)}")
    profile = check_profile(profile, dtype, implementation)
    if x.ndim != 2 or x.shape[1] != config.model_width:
        raise ValueError(f"x is {x.shape}; expected [T, {config.model_width}], the model width of the checkpoint")
    x = x.astype(DTYPES[dtype])
    if implementation == "reference":
        kept = lambda name, w: name.startswith("router_") or isinstance(w, QuantizedWeight)
        cast = {name: w if kept(name, w) else w.astype(DTYPES[dtype]) for name, w in weights.items()}
        # Unrounded sums are the same in any order, so "exact" has no ranks.
        sizes = {} if mesh is None or profile == "exact" else mesh.shape
        ranks = {axis: sizes[axis] for axis in ("ep", "tp") if axis in sizes}
        reduce_dtype = (schedule or Schedule()).reduce_dtype
        found = run_block(
            cast,
            x,
            block_settings(config),
            profile,
            activation_rule=activation_rule,
            **ranks,
            reduce_dtype=reduce_dtype,
        )
        return {name: v.astype(np.float32) if v.dtype == np.float64 else v for name, v in found.items()}
    if mesh is None:
        moe = MuseMoE.from_weights(
            config, weights, dtype=DTYPES[dtype], activation_rule=activation_rule, implementation=implementation
        )
    else:
        moe = ShardedMoE.from_weights(
            config,
            weights,
            mesh,
            dtype=DTYPES[dtype],
            schedule=schedule,
            activation_rule=activation_rule,
            implementation=implementation,
        )
    found = nnx.jit(lambda module, x: module.boundaries(x))(moe, jnp.asarray(x))
    return {name: np.asarray(value) for name, value in found.items()}
