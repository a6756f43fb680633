"""Number formats by bits, in jnp: the same code runs in XLA paths and inside kernels.

A float32 value is rounded to bfloat16 (nearest, ties to even) with integer arithmetic,
    u = bits(x);  u + 0x7FFF + ((u >> 16) & 1), low 16 bits cleared,
because XLA may drop a float32 -> bfloat16 -> float32 pair of casts (`xla_allow_excess_precision`), and a dropped
rounding changes results. The derivative of a rounding is taken as 1: gradients pass through unrounded.

The small formats are their own bit patterns: a code with its sign taken off, shifted to where float32 has its exponent
and mantissa, is the number at another bias,
    E2M1       0, .5, 1, 1.5, 2, 3, 4, 6           value = bits(code << 22, exponent + 126)      codes 0 and 1: code / 2
    E4M3FN     bias 7, up to 448, NaN 0x7F, 0xFF   value = bits(code << 20, exponent + 120)      codes 0-7: code / 2^9
    E4M3FNUZ   bias 8, up to 240, NaN 0x80, no -0  value = bits(code << 20, exponent + 119)      codes 0-7: code / 2^10
    E8M0       2^(byte - 127), NaN 255             value = bits(byte << 23)                      byte 0: 2^-127
and encoding rounds away the bits that do not fit, ties to the even code. Nothing here depends on subnormal float32
numbers, which many devices read as zero: where one may occur it is handled as an integer. Codes are int32 in registers.
"""

from __future__ import annotations

from typing import Literal

import jax
import jax.numpy as jnp
from jax import lax
from jax.typing import DTypeLike
from jaxtyping import Array, Float32, Int32, Integer

from pallas_kernels.block_sizes import FP8_BLOCK as FP8_BLOCK
from pallas_kernels.block_sizes import MX_BLOCK as MX_BLOCK


@jax.custom_jvp
def round_bf16(x: Float32[Array, "*shape"]) -> Float32[Array, "*shape"]:
    """x rounded to the nearest bfloat16 (ties to even), kept as float32; NaN stays NaN, overflow goes to infinity."""
    bits = lax.bitcast_convert_type(x, jnp.uint32)
    odd = (bits >> jnp.uint32(16)) & jnp.uint32(1)
    rounded = (bits + jnp.uint32(0x7FFF) + odd) & jnp.uint32(0xFFFF0000)
    return jnp.where(jnp.isnan(x), x, lax.bitcast_convert_type(rounded, jnp.float32))


@round_bf16.defjvp
def _round_bf16_jvp(primals: tuple[jax.Array], tangents: tuple[jax.Array]) -> tuple[jax.Array, jax.Array]:
    return round_bf16(*primals), tangents[0]


def round_to(x: Float32[Array, "*shape"], dtype: DTypeLike) -> Float32[Array, "*shape"]:
    """x rounded to `dtype` (bfloat16 or float32), kept as float32 for the arithmetic that follows."""
    if dtype == jnp.float32:
        return x
    if dtype == jnp.bfloat16:
        return round_bf16(x)
    raise TypeError(f"dtype is {jnp.dtype(dtype).name}; expected bfloat16 or float32")


def swiglu(gate: Float32[Array, "*shape"], up: Float32[Array, "*shape"], dtype: DTypeLike) -> jax.Array:
    """round(round(silu(round(gate))) * round(up)) in `dtype`: the roundings of Muse Spark's SwiGLU between its GEMMs.

    gate and up are the float32 accumulators of the first GEMM; silu(g) = g / (1 + exp(-g)) in float32.
    Source: spec b, steps 5 and 6 (one rounding after the GEMM, one after silu, one after the product).
    """
    gate, up = round_to(gate, dtype), round_to(up, dtype)
    silu = round_to(gate / (1.0 + jnp.exp(-gate)), dtype)
    return round_to(silu * up, dtype).astype(dtype)


def swiglu_gradient(
    gate: Float32[Array, "*shape"], up: Float32[Array, "*shape"], gradient: Float32[Array, "*shape"], dtype: DTypeLike
) -> tuple[jax.Array, jax.Array]:
    """Gradients of `gate` and `up` in float32, from that of `swiglu(gate, up, dtype)`.

    With s = 1 / (1 + exp(-gate)): d_gate = gradient * up * s * (1 + gate * (1 - s)),  d_up = gradient * gate * s.
    """
    gate, up = round_to(gate, dtype), round_to(up, dtype)
    s = 1.0 / (1.0 + jnp.exp(-gate))
    return gradient * up * s * (1.0 + gate * (1.0 - s)), gradient * gate * s


