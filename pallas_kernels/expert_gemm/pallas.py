"""The expert GEMMs as Pallas kernels, lowered through Triton for AMD (and NVIDIA) GPUs.

A program owns one row block of one expert and `cols` output columns: it gathers its rows, walks the contraction in
steps of `depth` with float32 accumulators, and stores each row at its route's own place. Nothing is padded in memory:
empty rows of a block point past the array and are never stored. Weights are read once for each row block of their
expert: a block of 192 rows is two products, of 128 rows and of 64, with the same weights.
"""

from __future__ import annotations

import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as plt
from jax.typing import DTypeLike
from jaxtyping import Array, Float

from pallas_kernels._pallas import pallas_call
from pallas_kernels.dispatch import interpreted
from pallas_kernels.expert_gemm.codes import Codes, Input, Planes, Weight, hold, shape_of
from pallas_kernels.expert_gemm.products import Place, Product, fp8, mxfp4, plain
from pallas_kernels.expert_gemm.tiles import Tile
from pallas_kernels.formats import round_to, swiglu
from pallas_kernels.route_map import UNUSED, RouteMap
from pallas_kernels.target import on_nvidia


def _block_and_column(tile: Tile, blocks: int, columns: int) -> tuple[jax.Array, jax.Array]:
    """This program's row block and column tile: `tile.group` row blocks share a column tile before the next one."""
    program = pl.program_id(0)
    column_tiles = pl.cdiv(columns, tile.cols)
    if tile.group == 1:
        return program // column_tiles, program % column_tiles
    span = tile.group * column_tiles
    within = program % span
    return program // span * tile.group + within % tile.group, within // tile.group


def _grid(tile: Tile, blocks: int, columns: int) -> tuple[int]:
    return (pl.cdiv(blocks, tile.group) * tile.group * pl.cdiv(columns, tile.cols),)


def _parts(size: int) -> list[tuple[int, int]]:
    """(first row, rows) of the powers of two that make up `size`: 192 is 128 rows and 64."""
    parts, start = [], 0
    while start < size:
        part = 1 << ((size - start).bit_length() - 1)
        parts.append((start, part))
        start += part
    return parts


def for_own_block(tile: Tile, rows_ref, group_ref, experts: int, routes: int, columns: int, multiply, clear=None):
    """Run this program's share: `multiply(rows, start, expert)` with as many rows as its block needs.

    `rows` is a list, one array a power of two; `start` is the first of its `tile.cols` columns. `clear(rows, start)` is
    for a block of masked routes, which no expert multiplies.
    """
    blocks, block_rows = rows_ref.shape
    block, column_tile = _block_and_column(tile, blocks, columns)
    start = column_tile * tile.cols
    group = plt.load(group_ref.at[block], mask=block < blocks, other=UNUSED)
    is_expert = (group >= 0) & (group < experts)

    def rows(size):
        return [plt.load(rows_ref.at[block, first + jnp.arange(part)]) for first, part in _parts(size)]

    below = is_expert
    sizes = tile.sizes(block_rows)
    for size in sizes[:-1]:
        # Live rows come first in a block: the one at `size` says whether that many are enough.
        beyond = plt.load(rows_ref.at[block, jnp.int32(size)], mask=is_expert, other=routes)
        pl.when(below & (beyond >= routes))(lambda size=size: multiply(rows(size), start, group))
        below = below & (beyond < routes)
    pl.when(below)(lambda: multiply(rows(sizes[-1]), start, group))
    if clear is not None:
        pl.when(~is_expert & (group != UNUSED))(lambda: clear(rows(block_rows), start))


def store_rows(out_ref, rows, column, values):
    """Each row at its route's own place; rows past the array are empty."""
    routes, columns = out_ref.shape
    keep = (rows < routes)[:, None] & (column < columns)[None, :]
    plt.store(out_ref.at[rows[:, None], column[None, :]], values, mask=keep)


