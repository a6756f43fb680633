"""The expert GEMMs on quantized weights as Pallas kernels: the loops of `expert_gemm.pallas`, fed by codes.

FP8 codes go to the matrix units as they are, in the flavour that the chip multiplies. Scales of rows multiply the sums
at the end, scales of blocks the partial sums of their 128 columns. MXFP4 codes are unpacked in registers: the low four
bits of the bytes are the even columns and the high four the odd ones, so the input comes as even and odd columns and
their two products are added; nothing is interleaved.
"""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental.pallas import triton as plt

from pallas_kernels._tile import load_tile
from pallas_kernels.expert_gemm.pallas import call_blocks, for_own_block, steps_of, store_rows
from pallas_kernels.expert_gemm.tiles import Tile
from pallas_kernels.formats import MX_BLOCK, decode_e2m1, decode_e8m0, round_to, swiglu
from pallas_kernels.route_map import RouteMap

_FP8_BLOCK = 128


def _dot(a, b):
    """a @ b.T with float32 sums; the units' own precision, which is exact for products of these operands."""
    precision = lax.Precision.HIGHEST if a.dtype == jnp.float32 else lax.Precision.DEFAULT
    return lax.dot_general(a, b, (((1,), (1,)), ((), ())), precision=precision, preferred_element_type=jnp.float32)


