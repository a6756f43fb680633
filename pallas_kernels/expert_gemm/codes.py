"""Codes: numbers as codes and scales, in the form that the expert GEMMs read.

    FP8      x[.., i] = e4m3(values[.., i]) * scales[..]      or the scale of 128 columns (and, of a weight, 128 rows)
    MXFP4    x[.., i] = e2m1(values[.., i / 2] >> 4 (i % 2) & 15) * 2^(scales[.., i / 32] - 127)
A weight is held, once, as kernels can address and decode it (`hold`): MXFP4 as uint16 words, four codes each with the
first column in the low bits, and bfloat16 scales, which are powers of two; an FP8 array with an expert more where
32-bit offsets need it. The decoding is the same.
"""

from __future__ import annotations

import dataclasses
import math
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float, Float32

from pallas_kernels.block_sizes import CODES_A_WORD, FP8_BLOCK
from pallas_kernels.quantize import dequantize_fp8_rows, dequantize_mxfp4_rows

_LIMIT = 2**32  # bytes up to which Pallas counts offsets in 32 bits


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, kw_only=True)
class Codes:
    """FP8: float8 values [..., n], float32 scales [...] or one a block. MXFP4: uint8 values [..., n / 2] and uint8
    scales [..., n / 32], or, held, uint16 values [..., n / 4] and bfloat16 scales [..., n / 32]. An FP8 input may have
    float16 values: what its codes stand for.
    """

    values: Any
    scales: Any

    @property
    def is_mxfp4(self) -> bool:
        return jnp.issubdtype(self.values.dtype, jnp.integer)

    @property
    def has_blocks(self) -> bool:
        """Whether scales are of blocks, not of whole rows."""
        return self.scales.ndim == self.values.ndim

    @property
    def columns(self) -> int:
        """n, the numbers in a row."""
        per_value = 2 * self.values.dtype.itemsize if self.is_mxfp4 else 1
        return self.values.shape[-1] * per_value

    @property
    def format(self) -> str:
        """The name in the tables of tiles."""
        return "mxfp4" if self.is_mxfp4 else "fp8"


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Planes:
    """Rows of numbers [rows, n] as kernels multiply MXFP4 with: columns [4, rows, n / 4], every fourth column of x."""

    columns: Any

    @classmethod
    def of(cls, x: Float[Array, "rows n"]) -> Planes:
        """The planes of x."""
        return cls(jnp.moveaxis(x.reshape(x.shape[0], x.shape[1] // CODES_A_WORD, CODES_A_WORD), 2, 0))

    def rows(self) -> Float[Array, "rows n"]:
        """x."""
        return jnp.moveaxis(self.columns, 0, 2).reshape(self.columns.shape[1], -1)


Input = Float[Array, "rows n"] | Codes | Planes
Weight = Float[Array, "E out n"] | Codes


def hold(weight: Codes) -> Codes:
    """The weight [E, out, in] as kernels read it; what is held already stays.

    Pallas counts offsets in 32 bits unless an array has more than 2^32 bytes, and signed 32 bits reach 2^31 one-byte
    elements only. An FP8 array between the two, as Muse Spark's own down is (2^32 bytes), gets experts that nothing
    reads. Words of MXFP4 have no such gap.
    """
    if weight.is_mxfp4:
        if weight.values.dtype == jnp.uint16:
            return weight
        pairs = weight.values.reshape(*weight.values.shape[:-1], -1, 2)
        words = lax.bitcast_convert_type(pairs, jnp.uint16)
        return Codes(values=words, scales=_powers(weight.scales))
    if not wraps(weight.values):
        return weight
    one = weight.values.shape[1:]
    spare = (_LIMIT - weight.values.size) // math.prod(one) + 1
    return dataclasses.replace(
        weight, values=jnp.concatenate([weight.values, jnp.zeros((spare, *one), weight.values.dtype)])
    )


def wraps(values: jax.Array | jax.ShapeDtypeStruct) -> bool:
    """Whether 32-bit offsets cannot reach all of an array's elements, which a kernel would read wrong."""
    return values.dtype.itemsize == 1 and _LIMIT // 2 < values.size <= _LIMIT


def stored(weight: Codes) -> Codes:
    """Held MXFP4 codes as a checkpoint has them, uint8; other codes stay."""
    if weight.values.dtype != jnp.uint16:
        return weight
    pairs = lax.bitcast_convert_type(weight.values, jnp.uint8)
    scales = lax.bitcast_convert_type(weight.scales, jnp.uint16) >> 7
    return Codes(values=pairs.reshape(*pairs.shape[:-2], -1), scales=scales.astype(jnp.uint8))


def _powers(scales: jax.Array) -> jax.Array:
    """2^(byte - 127) of each E8M0 byte in bfloat16, by bits: 0 is a subnormal number, 255 is NaN."""
    bits = jnp.where(scales == 0, 0x40, jnp.where(scales == 255, 0x7FC0, scales.astype(jnp.uint16) << 7))
    return lax.bitcast_convert_type(bits.astype(jnp.uint16), jnp.bfloat16)


def shape_of(x: Input) -> tuple[int, ...]:
    """[rows, n] of the input of a GEMM."""
    if isinstance(x, Planes):
        planes, rows, words = x.columns.shape
        return rows, planes * words
    return x.values.shape if isinstance(x, Codes) else x.shape


def numbers(x: Input) -> Float32[Array, "rows n"]:
    """What the input of a GEMM stands for."""
    if isinstance(x, Codes):
        return dequantize_fp8_rows(x.values, x.scales)
    return (x.rows() if isinstance(x, Planes) else x).astype(jnp.float32)


def decode_expert(weight: Codes, expert: jax.Array) -> Float32[Array, "out n"]:
    """What one expert's weight stands for."""
    one = Codes(values=weight.values[expert], scales=weight.scales[expert])
    if one.is_mxfp4:
        one = stored(one)
        return dequantize_mxfp4_rows(one.values, one.scales)
    codes = dequantize_fp8_rows(one.values, jnp.ones(one.values.shape[:1], jnp.float32))
    if not one.has_blocks:
        return codes * one.scales[:, None]
    rows, columns = one.values.shape
    return codes * jnp.repeat(jnp.repeat(one.scales, FP8_BLOCK, 0)[:rows], FP8_BLOCK, 1)[:, :columns]
