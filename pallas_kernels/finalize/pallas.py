"""Finalize as one Pallas kernel: a program owns one token, reads its K rows once and writes one row.

The K rows are read one after another into the same registers (H padded to a power of two), so the loads of the next row
overlap the arithmetic of this one. Bytes: T*K*H read + T*H written; nothing else of that size.
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


def _finalize(rows_ref, topk_weights_ref, topk_ids_ref, gain_ref, out_ref, *, eps: float, width: int):
    token = pl.program_id(0)
    _, routes_per_token, h = rows_ref.shape
    column = jnp.arange(width)
    inside = column < h
    gain = plt.load(gain_ref.at[column], mask=inside, other=0.0)
    total = jnp.zeros((width,), jnp.float32)
    for k in range(routes_per_token):
        route = jnp.int32(k)  # the interpreter takes no Python integer as an index
        route_id = plt.load(topk_ids_ref.at[token, route])
        topk_weight = plt.load(topk_weights_ref.at[token, route])
        row = plt.load(rows_ref.at[token, route, column], mask=inside & (route_id >= 0), other=0.0)
        z = row.astype(jnp.float32) * gain
        scale = lax.rsqrt(jnp.sum(z * z) / h + eps) * jnp.where(route_id >= 0, topk_weight, 0.0)
        total += z * scale
    plt.store(out_ref.at[token, column], round_to(total, out_ref.dtype).astype(out_ref.dtype), mask=inside)


def finalize(
    rows: Float[Array, "T K H"],
    topk_weights: Float32[Array, "T K"],
    topk_ids: Int32[Array, "T K"],
    gain: Float32[Array, "H"],
    eps: float,
    out_dtype: jnp.dtype,
    interpret: bool | None = None,
) -> jax.Array:
    """See `pallas_kernels.finalize.finalize`; `gain` has its centre already."""
    tokens, _, h = rows.shape
    width = max(pl.next_power_of_2(h), 16)
    return pallas_call(
        functools.partial(_finalize, eps=eps, width=width),
        grid=(tokens,),
        out_shape=jax.ShapeDtypeStruct((tokens, h), out_dtype),
        num_warps=8 if width >= 2048 else 4,
        num_stages=1,
        interpret=interpreted() if interpret is None else interpret,
        name="muse_finalize",
    )(rows, topk_weights, topk_ids, gain)
