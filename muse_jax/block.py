"""The block as pure functions of a layer's weights, but for the experts (`muse_jax.experts`): for one device or many.

    router_logits -> topk_ids, topk_weights;   latent -> expert_input       before_experts, on the D-wide input
    combined[t] = sum_k topk_weights[t, k] * norm(expert_rows[t, k])        combine
    out = combined @ post_expert_proj.T                                     project
`weights` holds a layer's arrays by the names of `muse_jax.checkpoint.load_layer`; what a function does not read may be
missing.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
from jax.typing import DTypeLike
from jaxtyping import Array, Float, Float32, Int32

from muse_jax.config import MuseConfig
from muse_jax.norm import rms_norm
from muse_jax.router import choose_experts, router_logits
from pallas_kernels.dispatch import Implementation
from pallas_kernels.finalize import finalize
from pallas_kernels.linear import linear

Weights = Mapping[str, Any]


def before_experts(
    weights: Weights,
    x: Float[Array, "T D"],
    config: MuseConfig,
    *,
    num_tokens: Int32[Array, ""] | int | None = None,
    implementation: Implementation | None = None,
) -> dict[str, jax.Array]:
    """The boundaries x, router_logits, topk_ids, topk_weights, latent and expert_input.

    num_tokens: rows from there on are padding, whose routes have the id -1; None where every row is a token.
    Raises ValueError where x is not [T, D], TypeError where its dtype is not that of the weights.
    """
    dtype = weights["pre_expert_proj"].dtype
    if x.ndim != 2 or x.shape[1] != config.model_width:
        raise ValueError(f"x is {x.shape}; expected [T, {config.model_width}]")
    if x.dtype != dtype:
        raise TypeError(f"x is {x.dtype} and the parameters are {dtype}; cast x or load the block as {x.dtype}")
    logits = router_logits(x, weights["router_weight"], config.output_multiplier, implementation=implementation)
    topk_weights, topk_ids = choose_experts(logits, weights["router_bias"], config, implementation=implementation)
    if num_tokens is not None:
        topk_ids = jnp.where(jnp.arange(x.shape[0])[:, None] < num_tokens, topk_ids, -1)
    with jax.named_scope("latent"):
        latent = linear(x, weights["pre_expert_proj"], implementation=implementation)
    with jax.named_scope("expert_input"):
        expert_input = rms_norm(latent, weights["pre_expert_norm"], eps=config.norm_eps)
    return {
        "x": x,
        "router_logits": logits,
        "topk_ids": topk_ids,
        "topk_weights": topk_weights,
        "latent": latent,
        "expert_input": expert_input,
    }


def combine(
    weights: Weights,
    rows: Float[Array, "T K H"],
    topk_weights: Float32[Array, "T K"],
    topk_ids: Int32[Array, "T K"],
    config: MuseConfig,
    *,
    out_dtype: DTypeLike | None = None,
    implementation: Implementation | None = None,
) -> Float[Array, "T H"]:
    """The boundary combined in out_dtype (None: that of rows); routes with a negative id are left out."""
    return finalize(
        rows,
        topk_weights,
        topk_ids,
        weights["post_expert_norm"],
        eps=config.post_norm_eps,
        out_dtype=out_dtype,
        implementation=implementation,
    )


def normed_rows(weights: Weights, rows: Float[Array, "T K H"], config: MuseConfig) -> Float32[Array, "T K H"]:
    """The boundary normed_rows, which `combine` keeps in registers."""
    return rms_norm(rows, weights["post_expert_norm"], eps=config.post_norm_eps, gain_first=True, out_dtype=jnp.float32)


def project(
    weights: Weights, combined: Float[Array, "T H"], *, implementation: Implementation | None = None
) -> Float[Array, "T D"]:
    """The boundary out."""
    with jax.named_scope("out"):
        return linear(combined, weights["post_expert_proj"], implementation=implementation)
