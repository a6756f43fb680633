"""The expert GEMMs as Pallas kernels, lowered through Triton for AMD (and NVIDIA) GPUs.

A program owns one row block of one expert and `cols` output columns: it gathers its rows, walks the contraction in
steps of `depth` with float32 accumulators, and stores each row at its route's own place. Nothing is padded in memory:
empty rows of a block point past the array and are never stored. Weights are read once for each row block of their
expert: a block of 192 rows is two products, of 128 rows and of 64, with the same weights.
"""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as plt
from jaxtyping import Array, Float

from pallas_kernels._pallas import pallas_call
from pallas_kernels._tile import dot_rows, load_tile
from pallas_kernels.dispatch import interpreted
from pallas_kernels.expert_gemm.tiles import Tile
from pallas_kernels.formats import round_to, swiglu
from pallas_kernels.route_map import UNUSED, RouteMap


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


def steps_of(tile: Tile, depth: int, columns: int, rows):
    """Steps of `tile.depth` that cover the contraction: a constant, but for masked loads a number only known in the
    run.

    Of a short loop whose length it knows, LLVM makes straight code; with masks that spills registers on both AMD chips.
    """
    steps = pl.cdiv(depth, tile.depth)
    if depth % tile.depth == 0 and columns % tile.cols == 0:
        return steps
    return jnp.minimum(jnp.max(rows[0]) + steps, steps).astype(jnp.int32)


def store_rows(out_ref, rows, column, values):
    """Each row at its route's own place; rows past the array are empty."""
    routes, columns = out_ref.shape
    keep = (rows < routes)[:, None] & (column < columns)[None, :]
    plt.store(out_ref.at[rows[:, None], column[None, :]], values, mask=keep)


def _gate_up(x_ref, weight_ref, rows_ref, group_ref, *refs, tile: Tile, routes_per_token: int):
    out_ref = refs[-1]  # before it, the array that it shares its memory with, if there is one
    experts, _, depth = weight_ref.shape
    routes, f = out_ref.shape

    def multiply(rows, start, expert):
        tokens = [jnp.where(part < routes, part // routes_per_token, 0) for part in rows]
        depth_limit = None if depth % tile.depth == 0 else depth
        # One product gives both halves, gate and up of a column side by side: matrix units are fed better by one wide
        # operand than by two, and a thread holds neighbouring columns, so that taking them apart moves nothing.
        pair = jnp.arange(2 * tile.cols)
        own_column = start + pair // 2
        weight_row = (pair % 2) * f + own_column
        row_mask = None if f % tile.cols == 0 else own_column < f

        def step(i, sums):
            d = i * tile.depth + jnp.arange(tile.depth)
            weight = load_tile(weight_ref, weight_row, d, column_limit=depth_limit, row_mask=row_mask, lead=(expert,))
            xs = [load_tile(x_ref, token, d, column_limit=depth_limit) for token in tokens]
            return [total + dot_rows(x, weight) for x, total in zip(xs, sums, strict=True)]

        zeros = [jnp.zeros((part.shape[0], 2 * tile.cols), jnp.float32) for part in rows]
        sums = lax.fori_loop(0, steps_of(tile, depth, f, rows), step, zeros)
        for part, total in zip(rows, sums, strict=True):
            gate, up = lax.split(total.reshape(part.shape[0], tile.cols, 2), (1, 1), axis=2)
            values = swiglu(gate.reshape(gate.shape[:2]), up.reshape(up.shape[:2]), out_ref.dtype)
            store_rows(out_ref, part, start + jnp.arange(tile.cols), values)

    for_own_block(tile, rows_ref, group_ref, experts, routes, f, multiply)


def _down(activation_ref, weight_ref, rows_ref, group_ref, *refs, tile: Tile):
    out_ref = refs[-1]
    experts, _, depth = weight_ref.shape
    routes, h = out_ref.shape

    def multiply(rows, start, expert):
        column = start + jnp.arange(tile.cols)
        own_rows = [jnp.where(part < routes, part, 0) for part in rows]
        depth_limit = None if depth % tile.depth == 0 else depth
        row_mask = None if h % tile.cols == 0 else column < h

        def step(i, totals):
            d = i * tile.depth + jnp.arange(tile.depth)
            weight = load_tile(weight_ref, column, d, column_limit=depth_limit, row_mask=row_mask, lead=(expert,))
            activations = [load_tile(activation_ref, own_row, d, column_limit=depth_limit) for own_row in own_rows]
            return [total + dot_rows(a, weight) for a, total in zip(activations, totals, strict=True)]

        zeros = [jnp.zeros((part.shape[0], tile.cols), jnp.float32) for part in rows]
        totals = lax.fori_loop(0, steps_of(tile, depth, h, rows), step, zeros)
        for part, total in zip(rows, totals, strict=True):
            store_rows(out_ref, part, column, round_to(total, out_ref.dtype).astype(out_ref.dtype))

    def clear(rows, start):
        column = start + jnp.arange(tile.cols)
        for part in rows:
            store_rows(out_ref, part, column, jnp.zeros((part.shape[0], tile.cols), out_ref.dtype))

    for_own_block(tile, rows_ref, group_ref, experts, routes, h, multiply, clear)


def gate_up(
    x: Float[Array, "T H"],
    weight: Float[Array, "E F2 H"],
    routes: RouteMap,
    num_routes: int,
    tile: Tile,
    into: Float[Array, "R F"] | None = None,
    interpret: bool | None = None,
) -> Float[Array, "R F"]:
    """See `pallas_kernels.expert_gemm.gate_up`."""
    kernel = functools.partial(_gate_up, tile=tile, routes_per_token=num_routes // x.shape[0])
    out_shape = jax.ShapeDtypeStruct((num_routes, weight.shape[1] // 2), x.dtype)
    return call_blocks("muse_gate_up", kernel, (x, weight), routes, out_shape, tile, into, interpret)


def down(
    activation: Float[Array, "R F"],
    weight: Float[Array, "E H F"],
    routes: RouteMap,
    tile: Tile,
    into: Float[Array, "R H"] | None = None,
    interpret: bool | None = None,
) -> Float[Array, "R H"]:
    """See `pallas_kernels.expert_gemm.down`."""
    kernel = functools.partial(_down, tile=tile)
    out_shape = jax.ShapeDtypeStruct((activation.shape[0], weight.shape[1]), activation.dtype)
    return call_blocks("muse_down", kernel, (activation, weight), routes, out_shape, tile, into, interpret)


def call_blocks(name, kernel, arrays, routes, out_shape, tile, into, interpret):
    """Run `kernel(*arrays, rows, group, [into,] out)` over the row blocks and column tiles of an output [R, columns].

    into: the rows that the kernel does not store; its memory becomes the output's.
    """
    return pallas_call(
        kernel,
        grid=_grid(tile, routes.group.shape[0], out_shape.shape[1]),
        out_shape=out_shape,
        num_warps=tile.num_warps,
        num_stages=tile.num_stages,
        interpret=interpreted() if interpret is None else interpret,
        name=name,
        aliases=None if into is None else {len(arrays) + 2: 0},
    )(*arrays, routes.rows, routes.group, *(() if into is None else (into,)))