def _fp8_sums(
    x_ref, x_scale_ref, weight_ref, scale_ref, *, tile: Tile, expert, inputs, weight_row, row_mask, rows, cols
):
    """[rows, weight rows] float32 of each part of the block, scales applied."""
    depth = weight_ref.shape[2]
    has_blocks = len(scale_ref.shape) == 3
    # Pallas cannot make the zeros of a masked load in E4M3FNUZ, so those codes come as bytes.
    codes = lambda tile: lax.bitcast_convert_type(tile, jnp.float8_e4m3fnuz) if tile.dtype == jnp.uint8 else tile
    depth_limit = None if depth % tile.depth == 0 else depth

    def step(i, sums):
        d = i * tile.depth + jnp.arange(tile.depth)
        weight = codes(
            load_tile(weight_ref, weight_row, d, column_limit=depth_limit, row_mask=row_mask, lead=(expert,))
        )
        found = []
        for row, total in zip(inputs, sums, strict=True):
            part = _dot(codes(load_tile(x_ref, row, d, column_limit=depth_limit)), weight)
            if has_blocks:
                block = i * tile.depth // _FP8_BLOCK
                part = part * plt.load(x_scale_ref.at[row, block])[:, None]
                part = part * _load_masked(scale_ref.at[expert, weight_row // _FP8_BLOCK, block], row_mask)[None, :]
            found.append(total + part)
        return found

    zeros = [jnp.zeros((part.shape[0], weight_row.shape[0]), jnp.float32) for part in rows]
    sums = lax.fori_loop(0, steps_of(tile, depth, cols, rows), step, zeros)
    if has_blocks:
        return sums
    by_row = _load_masked(scale_ref.at[expert, weight_row], row_mask)[None, :]
    return [total * plt.load(x_scale_ref.at[row])[:, None] * by_row for row, total in zip(inputs, sums, strict=True)]


def _mxfp4_sums(
    even_ref, odd_ref, weight_ref, scale_ref, *, tile: Tile, expert, inputs, weight_row, row_mask, rows, cols
):
    """As `_fp8_sums`, of numbers [.., depth / 2] of even and of odd columns."""
    packed = weight_ref.shape[2]
    half = tile.depth // 2
    limit = None if packed % half == 0 else packed

    def step(i, sums):
        d = i * half + jnp.arange(half)
        codes = load_tile(weight_ref, weight_row, d, column_limit=limit, row_mask=row_mask, lead=(expert,))
        codes = codes.astype(jnp.int32)
        bytes_ = load_tile(
            scale_ref,
            weight_row,
            2 * d // MX_BLOCK,
            column_limit=None if limit is None else scale_ref.shape[2],
            row_mask=row_mask,
            lead=(expert,),
        )
        scale = decode_e8m0(bytes_.astype(jnp.int32))
        # An E2M1 number times a power of two is exact in bfloat16.
        even, odd = ((decode_e2m1(part) * scale).astype(even_ref.dtype) for part in (codes & 15, codes >> 4))
        return [
            total
            + _dot(load_tile(even_ref, row, d, column_limit=limit), even)
            + _dot(load_tile(odd_ref, row, d, column_limit=limit), odd)
            for row, total in zip(inputs, sums, strict=True)
        ]

    zeros = [jnp.zeros((part.shape[0], weight_row.shape[0]), jnp.float32) for part in rows]
    halved = Tile(cols=tile.cols, depth=half, num_warps=tile.num_warps, num_stages=tile.num_stages)
    return lax.fori_loop(0, steps_of(halved, packed, cols, rows), step, zeros)


def _load_masked(where, mask):
    return plt.load(where) if mask is None else plt.load(where, mask=mask, other=0)


def _gate_up(
    x_ref, other_ref, weight_ref, scale_ref, rows_ref, group_ref, *refs, sums_of, tile: Tile, routes_per_token: int
):
    out_ref = refs[-1]
    routes, f = out_ref.shape

    def multiply(rows, start, expert):
        tokens = [jnp.where(part < routes, part // routes_per_token, 0) for part in rows]
        pair = jnp.arange(2 * tile.cols)  # gate and up of a column side by side
        own_column = start + pair // 2
        sums = sums_of(
            x_ref,
            other_ref,
            weight_ref,
            scale_ref,
            tile=tile,
            expert=expert,
            inputs=tokens,
            weight_row=(pair % 2) * f + own_column,
            row_mask=None if f % tile.cols == 0 else own_column < f,
            rows=rows,
            cols=f,
        )
        for part, total in zip(rows, sums, strict=True):
            gate, up = lax.split(total.reshape(part.shape[0], tile.cols, 2), (1, 1), axis=2)
            values = swiglu(gate.reshape(gate.shape[:2]), up.reshape(up.shape[:2]), out_ref.dtype)
            store_rows(out_ref, part, start + jnp.arange(tile.cols), values)

    for_own_block(tile, rows_ref, group_ref, scale_ref.shape[0], routes, f, multiply)


def _down(x_ref, other_ref, weight_ref, scale_ref, rows_ref, group_ref, *refs, sums_of, tile: Tile):
    out_ref = refs[-1]
    routes, h = out_ref.shape

    def multiply(rows, start, expert):
        column = start + jnp.arange(tile.cols)
        sums = sums_of(
            x_ref,
            other_ref,
            weight_ref,
            scale_ref,
            tile=tile,
            expert=expert,
            inputs=[jnp.where(part < routes, part, 0) for part in rows],
            weight_row=column,
            row_mask=None if h % tile.cols == 0 else column < h,
            rows=rows,
            cols=h,
        )
        for part, total in zip(rows, sums, strict=True):
            store_rows(out_ref, part, column, round_to(total, out_ref.dtype).astype(out_ref.dtype))

    def clear(rows, start):
        for part in rows:
            zeros = jnp.zeros((part.shape[0], tile.cols), out_ref.dtype)
            store_rows(out_ref, part, start + jnp.arange(tile.cols), zeros)

    for_own_block(tile, rows_ref, group_ref, scale_ref.shape[0], routes, h, multiply, clear)


def gate_up(x, weight, routes: RouteMap, num_routes: int, dtype, tile: Tile, into, interpret) -> jax.Array:
    """See `pallas_kernels.expert_gemm.quantized.gate_up`."""
    inputs, sums_of = _inputs(x, weight)
    kernel = functools.partial(_gate_up, sums_of=sums_of, tile=tile, routes_per_token=num_routes // inputs[0].shape[0])
    shape = (num_routes, weight.values.shape[1] // 2)
    return _call("muse_gate_up", kernel, inputs, weight, routes, shape, dtype, tile, into, interpret)


def down(activation, weight, routes: RouteMap, dtype, tile: Tile, into, interpret) -> jax.Array:
    """See `pallas_kernels.expert_gemm.quantized.down`."""
    inputs, sums_of = _inputs(activation, weight)
    kernel = functools.partial(_down, sums_of=sums_of, tile=tile)
    shape = (inputs[0].shape[0], weight.values.shape[1])
    return _call("muse_down", kernel, inputs, weight, routes, shape, dtype, tile, into, interpret)


def _inputs(x, weight):
    """(the two arrays that a kernel reads its input from, what multiplies them)."""
    if weight.is_mxfp4:
        return (x[:, 0::2], x[:, 1::2]), _mxfp4_sums
    return (_bytes_of_fnuz(x.values), x.scales), _fp8_sums


def _bytes_of_fnuz(values: jax.Array) -> jax.Array:
    return lax.bitcast_convert_type(values, jnp.uint8) if values.dtype == jnp.float8_e4m3fnuz else values


def _call(name, kernel, inputs, weight, routes, shape, dtype, tile, into, interpret):
    kind = "mxfp4" if weight.is_mxfp4 else "fp8"
    arrays = (*inputs, _bytes_of_fnuz(weight.values), weight.scales)
    return call_blocks(
        f"{name}_{kind}", kernel, arrays, routes, jax.ShapeDtypeStruct(shape, dtype), tile, into, interpret
    )
