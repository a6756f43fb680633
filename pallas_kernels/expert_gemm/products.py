"""The product of a row block with columns of its expert's weights, one function a format of weights.

    plain    p[r, o] = sum_i x[r, i] * w[e, o, i]
    fp8      p[r, o] = x_scale[r] * w_scale[e, o] * sum_i xq[r, i] * wq[e, o, i]                  scales of rows, or
             p[r, o] = sum_b x_scale[r, b] * w_scale[e, o / 128, b] * sum_i xq[r, i] * wq[e, o, i]      i in block b
    mxfp4    p[r, o] = sum_i x[r, i] * e2m1(wq[e, o, i]) * w_scale[e, o, i / 32]
FP8 codes go to the matrix units as they are, in the flavour that the chip multiplies, or as numbers where x holds
numbers. MXFP4 codes are unpacked in
registers: the four codes of a word are four neighbouring columns, so x comes as four planes, every fourth column of it,
and four products are added; nothing is interleaved.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as plt

from pallas_kernels._tile import dot_rows, load_tile
from pallas_kernels.block_sizes import CODES_A_WORD
from pallas_kernels.expert_gemm.tiles import Tile
from pallas_kernels.expert_gemm.words import unpack
from pallas_kernels.formats import FP8_BLOCK, MX_BLOCK


@dataclasses.dataclass(frozen=True, kw_only=True)
class Place:
    """Where in the arrays a program multiplies.

    expert: whose weights. rows: for each part of the row block, the rows of x that it reads. weight_row: rows of the
    expert's weight, of which row_mask says which exist (None: all). edge: whether columns of the output
    are left over. interpret: whether this runs in the interpreter.
    """

    expert: Any
    rows: Sequence[jax.Array]
    weight_row: jax.Array
    row_mask: jax.Array | None
    edge: bool
    interpret: bool


_LEAST_DEPTH = 16  # of a product

Product = Callable[[Tile, Sequence[Any], Place], list[jax.Array]]


def plain(tile: Tile, operands: Sequence[Any], place: Place) -> list[jax.Array]:
    """x [rows, n] and weight [E, out, n]; the float32 sums [rows, weight rows] of each part of the row block."""
    x_ref, weight_ref = operands
    depth = weight_ref.shape[2]
    limit = None if depth % tile.depth == 0 else depth

    def step(i, sums):
        d = i * tile.depth + jnp.arange(tile.depth)
        weight = _load_weight(weight_ref, place, d, limit)
        xs = [load_tile(x_ref, row, d, column_limit=limit) for row in place.rows]
        return [total + _dot(tile, x, weight) for x, total in zip(xs, sums, strict=True)]

    return _walk(tile, place, _steps(place, depth, tile.depth), step)


def fp8(tile: Tile, operands: Sequence[Any], place: Place) -> list[jax.Array]:
    """Codes of x and its scales, codes of the weight and its scales; sums as `plain`, scales applied."""
    x_ref, x_scale_ref, weight_ref, scale_ref = operands
    depth = weight_ref.shape[2]
    has_blocks = len(scale_ref.shape) == 3
    limit = None if depth % tile.depth == 0 else depth
    # Pallas cannot make the zeros of a masked load in E4M3FNUZ, so those codes come as bytes.
    codes = lambda tile: lax.bitcast_convert_type(tile, jnp.float8_e4m3fnuz) if tile.dtype == jnp.uint8 else tile

    def step(i, sums):
        d = i * tile.depth + jnp.arange(tile.depth)
        weight = codes(_load_weight(weight_ref, place, d, limit))
        if x_ref.dtype == jnp.float16:
            weight = weight.astype(jnp.float16)
        found = []
        for row, total in zip(place.rows, sums, strict=True):
            part = _dot(tile, codes(load_tile(x_ref, row, d, column_limit=limit)), weight)
            if has_blocks:
                block = i * tile.depth // FP8_BLOCK
                by_column = _load_masked(
                    scale_ref.at[place.expert, place.weight_row // FP8_BLOCK, block], place.row_mask
                )
                part = _scale(tile, part, plt.load(x_scale_ref.at[row, block]), by_column)
            found.append(total + part)
        return found

    sums = _walk(tile, place, _steps(place, depth, tile.depth), step, transpose=False)
    if not has_blocks:
        by_column = _load_masked(scale_ref.at[place.expert, place.weight_row], place.row_mask)
        sums = [
            _scale(tile, total, plt.load(x_scale_ref.at[row]), by_column)
            for row, total in zip(place.rows, sums, strict=True)
        ]
    return [_rows_first(tile, total) for total in sums]


def mxfp4(tile: Tile, operands: Sequence[Any], place: Place) -> list[jax.Array]:
    """Planes of x [4, rows, n / 4], words of the weight [E, out, n / 4] and its scales [E, out, n / 32]; as `plain`."""
    planes_ref, weight_ref, scale_ref = operands
    words = weight_ref.shape[2]
    depth = max(_LEAST_DEPTH, tile.depth // CODES_A_WORD)
    words_a_scale = MX_BLOCK // CODES_A_WORD
    scales = max(1, depth // words_a_scale)
    limit = None if words % depth == 0 else words

    def step(i, sums):
        d = i * depth + jnp.arange(depth)
        codes = _load_weight(weight_ref, place, d, limit)
        blocks = i * depth // words_a_scale + jnp.arange(scales)
        scale = _load_weight(scale_ref, place, blocks, None if limit is None else scale_ref.shape[2])
        wide = (scale.shape[0], scales, depth // scales)
        spread = lambda own: jnp.broadcast_to(own[:, :, None], wide).reshape(codes.shape)
        weights = unpack(codes, scale, spread, planes_ref.dtype, interpret=place.interpret)
        found = []
        for row, total in zip(place.rows, sums, strict=True):
            for plane, weight in enumerate(weights):
                x = load_tile(planes_ref, row, d, column_limit=limit, lead=(plane,))
                total = total + _dot(tile, x, weight)
            found.append(total)
        return found

    return _walk(tile, place, _steps(place, words, depth), step)


def _walk(tile: Tile, place: Place, steps, step, *, transpose: bool = True) -> list[jax.Array]:
    """The sums after all steps of the contraction, rows first."""
    width = place.weight_row.shape[0]
    zeros = [
        jnp.zeros((width, row.shape[0]) if tile.weights_first else (row.shape[0], width), jnp.float32)
        for row in place.rows
    ]
    sums = lax.fori_loop(0, steps, step, zeros)
    return [_rows_first(tile, total) for total in sums] if transpose else sums


def _steps(place: Place, depth: int, of: int):
    """Steps of so many columns that cover the contraction: a constant, but for masked loads a number only known in the
    run.

    Of a short loop whose length it knows, LLVM makes straight code; with masks that spills registers on both AMD chips.
    """
    steps = pl.cdiv(depth, of)
    if not place.edge and depth % of == 0:
        return steps
    return jnp.minimum(jnp.max(place.rows[0]) + steps, steps).astype(jnp.int32)


def _dot(tile: Tile, x: jax.Array, weight: jax.Array) -> jax.Array:
    """x @ weight.T in float32, or weight @ x.T where the tile says so; exact products."""
    return dot_rows(weight, x) if tile.weights_first else dot_rows(x, weight)


def _scale(tile: Tile, sums: jax.Array, by_row: jax.Array, by_column: jax.Array) -> jax.Array:
    """sums [rows, columns] times a scale a row and one a column."""
    if tile.weights_first:
        by_row, by_column = by_column, by_row
    return sums * by_row[:, None] * by_column[None, :]


def _rows_first(tile: Tile, sums: jax.Array) -> jax.Array:
    return sums.T if tile.weights_first else sums


def _load_weight(ref, place: Place, column, limit):
    return load_tile(ref, place.weight_row, column, column_limit=limit, row_mask=place.row_mask, lead=(place.expert,))


def _load_masked(where, mask):
    return plt.load(where) if mask is None else plt.load(where, mask=mask, other=0)
