"""Routing in plain XLA ops: scores, `jax.lax.top_k`, renormalised weights."""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float32

LOWEST = float(jnp.finfo(jnp.float32).min)
HIGHEST = float(jnp.finfo(jnp.float32).max)


def finite(x: jax.Array) -> jax.Array:
    """x with NaN replaced by the lowest finite float32 and infinities by the largest finite of their sign."""
    return jnp.where(jnp.isnan(x), LOWEST, jnp.clip(x, LOWEST, HIGHEST))


@jax.custom_jvp
def sigmoid(x: jax.Array) -> jax.Array:
    """1 / (1 + exp(-x)), with a derivative that is finite where exp(-x) is not."""
    return 1.0 / (1.0 + jnp.exp(-x))


@sigmoid.defjvp
def _sigmoid_jvp(primals: tuple[jax.Array], tangents: tuple[jax.Array]) -> tuple[jax.Array, jax.Array]:
    s = sigmoid(*primals)
    return s, s * (1.0 - s) * tangents[0]


def scores(logits: jax.Array, scoring: str) -> jax.Array:
    """Unbiased float32 scores of finite logits along the last axis; -inf logits score 0 in both modes."""
    if scoring == "sigmoid":
        return sigmoid(logits)
    raised = jnp.exp(logits - jnp.max(logits, axis=-1, keepdims=True))
    return raised / jnp.sum(raised, axis=-1, keepdims=True)


def route(
    logits: Float32[Array, "T E"],
    bias: Float32[Array, "E"],
    routes_per_token: int,
    scoring: str,
    eps: float,
    route_scale: float,
    interpret: bool | None = None,
) -> tuple[jax.Array, jax.Array]:
    """See `pallas_kernels.router.route`; `interpret` has no meaning here."""
    unbiased = scores(finite(logits), scoring)
    _, ids = lax.top_k(finite(unbiased + bias[None, :]), routes_per_token)
    chosen = jnp.take_along_axis(unbiased, ids, axis=1)
    weights = chosen / (jnp.sum(chosen, axis=1, keepdims=True) + eps) * route_scale
    return weights, ids.astype(jnp.int32)
