"""Routing of the block: float32 logits on its own wide input (before the squeeze to the latent width), then K experts.

router_logits = (x @ W.T) * output_multiplier            x widened to float32, float32 products and sums
topk_weights, topk_ids = route(router_logits)            `pallas_kernels.router`
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float, Float32, Int32

from muse_jax.config import MuseConfig
from pallas_kernels.dispatch import Implementation
from pallas_kernels.router import route


def router_logits(
    x: Float[Array, "T D"], weight: Float32[Array, "E D"], output_multiplier: float
) -> Float32[Array, "T E"]:
    """Logits of every expert, [T, E] float32. Source: spec b step 1 and b.1 (the multiplier commutes with the
    product).
    """
    with jax.named_scope("router_logits"):
        logits = lax.dot_general(
            x.astype(jnp.float32),
            weight,
            (((1,), (1,)), ((), ())),
            precision=lax.Precision.HIGHEST,
            preferred_element_type=jnp.float32,
        )
        return logits * jnp.float32(output_multiplier)


def choose_experts(
    logits: Float32[Array, "T E"],
    bias: Float32[Array, "E"],
    config: MuseConfig,
    *,
    implementation: Implementation | None = None,
) -> tuple[Float32[Array, "T K"], Int32[Array, "T K"]]:
    """(topk_weights, topk_ids) of logits under the configuration's scoring, experts in descending biased score."""
    return route(
        logits,
        bias,
        routes_per_token=config.routes_per_token,
        scoring=config.scoring,
        eps=config.score_eps,
        route_scale=config.route_scale,
        implementation=implementation,
    )
