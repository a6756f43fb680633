"""Finalize as one Pallas kernel: a program owns one token, reads its K rows and writes one row.

The rows of a token are walked twice in tiles [K, C]: for their mean squares, then for the weighted sum, when they come
from the cache. Holding them in registers between would leave too few programs on a multiprocessor to keep its memory
busy. Bytes from memory: T*K*H read + T*H written; nothing else of that size.
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

_TILE = 2**12  # elements of a tile


def _finalize(
    rows_ref,  # [T, K, H]
    topk_weights_ref,  # [T, K]
    topk_ids_ref,  # [T, K]
    gain_ref,  # [H]
    out_ref,  # [T, H]
    *,
    eps: float,
    gain_center: float,
    height: int,
    width: int,
):
    token = pl.program_id(0)
    _, routes_per_token, h = rows_ref.shape
    k = jnp.arange(height)
    route_id = plt.load(topk_ids_ref.at[token, k], mask=k < routes_per_token, other=-1)
    topk_weight = plt.load(topk_weights_ref.at[token, k], mask=route_id >= 0, other=0.0)

    def gained(start):
        column = start + jnp.arange(width)
        inside = None if h % width == 0 else column < h
        mask = (route_id >= 0)[:, None] if inside is None else (route_id >= 0)[:, None] & inside[None, :]
        gain = plt.load(gain_ref.at[column], mask=inside, other=None if inside is None else 0)
        rows = plt.load(
            rows_ref.at[token, k[:, None], column[None, :]], mask=jnp.broadcast_to(mask, (height, width)), other=0
        )
        return column, inside, rows.astype(jnp.float32) * (gain.astype(jnp.float32) + gain_center)[None, :]

    squares = jnp.zeros((height, width), jnp.float32)
    for start in range(0, h, width):
        _, _, z = gained(start)
        squares += z * z
    scale = lax.rsqrt(jnp.sum(squares, axis=1) / h + eps) * topk_weight
    for start in range(0, h, width):
        column, inside, z = gained(start)
        total = round_to(jnp.sum(z * scale[:, None], axis=0), out_ref.dtype)
        plt.store(out_ref.at[token, column], total.astype(out_ref.dtype), mask=inside)


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
    tokens, routes_per_token, h = rows.shape
    height = pl.next_power_of_2(routes_per_token)
    width = max(16, min(pl.next_power_of_2(h), _TILE // height))
    return pallas_call(
        functools.partial(_finalize, eps=eps, gain_center=gain_center, height=height, width=width),
        grid=(tokens,),
        out_shape=jax.ShapeDtypeStruct((tokens, h), out_dtype),
        num_warps=4,
        num_stages=1,
        interpret=interpreted() if interpret is None else interpret,
        name="muse_finalize",
    )(rows, topk_weights, topk_ids, weight)
