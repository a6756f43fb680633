"""Finalize as one Pallas kernel: a program owns one token, reads its K rows once and writes one row.

The rows of a token are one tile [K, H] (a few tiles where K * H is large), both padded to powers of two: one reduction
gives all K variances, and the sum over K stays within a thread. Bytes: T*K*H read + T*H written; nothing else of that
size.
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

_TILE = 2**15  # elements of a tile


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
    column = jnp.arange(width)
    inside = column < h
    gain = plt.load(gain_ref.at[column], mask=inside, other=0.0).astype(jnp.float32) + gain_center
    total = jnp.zeros((width,), jnp.float32)
    for first in range(0, routes_per_token, height):
        k = first + jnp.arange(height)
        route_id = plt.load(topk_ids_ref.at[token, k], mask=k < routes_per_token, other=-1)
        topk_weight = plt.load(topk_weights_ref.at[token, k], mask=route_id >= 0, other=0.0)
        mask = (route_id >= 0)[:, None] & inside[None, :]
        rows = plt.load(rows_ref.at[token, k[:, None], column[None, :]], mask=mask, other=0)
        z = rows.astype(jnp.float32) * gain[None, :]
        scale = lax.rsqrt(jnp.sum(z * z, axis=1) / h + eps) * topk_weight
        total += jnp.sum(z * scale[:, None], axis=0)
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
    tokens, routes_per_token, h = rows.shape
    width = max(pl.next_power_of_2(h), 16)
    height = max(1, min(pl.next_power_of_2(routes_per_token), _TILE // width))
    return pallas_call(
        functools.partial(_finalize, eps=eps, gain_center=gain_center, height=height, width=width),
        grid=(tokens,),
        out_shape=jax.ShapeDtypeStruct((tokens, h), out_dtype),
        num_warps=8 if height * width >= _TILE // 2 else 4,
        num_stages=1,
        interpret=interpreted() if interpret is None else interpret,
        name="muse_finalize",
    )(rows, topk_weights, topk_ids, weight)
