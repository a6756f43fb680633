"""Finalize as one Pallas kernel: a program owns one token, reads its K rows once and writes one row.

Rows are loaded a few ahead of the one that is being normalised, so that memory is busy while a row's sum goes round the
warps. Bytes: T*K*H read + T*H written; nothing else of that size.
"""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as plt
from jaxtyping import Array, Float, Float32, Int32

from pallas_kernels._pallas import pallas_call
from pallas_kernels.dispatch import interpreted
from pallas_kernels.formats import round_to

_AHEAD = 4  # rows in flight


def _finalize(
    rows_ref,  # [T, K, H]
    topk_weights_ref,  # [T, K]
    topk_ids_ref,  # [T, K]
    gain_ref,  # [H]
    out_ref,  # [T, H]
    *,
    eps: float,
    gain_center: float,
    width: int,
):
    token = pl.program_id(0)
    _, routes_per_token, h = rows_ref.shape
    column = jnp.arange(width)
    inside = column < h
    gain = plt.load(gain_ref.at[column], mask=inside, other=0).astype(jnp.float32) + gain_center

    def load(k):
        route = jnp.int32(k)  # the interpreter takes no Python integer as an index
        is_kept = plt.load(topk_ids_ref.at[token, route]) >= 0
        topk_weight = jnp.where(is_kept, plt.load(topk_weights_ref.at[token, route]), 0.0)
        return plt.load(rows_ref.at[token, route, column], mask=inside & is_kept, other=0), topk_weight

    ahead = [load(k) for k in range(min(_AHEAD, routes_per_token))]
    total = jnp.zeros((width,), jnp.float32)
    for k in range(routes_per_token):
        row, topk_weight = ahead.pop(0)
        if k + _AHEAD < routes_per_token:
            ahead.append(load(k + _AHEAD))
        z = row.astype(jnp.float32) * gain
        total += z * (lax.rsqrt(jnp.sum(z * z) / h + eps) * topk_weight)
    plt.store(out_ref.at[token, column], round_to(total, out_ref.dtype).astype(out_ref.dtype), mask=inside)


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
    """See `pallas_kernels.finalize.finalize`."""
    tokens, _, h = rows.shape
    width = max(pl.next_power_of_2(h), 16)
    return pallas_call(
        functools.partial(_finalize, eps=eps, gain_center=gain_center, width=width),
        grid=(tokens,),
        out_shape=jax.ShapeDtypeStruct((tokens, h), out_dtype),
        num_warps=8 if width >= 2048 else 4,
        num_stages=1,
        interpret=interpreted() if interpret is None else interpret,
        name="muse_finalize",
    )(rows, topk_weights, topk_ids, weight)
