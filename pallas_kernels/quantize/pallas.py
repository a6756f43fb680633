"""Quantization of a GEMM's input rows as one Pallas kernel: a program reads one row and writes what the GEMM reads.

The arithmetic is that of `pallas_kernels.quantize.xla`. Bytes: R*n read, R*n of codes (FP8) or numbers (MXFP4) written.
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
from pallas_kernels.block_sizes import CODES_A_WORD
from pallas_kernels.dispatch import interpreted
from pallas_kernels.formats import (
    E4M3_DTYPE,
    MX_BLOCK,
    Flavour,
    Rule,
    decode_e2m1,
    decode_e4m3,
    decode_e8m0,
    encode_e2m1,
    magnitude_bits,
    mx_exponent,
    mx_scale,
)
from pallas_kernels.quantize.xla import fp8_codes, largest_magnitudes


def _fp8(x_ref, codes_ref, scales_ref, *, flavour: Flavour, width: int):
    row, n = pl.program_id(0), x_ref.shape[1]
    column = jnp.arange(width)
    inside = column < n
    x = plt.load(x_ref.at[row, column], mask=inside, other=0).astype(jnp.float32)
    groups = scales_ref.shape[1]
    grouped = x.reshape(1, width) if groups == 1 else x.reshape(width * groups // n, n // groups)
    codes, scales = fp8_codes(grouped, largest_magnitudes(grouped), flavour)
    group = jnp.arange(scales.shape[0])
    plt.store(scales_ref.at[row, group], scales, mask=group < groups)
    codes = codes.reshape(width)
    if codes_ref.dtype != jnp.uint8:
        codes = decode_e4m3(codes, flavour)
    plt.store(codes_ref.at[row, column], codes.astype(codes_ref.dtype), mask=inside)


def _mxfp4(x_ref, planes_ref, *, rule: Rule, width: int):
    row, words = pl.program_id(0), planes_ref.shape[2]
    word = jnp.arange(width)
    inside = word < words
    planes = [
        plt.load(x_ref.at[row, CODES_A_WORD * word + plane], mask=inside, other=0).astype(jnp.float32)
        for plane in range(CODES_A_WORD)
    ]
    bits = functools.reduce(jnp.maximum, [magnitude_bits(plane) for plane in planes])
    blocks = bits.reshape(width * CODES_A_WORD // MX_BLOCK, MX_BLOCK // CODES_A_WORD)
    largest = jnp.max(blocks, axis=1)
    exponent = mx_exponent(largest, rule)
    own = lambda value: jnp.broadcast_to(value[:, None], blocks.shape).reshape(width)
    exponents, scales = own(exponent), own(decode_e8m0(mx_scale(largest, exponent)))
    for plane, x in enumerate(planes):
        numbers = decode_e2m1(encode_e2m1(x, exponents)) * scales
        plt.store(planes_ref.at[plane, row, word], numbers.astype(planes_ref.dtype), mask=inside)


def quantize_fp8(
    x: Float[Array, "R n"],
    flavour: Flavour,
    *,
    group: int | None = None,
    as_numbers: bool = False,
    interpret: bool | None = None,
) -> tuple[jax.Array, jax.Array]:
    """See `pallas_kernels.quantize.quantize_fp8_input`."""
    rows, n = x.shape
    groups = 1 if group is None else n // group
    codes, scales = _call(
        functools.partial(_fp8, flavour=flavour),
        x,
        (
            jax.ShapeDtypeStruct(x.shape, jnp.float16 if as_numbers else jnp.uint8),
            jax.ShapeDtypeStruct((rows, groups), jnp.float32),
        ),
        n,
        "muse_quantize_fp8",
        interpret,
    )
    values = codes if as_numbers else lax.bitcast_convert_type(codes, E4M3_DTYPE[flavour])
    return values, scales[:, 0] if group is None else scales


def mxfp4_planes(x: Float[Array, "R n"], rule: Rule, *, interpret: bool | None = None) -> Float[Array, "4 R n_fourth"]:
    """See `pallas_kernels.quantize.mxfp4_planes`."""
    rows, n = x.shape
    out = jax.ShapeDtypeStruct((CODES_A_WORD, rows, n // CODES_A_WORD), x.dtype)
    return _call(functools.partial(_mxfp4, rule=rule), x, out, n // CODES_A_WORD, "muse_quantize_mxfp4", interpret)


def _call(kernel, x: jax.Array, out_shape, elements: int, name: str, interpret: bool | None):
    width = max(pl.next_power_of_2(elements), 128)
    return pallas_call(
        functools.partial(kernel, width=width),
        grid=(x.shape[0],),
        out_shape=out_shape,
        num_warps=8 if width >= 2048 else 4,
        num_stages=1,
        interpret=interpreted() if interpret is None else interpret,
        name=name,
    )(x)