E4M3_BIAS = {"e4m3fn": 7, "e4m3fnuz": 8}
E4M3_LIMIT = {"e4m3fn": 448.0, "e4m3fnuz": 224.0}  # of quantized activations: the same codes, one worth half the other
E4M3_DTYPE = {"e4m3fn": jnp.float8_e4m3fn, "e4m3fnuz": jnp.float8_e4m3fnuz}
MX_RULES = ("even", "floor", "rceil")

Flavour = Literal["e4m3fn", "e4m3fnuz"]
Rule = Literal["even", "floor", "rceil"]

FLOAT_INFINITY = 0x7F800000  # bits
_SMALLEST_NORMAL = 0x00800000
_RCEIL_FLOOR = 0x2EDBE6FF  # float32 1e-10


def float_bits(x: Float32[Array, "*shape"]) -> Int32[Array, "*shape"]:
    """The bits of x as a signed integer."""
    return lax.bitcast_convert_type(x, jnp.int32)


def bits_float(bits: Int32[Array, "*shape"]) -> Float32[Array, "*shape"]:
    """The float32 with these bits."""
    return lax.bitcast_convert_type(bits, jnp.float32)


def magnitude_bits(x: Float32[Array, "*shape"]) -> Int32[Array, "*shape"]:
    """The bits of |x|: integers in the order of the magnitudes, with NaN and infinity from 0x7F800000 on."""
    return float_bits(x) & 0x7FFFFFFF


def divide(x: Float32[Array, "*shape"], y: Float32[Array, "*#shape"]) -> Float32[Array, "*shape"]:
    """x / y rounded to the nearest float32, whatever the backend makes of a division.

    XLA multiplies by the reciprocal of a divisor that is constant or broadcast, Triton divides to within 2 ulp; either
    changes codes. The remainder x - q * y is exact when both factors are cut in halves of 12 bits, and then
    q + remainder / y is the nearest number. Not so where q or x * 2^-36 is subnormal, nor for infinities (NaN).
    """
    q = x / y
    q_high, y_high = (bits_float(float_bits(v) & -4096) for v in (q, y))
    q_low, y_low = q - q_high, y - y_high
    remainder = (((x - q_high * y_high) - q_high * y_low) - q_low * y_high) - q_low * y_low
    return jnp.where(remainder == 0, q, q + remainder / y)  # the sum alone would lose the sign of -0


def decode_e2m1(codes: Integer[Array, "*shape"]) -> Float32[Array, "*shape"]:
    """The value of each E2M1 code, 0 to 15."""
    codes = codes.astype(jnp.int32)
    magnitude = codes & 7
    normal = bits_float((magnitude << 22) + (126 << 23))
    value = jnp.where(magnitude > 1, normal, magnitude.astype(jnp.float32) * 0.5)
    return bits_float(float_bits(value) | ((codes & 8) << 28))


def encode_e2m1(x: Float32[Array, "*shape"], exponent: Int32[Array, "*shape"] | int = 0) -> Int32[Array, "*shape"]:
    """The E2M1 code nearest to x / 2^exponent, ties to the even code, 6 for all that is larger, never -0.

    x / 2^exponent must be below 2^128. E2M1 has no NaN: one becomes 6, so look for it in the block's largest magnitude.
    """
    bits = magnitude_bits(x)
    subnormal = float_bits(bits.astype(jnp.float32)) - (149 << 23)  # bits * 2^-149, at any exponent
    bits = jnp.where(bits < _SMALLEST_NORMAL, jnp.maximum(subnormal, -(32 << 23)), bits) - (exponent << 23)
    normal = ((bits + 0x1FFFFF + ((bits >> 22) & 1)) >> 22) - 252
    below_one = (bits > 0x3E800000).astype(jnp.int32) + (bits >= 0x3F400000).astype(jnp.int32)  # 0.25, 0.75
    magnitude = jnp.where(bits >= 0x3F800000, jnp.minimum(normal, 7), below_one)
    return jnp.where((float_bits(x) < 0) & (magnitude > 0), magnitude | 8, magnitude)


