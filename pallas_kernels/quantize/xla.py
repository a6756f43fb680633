"""Quantization of rows in plain JAX, on any backend; the equations are those of the package."""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float, Float32, Int32, UInt8

from pallas_kernels.formats import (
    E4M3_DTYPE,
    E4M3_LIMIT,
    FLOAT_INFINITY,
    MX_BLOCK,
    Flavour,
    Rule,
    bits_float,
    decode_e2m1,
    decode_e4m3,
    decode_e8m0,
    divide,
    encode_e2m1,
    encode_e4m3,
    magnitude_bits,
    mx_exponent,
    mx_scale,
)


def quantize_fp8_rows(
    x: Float[Array, "*rows n"],
    flavour: Flavour = "e4m3fn",
    *,
    group: int | None = None,
    largest: Float32[Array, "*rows"] | None = None,
) -> tuple[jax.Array, jax.Array]:
    """Codes [..., n], float8 of that flavour, and float32 scales [...], or [..., n / group] with one a column group.

    x may have any float dtype; quotients are float32, true divisions (a reciprocal changes codes). `largest` replaces
    `largest_magnitudes(x)` where x is a part of its rows, so that all parts of a row have one scale.
    Raises ValueError for an unknown flavour, or n that is no multiple of group.
    """
    if flavour not in E4M3_LIMIT:
        raise ValueError(f"flavour is {flavour!r}; expected one of {', '.join(E4M3_LIMIT)}")
    if group is not None and x.shape[-1] % group:
        raise ValueError(f"x has {x.shape[-1]} columns; groups of {group} need a multiple of {group}")
    values = x.astype(jnp.float32)
    grouped = values if group is None else values.reshape(*x.shape[:-1], x.shape[-1] // group, group)
    codes, scales = fp8_codes(grouped, largest_magnitudes(grouped) if largest is None else largest, flavour)
    return lax.bitcast_convert_type(codes.reshape(x.shape).astype(jnp.uint8), E4M3_DTYPE[flavour]), scales


def fp8_codes(
    x: Float32[Array, "*rows n"], largest: Float32[Array, "*rows"], flavour: Flavour
) -> tuple[Int32[Array, "*rows n"], Float32[Array, "*rows"]]:
    """(codes, scales) of rows whose largest magnitudes are given, infinity for one that is not finite."""
    limit = E4M3_LIMIT[flavour]
    scales = jnp.maximum(divide(largest, jnp.full_like(largest, limit)), jnp.float32(1 / (512 * limit)))
    scales = jnp.where(largest < jnp.inf, scales, jnp.nan)
    return encode_e4m3(jnp.clip(divide(x, scales[..., None]), -limit, limit), flavour), scales


def largest_magnitudes(x: Float[Array, "*rows n"]) -> Float32[Array, "*rows"]:
    """max|x| of each row; infinity for a row with NaN or infinity, so that a maximum of several keeps it."""
    bits = jnp.max(magnitude_bits(x.astype(jnp.float32)), axis=-1)  # as integers: a maximum of floats may lose a NaN
    return jnp.where(bits < FLOAT_INFINITY, bits_float(bits), jnp.inf)


def dequantize_fp8_rows(codes: jax.Array, scales: Float32[Array, "..."]) -> jax.Array:
    """codes [..., n], float8 of either flavour or their numbers, times their scales [...] or [..., n / group], in
    float32.
    """
    if codes.dtype == jnp.float16:
        values = codes.astype(jnp.float32)
    else:
        flavour: Flavour = "e4m3fn" if codes.dtype == jnp.float8_e4m3fn else "e4m3fnuz"
        values = decode_e4m3(lax.bitcast_convert_type(codes, jnp.uint8), flavour)
    if scales.ndim == values.ndim - 1:
        return values * scales[..., None]
    grouped = values.reshape(*scales.shape, values.shape[-1] // scales.shape[-1])
    return (grouped * scales[..., None]).reshape(values.shape)


def quantize_mxfp4_rows(
    x: Float[Array, "*rows n"], rule: Rule = "even"
) -> tuple[UInt8[Array, "*rows n_half"], UInt8[Array, "*rows blocks"]]:
    """Packed codes [..., n / 2] and scale bytes [..., n / 32] of x, which may have any float dtype.

    rule: how a block finds its exponent, as in `mx_exponent`. Raises ValueError for an unknown one, or n that is no
    multiple of 32.
    """
    if x.shape[-1] % MX_BLOCK:
        raise ValueError(f"x has {x.shape[-1]} columns; MXFP4 needs a multiple of {MX_BLOCK}")
    blocks = x.astype(jnp.float32).reshape(*x.shape[:-1], x.shape[-1] // MX_BLOCK, MX_BLOCK)
    largest = jnp.max(magnitude_bits(blocks), axis=-1)
    exponent = mx_exponent(largest, rule)
    scales = mx_scale(largest, exponent)
    codes = jnp.where(scales[..., None] == 255, 0, encode_e2m1(blocks, exponent[..., None])).reshape(x.shape)
    return pack_e2m1(codes), scales.astype(jnp.uint8)


def dequantize_mxfp4_rows(
    packed: UInt8[Array, "*rows n_half"], scales: UInt8[Array, "*rows blocks"]
) -> Float32[Array, "*rows n"]:
    """The float32 numbers of packed codes [..., n / 2] and their scale bytes [..., n / 32]."""
    values = decode_e2m1(unpack_e2m1(packed))
    blocks = values.reshape(*scales.shape, MX_BLOCK)
    return (blocks * decode_e8m0(scales)[..., None]).reshape(values.shape)


def pack_e2m1(codes: jax.Array) -> jax.Array:
    """Two codes a byte, the even column in the low four bits, [..., n] -> uint8 [..., n / 2]."""
    pairs = codes.reshape(*codes.shape[:-1], codes.shape[-1] // 2, 2)
    return (pairs[..., 0] | (pairs[..., 1] << 4)).astype(jnp.uint8)


def unpack_e2m1(packed: jax.Array) -> jax.Array:
    """One code a column, [..., n / 2] -> int32 [..., n]."""
    packed = packed.astype(jnp.int32)
    return jnp.stack([packed & 15, packed >> 4], axis=-1).reshape(*packed.shape[:-1], packed.shape[-1] * 2)
