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
from pallas_kernels.dispatch import Implementation, resolve
from pallas_kernels.formats import round_bf16
from pallas_kernels.router import route

MANY_TOKENS = 256  # from here on the product is bound by operations, not by the weight's bytes


def router_logits(
    x: Float[Array, "T D"],
    weight: Float32[Array, "E D"],
    output_multiplier: float,
    *,
    implementation: Implementation | None = None,
) -> Float32[Array, "T E"]:
    """Logits of every expert, [T, E] float32. Source: spec b step 1 and b.1 (the multiplier commutes with the
    product).

    With many bfloat16 tokens on a GPU the weight is taken as the sum of three bfloat16 planes, which is exact: their
    products with x are exact in float32 as well, and matrix units multiply bfloat16 some ten times faster.
    """
    with jax.named_scope("router_logits"):
        if x.dtype == jnp.bfloat16 and x.shape[0] >= MANY_TOKENS and resolve(implementation) == "pallas":
            planes = _planes(weight).reshape(3 * weight.shape[0], weight.shape[1])
            # XLA would merge this product with the other one of x, and copy both weights together to do so.
            parts = _product(lax.optimization_barrier(x), planes).reshape(x.shape[0], 3, weight.shape[0])
            logits = (parts[:, 2] + parts[:, 1]) + parts[:, 0]
        else:
            logits = _product(x.astype(jnp.float32), weight)
        return logits * jnp.float32(output_multiplier)


def _planes(weight: Float32[Array, "E D"]) -> Array:
    """[3, E, D] bfloat16, whose sum over the first axis is the weight: each plane has the leading eight bits of what
    the ones before it left.
    """
    high = round_bf16(weight)
    middle = round_bf16(weight - high)
    # One fused pass writes all three; a concatenation would copy each of them once more.
    plane = lax.broadcasted_iota(jnp.int32, (3, 1, 1), 0)
    planes = jnp.where(plane == 0, high, jnp.where(plane == 1, middle, (weight - high) - middle))
    return planes.astype(jnp.bfloat16)


def _product(x: jax.Array, weight: jax.Array) -> jax.Array:
    """x @ weight.T with float32 sums."""
    return lax.dot_general(
        x, weight, (((1,), (1,)), ((), ())), precision=lax.Precision.HIGHEST, preferred_element_type=jnp.float32
    )


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
