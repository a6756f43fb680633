"""Finalize in plain XLA ops: one fused pass over the rows."""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Float32, Int32

from pallas_kernels.formats import round_to


def finalize(
    rows: Float[Array, "T K H"],
    topk_weights: Float32[Array, "T K"],
    topk_ids: Int32[Array, "T K"],
    weight: Float[Array, "H"],
    eps: float,
    gain_center: float,
    out_dtype: jnp.dtype,
    interpret: bool | None = None,
) -> jax.Array:
    """See `pallas_kernels.finalize.finalize`; `interpret` has no meaning here."""
    gain = weight.astype(jnp.float32) + jnp.float32(gain_center)
    kept = jnp.where(topk_ids[:, :, None] >= 0, rows.astype(jnp.float32), 0.0)
    z = kept * gain[None, None, :]
    scale = jax.lax.rsqrt(jnp.mean(z * z, axis=2) + eps) * jnp.where(topk_ids >= 0, topk_weights, 0.0)
    return round_to(jnp.sum(z * scale[:, :, None], axis=1), out_dtype).astype(out_dtype)
