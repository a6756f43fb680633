"""Routing as one Pallas kernel: a program owns one token, keeps its E scores in registers and takes the maximum K
times.

Each step finds the largest remaining biased score, then the lowest index that has it; the chosen lane is marked
taken, which ranks below every finite score. The K choices are then stored with their renormalised unbiased scores.
"""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as plt
from jaxtyping import Array, Float32

from pallas_kernels._pallas import pallas_call
from pallas_kernels.dispatch import interpreted
from pallas_kernels.router.xla import finite, scores


def _route(logits_ref, bias_ref, weights_ref, ids_ref, *, scoring: str, eps: float, route_scale: float, width: int):
    token = pl.program_id(0)
    experts = logits_ref.shape[1]
    routes_per_token = ids_ref.shape[1]
    lane = jnp.arange(width)
    inside = lane < experts
    logits = plt.load(logits_ref.at[token, lane], mask=inside, other=-jnp.inf)
    # Lanes past E must not count in a softmax; -inf there scores exactly 0 in both modes.
    unbiased = scores(jnp.where(inside, finite(logits), -jnp.inf), scoring)
    bias = plt.load(bias_ref.at[lane], mask=inside, other=0.0)
    remaining = jnp.where(inside, finite(unbiased + bias), -jnp.inf)

    slot = jnp.arange(pl.next_power_of_2(routes_per_token))
    ids = jnp.zeros(slot.shape, jnp.int32)
    chosen = jnp.zeros(slot.shape, jnp.float32)
    for k in range(routes_per_token):
        expert = jnp.min(jnp.where(remaining == jnp.max(remaining), lane, width))
        ids = jnp.where(slot == k, expert, ids)
        chosen = jnp.where(slot == k, jnp.sum(jnp.where(lane == expert, unbiased, 0.0)), chosen)
        remaining = jnp.where(lane == expert, -jnp.inf, remaining)

    weights = chosen / (jnp.sum(chosen) + eps) * route_scale
    plt.store(ids_ref.at[token, slot], ids, mask=slot < routes_per_token)
    plt.store(weights_ref.at[token, slot], weights, mask=slot < routes_per_token)


def route(
    logits: Float32[Array, "T E"],
    bias: Float32[Array, "E"],
    routes_per_token: int,
    scoring: str,
    eps: float,
    route_scale: float,
    interpret: bool | None = None,
) -> tuple[jax.Array, jax.Array]:
    """See `pallas_kernels.router.route`."""
    tokens, experts = logits.shape
    width = max(pl.next_power_of_2(experts), 32)
    weights, ids = pallas_call(
        functools.partial(_route, scoring=scoring, eps=eps, route_scale=route_scale, width=width),
        grid=(tokens,),
        out_shape=(
            jax.ShapeDtypeStruct((tokens, routes_per_token), jnp.float32),
            jax.ShapeDtypeStruct((tokens, routes_per_token), jnp.int32),
        ),
        num_warps=1,
        num_stages=1,
        interpret=interpreted() if interpret is None else interpret,
        name="muse_route",
    )(logits, bias)
    return weights, ids
