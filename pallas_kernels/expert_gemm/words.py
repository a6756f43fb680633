"""Words of four E2M1 codes unpacked in registers, two numbers to an operation where the compiler can.

A code's sign and three bits, moved to where float16 has its sign, low exponent bits and first mantissa bit, are the
number times 2^-14, the subnormal code too; moved to those of bfloat16, the number times 2^-126. Multiplied by the
block's power of two, either is exact in bfloat16.
"""

from __future__ import annotations

from collections.abc import Callable

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental.pallas import triton as plt
from jax.typing import DTypeLike

from pallas_kernels.block_sizes import CODES_A_WORD
from pallas_kernels.target import on_nvidia

Spread = Callable[[jax.Array], jax.Array]


def unpack(words: jax.Array, scale: jax.Array, spread: Spread, dtype: DTypeLike, *, interpret: bool) -> list[jax.Array]:
    """The four planes [out, m] of uint16 words [out, m], in bfloat16 or float32.

    scale: bfloat16 powers of two, one for several words of a row; `spread` gives each word its own. In bfloat16 on
      NVIDIA, scales of 4 and more (bytes 129 to 254) overflow to infinity; the modules refuse them.
    """
    if dtype == jnp.bfloat16 and not interpret and on_nvidia():
        own = spread(scale * jnp.bfloat16(2.0**126))
        return [_bfloat16_plane(words, plane) * own for plane in range(CODES_A_WORD)]
    own = spread(scale.astype(jnp.float32) * 2.0**14)
    planes = [_float16_plane(words, plane).astype(jnp.float32) * own for plane in range(CODES_A_WORD)]
    return planes if dtype == jnp.float32 else [_cut(plane) for plane in planes]


def _float16_plane(words: jax.Array, plane: int) -> jax.Array:
    """2^-14 times the numbers, in float16: 16-bit shifts, which AMD chips do two at a time."""
    top = lax.bitcast_convert_type(words, jnp.int16) << jnp.int16(12 - 4 * plane)
    return lax.bitcast_convert_type((top >> jnp.int16(3)) & jnp.int16(0x8E00 - 0x10000), jnp.float16)


def _cut(x: jax.Array) -> jax.Array:
    """float32 numbers that bfloat16 holds exactly, without the work of rounding."""
    return lax.bitcast_convert_type((lax.bitcast_convert_type(x, jnp.int32) >> 16).astype(jnp.int16), jnp.bfloat16)


# NVIDIA has no 16-bit shifts for two halves, but the bits that cross from half to half are masked away.
_TO_SIGN = ("shl.b32 s, $1, 12;", "shl.b32 s, $1, 8;", "shl.b32 s, $1, 4;", "mov.b32 s, $1;")
_TO_NUMBER = ("shl.b32 t, $1, 6;", "shl.b32 t, $1, 2;", "shr.u32 t, $1, 2;", "shr.u32 t, $1, 6;")


def _bfloat16_plane(words: jax.Array, plane: int) -> jax.Array:
    """2^-126 times the numbers, in bfloat16: two words in a register, three or four instructions for both."""
    asm = f"""{{ .reg .b32 s, t;
        {_TO_SIGN[plane]} {_TO_NUMBER[plane]}
        and.b32 t, t, 0x01C001C0;
        lop3.b32 $0, s, 0x80008000, t, 0xEA; }}"""  # (s & 0x80008000) | t
    shape = jax.ShapeDtypeStruct(words.shape, jnp.bfloat16)
    (plane_of,) = plt.elementwise_inline_asm(asm, args=[words], constraints="=r,r", pack=2, result_shape_dtypes=[shape])
    return plane_of