def decode_e4m3(codes: Integer[Array, "*shape"], flavour: Flavour = "e4m3fn") -> Float32[Array, "*shape"]:
    """The value of each E4M3FN or E4M3FNUZ byte."""
    codes, bias = codes.astype(jnp.int32), E4M3_BIAS[flavour]
    magnitude = codes & 0x7F
    normal = bits_float((magnitude << 20) + ((127 - bias) << 23))
    value = jnp.where(magnitude > 7, normal, magnitude.astype(jnp.float32) * 2.0 ** (-2 - bias))
    value = bits_float(float_bits(value) | ((codes & 0x80) << 24))
    nan = magnitude == 0x7F if flavour == "e4m3fn" else codes == 0x80
    return jnp.where(nan, jnp.nan, value)


def encode_e4m3(x: Float32[Array, "*shape"], flavour: Flavour = "e4m3fn") -> Int32[Array, "*shape"]:
    """The E4M3FN or E4M3FNUZ byte nearest to x, ties to even, the largest number for all that is larger.

    NaN becomes 0x7F or 0x80, whatever its sign; -0, and what rounds to it, is 0x80 in E4M3FN and 0 in E4M3FNUZ.
    """
    bits, bias = magnitude_bits(x), E4M3_BIAS[flavour]
    largest, nan = (0x7E, 0x7F) if flavour == "e4m3fn" else (0x7F, 0x80)
    normal = ((bits + 0x7FFFF + ((bits >> 20) & 1)) >> 20) - ((127 - bias) << 3)
    unit = 2.0 ** (21 - bias)  # adding it leaves multiples of the smallest code's value, ties to even
    subnormal = float_bits(bits_float(bits) + unit) - ((148 - bias) << 23)
    is_normal = bits >= (128 - bias) << 23
    magnitude = jnp.where(is_normal, jnp.minimum(normal, largest), subnormal)
    negative = float_bits(x) < 0
    if flavour == "e4m3fnuz":
        negative &= magnitude > 0
    return jnp.where(bits > FLOAT_INFINITY, nan, jnp.where(negative, magnitude | 0x80, magnitude))


def fn_to_fnuz(codes: Integer[Array, "*shape"]) -> Int32[Array, "*shape"]:
    """The E4M3FNUZ byte of half the value of each E4M3FN byte: the same bits, but 0x80 (-0) -> 0 and NaN -> 0x80."""
    codes = codes.astype(jnp.int32)
    return jnp.where((codes & 0x7F) == 0x7F, 0x80, jnp.where(codes == 0x80, 0, codes))


def decode_e8m0(codes: Integer[Array, "*shape"]) -> Float32[Array, "*shape"]:
    """2^(byte - 127) for each byte; 255 is NaN. Byte 0 is a subnormal number, which a device may take for zero."""
    codes = codes.astype(jnp.int32)
    value = bits_float(jnp.where(codes == 0, 0x00400000, codes << 23))
    return jnp.where(codes == 255, jnp.nan, value)


def mx_exponent(largest: Int32[Array, "*blocks"], rule: Rule = "even") -> Int32[Array, "*blocks"]:
    """The exponent e to find the E2M1 codes of a block with, from `magnitude_bits` of its largest element a.

        even     floor(log2(a)) - 2 after the mantissa of a is rounded, 1.75 up; 127 where that reaches 2^128
        floor    floor(log2(a)) - 2
        rceil    ceil(log2(max(a, 1e-10) / 6))

    Never below -126, but under "even" -127. Source: spec f.2, and f.3 for the edges of "even", which are AMD Quark's.
    Raises ValueError for another rule.
    """
    if rule == "even":
        field = (largest + 0x200000) >> 23
        return jnp.where(field >= 255, 127, jnp.maximum(field - 129, -127))
    if rule == "floor":
        return jnp.maximum((largest >> 23) - 129, -126)
    if rule == "rceil":
        return ((jnp.maximum(largest, _RCEIL_FLOOR) + 0x3FFFFF) >> 23) - 129
    raise ValueError(f"rule is {rule!r}; expected one of {', '.join(MX_RULES)}")


def mx_scale(largest: Int32[Array, "*blocks"], exponent: Int32[Array, "*blocks"]) -> Int32[Array, "*blocks"]:
    """The E8M0 byte of a block: exponent + 127 and at least 1, or 255 where the largest magnitude is not finite."""
    return jnp.where(largest >= FLOAT_INFINITY, 255, jnp.maximum(exponent + 127, 1))