def _gate_up(*refs, product: Product, operands: int, experts: int, tile: Tile, routes_per_token: int, interpret: bool):
    inputs, (rows_ref, group_ref), out_ref = refs[:operands], refs[operands : operands + 2], refs[-1]
    routes, f = out_ref.shape

    def multiply(rows, start, expert):
        # One product gives both halves, gate and up of a column side by side: matrix units are fed better by one wide
        # operand than by two, and a thread holds neighbouring columns, so that taking them apart moves nothing.
        pair = jnp.arange(2 * tile.cols)
        own_column = start + pair // 2
        is_ragged = f % tile.cols != 0
        place = Place(
            expert=expert,
            rows=[jnp.where(part < routes, part // routes_per_token, 0) for part in rows],
            weight_row=(pair % 2) * f + own_column,
            row_mask=own_column < f if is_ragged else None,
            edge=is_ragged,
            interpret=interpret,
        )
        for part, total in zip(rows, product(tile, inputs, place), strict=True):
            gate, up = lax.split(total.reshape(part.shape[0], tile.cols, 2), (1, 1), axis=2)
            values = swiglu(gate.reshape(gate.shape[:2]), up.reshape(up.shape[:2]), out_ref.dtype)
            store_rows(out_ref, part, start + jnp.arange(tile.cols), values)

    for_own_block(tile, rows_ref, group_ref, experts, routes, f, multiply)


def _down(*refs, product: Product, operands: int, experts: int, tile: Tile, interpret: bool):
    inputs, (rows_ref, group_ref), out_ref = refs[:operands], refs[operands : operands + 2], refs[-1]
    routes, h = out_ref.shape

    def multiply(rows, start, expert):
        column = start + jnp.arange(tile.cols)
        is_ragged = h % tile.cols != 0
        place = Place(
            expert=expert,
            rows=[jnp.where(part < routes, part, 0) for part in rows],
            weight_row=column,
            row_mask=column < h if is_ragged else None,
            edge=is_ragged,
            interpret=interpret,
        )
        for part, total in zip(rows, product(tile, inputs, place), strict=True):
            store_rows(out_ref, part, column, round_to(total, out_ref.dtype).astype(out_ref.dtype))

    def clear(rows, start):
        column = start + jnp.arange(tile.cols)
        for part in rows:
            store_rows(out_ref, part, column, jnp.zeros((part.shape[0], tile.cols), out_ref.dtype))

    for_own_block(tile, rows_ref, group_ref, experts, routes, h, multiply, clear)


def gate_up(
    x: Input, weight: Weight, routes: RouteMap, num_routes: int, dtype: DTypeLike, tile: Tile, into, interpret
) -> Float[Array, "R F"]:
    """See `pallas_kernels.expert_gemm.gate_up`."""
    shape = jax.ShapeDtypeStruct((num_routes, _out_columns(weight) // 2), dtype)
    kernel = functools.partial(_gate_up, routes_per_token=num_routes // shape_of(x)[0])
    return _call("muse_gate_up", kernel, x, weight, routes, shape, tile, into, interpret)


def down(
    activation: Input, weight: Weight, routes: RouteMap, dtype: DTypeLike, tile: Tile, into, interpret
) -> Float[Array, "R H"]:
    """See `pallas_kernels.expert_gemm.down`."""
    shape = jax.ShapeDtypeStruct((shape_of(activation)[0], _out_columns(weight)), dtype)
    return _call("muse_down", _down, activation, weight, routes, shape, tile, into, interpret)


def _out_columns(weight: Weight) -> int:
    return (weight.values if isinstance(weight, Codes) else weight).shape[1]


def _call(name, kernel, x, weight, routes, out_shape, tile, into, interpret):
    """Run `kernel` over the row blocks and column tiles of an output [R, columns].

    into: the rows that the kernel does not store; its memory becomes the output's.
    """
    interpret = interpreted() if interpret is None else interpret
    suffix, product, arrays, experts = _operands(x, weight, interpret)
    return pallas_call(
        functools.partial(
            kernel, product=product, operands=len(arrays), experts=experts, tile=tile, interpret=interpret
        ),
        grid=_grid(tile, routes.group.shape[0], out_shape.shape[1]),
        out_shape=out_shape,
        num_warps=tile.num_warps,
        num_stages=tile.num_stages,
        interpret=interpret,
        name=name + suffix,
        aliases=None if into is None else {len(arrays) + 2: 0},
    )(*arrays, routes.rows, routes.group, *(() if into is None else (into,)))


def _operands(x: Input, weight: Weight, interpret: bool) -> tuple[str, Product, tuple[Any, ...], int]:
    """(what the kernel's name ends with, its product, the arrays that it reads, experts)."""
    if isinstance(weight, Codes) and isinstance(x, Codes):
        # On NVIDIA, Triton multiplies float8 by mma.sync in float16; numbers in float16 by the faster wgmma.
        values = x.values.astype(jnp.float16) if on_nvidia() and not interpret else _bytes_of_fnuz(x.values)
        arrays = (values, x.scales, _bytes_of_fnuz(weight.values), weight.scales)
        return "_fp8", fp8, arrays, weight.scales.shape[0]
    if isinstance(weight, Codes):
        held = hold(weight)
        planes = x if isinstance(x, Planes) else Planes.of(jnp.asarray(x))
        return "_mxfp4", mxfp4, (planes.columns, held.values, held.scales), held.scales.shape[0]
    return "", plain, (x, weight), weight.shape[0]


def _bytes_of_fnuz(values: jax.Array) -> jax.Array:
    return lax.bitcast_convert_type(values, jnp.uint8) if values.dtype == jnp.float8_e4m3fnuz else values
