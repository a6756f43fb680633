"""Quantized rows and weights: codes and scales, and the float64 numbers they stand for.

    FP8      q = fp8(clamp(x / s, -M, M)),  s = max(max|x| / M, 1 / (512 M))    M = 448 (E4M3FN) or 224 (E4M3FNUZ)
             x' = q * s                          one s a row, or one a group of columns; all in float32
    MXFP4    q = e2m1(x / 2^e),  scale byte = e + 127                           one e a block of 32 columns
             x' = q * 2^e

    e of MXFP4, with a = max|x| of the block:    even     floor(log2(a)) - 2 after a's mantissa is rounded: 1.75 goes up
                                                 floor    floor(log2(a)) - 2
                                                 rceil    ceil(log2(max(a, 1e-10) / 6))

e is kept in -126..127, so a block of zeros has scale byte 1 and zero codes; -0 is never written. Under "even", as AMD
Quark writes it, a maximum that rounds up to 2^128 has e = 127, and codes of maxima below 1.75 * 2^-125 are those of
e = -127, though the byte says -126. A row (FP8) or block (MXFP4) with NaN or infinity is NaN as a whole.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol, runtime_checkable

import numpy as np

from muse_jax.reference.formats import (
    decode_e2m1,
    decode_e4m3fn,
    decode_e4m3fnuz,
    decode_e8m0,
    encode_e2m1,
    encode_e4m3fn,
    encode_e4m3fnuz,
)
from muse_jax.reference.rounding import widen

FP8_BLOCK = 128
MXFP4_BLOCK = 32
RULES = ("even", "floor", "rceil")
ACTIVATION_RULES = (*RULES, "w4a16")
FLAVOURS = {"float8_e4m3fn": decode_e4m3fn, "float8_e4m3fnuz": decode_e4m3fnuz}
LIMITS = {"float8_e4m3fn": 448.0, "float8_e4m3fnuz": 224.0}


@runtime_checkable
class Quantized(Protocol):
    """A quantized weight, [E, out, in] of logical shape.

    format "fp8": values float8_e4m3fn or float8_e4m3fnuz [E, out, in]; scales float32 [E, out], or [E, out / 128,
    in / 128]; input_scale the one scale of all its inputs, None where each row finds its own.
    format "mxfp4": values uint8 [E, out, in / 2], the even column in the low four bits; scales uint8 [E, out, in / 32].
    """

    @property
    def values(self) -> np.ndarray: ...
    @property
    def scales(self) -> np.ndarray: ...
    @property
    def format(self) -> str: ...
    @property
    def input_scale(self) -> float | None: ...


Weight = np.ndarray | Quantized


@dataclass(frozen=True, kw_only=True)
class _Part:
    """Some experts or columns of a quantized weight."""

    values: np.ndarray
    scales: np.ndarray
    format: str
    input_scale: float | None


def shape_of(weight: Weight) -> tuple[int, ...]:
    """The logical shape, [E, out, in]."""
    if not isinstance(weight, Quantized):
        return weight.shape
    *rows, columns = weight.values.shape
    return (*rows, columns * 2 if weight.format == "mxfp4" else columns)


def expert_of(weight: Weight, expert: int) -> np.ndarray:
    """One expert's weight [out, in]: as it is stored, or in float64 where it is quantized."""
    if not isinstance(weight, Quantized):
        return weight[expert]
    values, scales = weight.values[expert], weight.scales[expert]
    if weight.format == "mxfp4":
        return dequantize_mxfp4(unpack(values), scales)
    if scales.ndim == 1:
        scales = scales[:, None]
    else:
        scales = np.repeat(np.repeat(scales, FP8_BLOCK, 0), FP8_BLOCK, 1)[: values.shape[0], : values.shape[1]]
    return FLAVOURS[values.dtype.name](values.view(np.uint8)) * widen(scales)


def columns(weight: Weight, cut: slice) -> Weight:
    """weight[..., cut] of a weight [E, out, in]. Raises ValueError where `cut` would split a block of a scale."""
    if not isinstance(weight, Quantized):
        return weight[..., cut]
    per_value = 2 if weight.format == "mxfp4" else 1
    per_scale = MXFP4_BLOCK if weight.format == "mxfp4" else FP8_BLOCK if weight.scales.ndim == 3 else None
    if per_scale and (cut.start % per_scale or cut.stop % per_scale):
        raise ValueError(f"columns {cut.start} to {cut.stop} split a block of {per_scale} that shares one scale")
    scales = weight.scales if per_scale is None else weight.scales[..., cut.start // per_scale : cut.stop // per_scale]
    values = weight.values[..., cut.start // per_value : cut.stop // per_value]
    return _Part(values=values, scales=scales, format=weight.format, input_scale=weight.input_scale)


def quantized_inputs(rows: np.ndarray, weight: Weight, rule: str | None) -> np.ndarray:
    """The rows [..., in] that the product with `weight` really reads: themselves, or quantized and read back.

    rule: of MXFP4, one of ACTIVATION_RULES, None for "even"; other weights have no choice.
    Raises ValueError for a rule that the weight does not know.
    """
    if not isinstance(weight, Quantized):
        return rows
    if weight.format == "mxfp4":
        rule = rule or "even"
        if rule not in ACTIVATION_RULES:
            raise ValueError(f"activation_rule is {rule!r}; expected one of {', '.join(ACTIVATION_RULES)}")
        return rows if rule == "w4a16" else dequantize_mxfp4(*quantize_mxfp4(rows, rule))
    flavour = weight.values.dtype.name
    if weight.input_scale is not None:
        codes, scales = quantize_fp8_static(rows, weight.input_scale, flavour)
    else:
        group = FP8_BLOCK if weight.scales.ndim == 3 else None
        codes, scales = quantize_fp8(rows, flavour, group=group)
    return dequantize_fp8(codes, scales, flavour)


@np.errstate(all="ignore")
def quantize_fp8(
    rows: np.ndarray, flavour: str = "float8_e4m3fn", *, limit: float | None = None, group: int | None = None
) -> tuple[np.ndarray, np.ndarray]:
    """Codes uint8 [..., n] and float32 scales of rows [..., n]: [...], or [..., n / group] with one a group of columns.

    limit is M, by default LIMITS[flavour]. Everything is divided and rounded in float32, as on a GPU.
    """
    rows = np.asarray(rows).astype(np.float32)
    largest = np.float32(LIMITS[flavour] if limit is None else limit)
    groups = rows if group is None else rows.reshape(*rows.shape[:-1], rows.shape[-1] // group, group)
    scales = np.maximum(_largest(groups) / largest, np.float32(1) / (np.float32(512) * largest))
    codes = _fp8_codes(groups / scales[..., None], largest, flavour)
    return codes.reshape(rows.shape), scales


@np.errstate(all="ignore")
def quantize_fp8_static(
    rows: np.ndarray, scale: float, flavour: str = "float8_e4m3fn"
) -> tuple[np.ndarray, np.ndarray]:
    """Codes uint8 [..., n] of rows times the float32 reciprocal of a given scale, and that scale for each row [...]."""
    rows = np.asarray(rows).astype(np.float32)
    own, finite = np.float32(scale), np.isfinite(rows).all(axis=-1)
    codes = _fp8_codes(rows * (np.float32(1) / own), np.float32(LIMITS[flavour]), flavour)
    return codes, np.where(finite, own, np.float32(np.nan))


def dequantize_fp8(codes: np.ndarray, scales: np.ndarray, flavour: str = "float8_e4m3fn") -> np.ndarray:
    """codes [..., n] times their scales [...] or [..., n / group], in float64."""
    scales = scales[..., None] if scales.ndim == codes.ndim - 1 else scales
    if scales.shape[-1] > 1:
        scales = np.repeat(scales, codes.shape[-1] // scales.shape[-1], axis=-1)
    return FLAVOURS[flavour](codes) * widen(scales)


def quantize_mxfp4(rows: np.ndarray, rule: str = "even") -> tuple[np.ndarray, np.ndarray]:
    """Codes uint8 [..., n], one a column, and scale bytes uint8 [..., n / 32] of rows [..., n] rounded to float32.

    Raises ValueError for a rule outside RULES, or n that is no multiple of 32.
    """
    if rule not in RULES:
        raise ValueError(f"rule is {rule!r}; expected one of {', '.join(RULES)}")
    width = rows.shape[-1]
    if width % MXFP4_BLOCK:
        raise ValueError(f"rows have {width} columns; MXFP4 needs a multiple of {MXFP4_BLOCK}")
    shape = (*rows.shape[:-1], width // MXFP4_BLOCK, MXFP4_BLOCK)
    blocks = widen(np.asarray(rows).astype(np.float32)).reshape(shape)
    largest = _largest(blocks)
    finite = np.isfinite(largest)
    exponent = _shared_exponent(np.where(finite, largest, 0.0), rule)
    scaled = np.ldexp(np.where(finite[..., None], blocks, 0.0), -exponent[..., None])
    scales = np.where(finite, np.maximum(exponent, -126) + 127, 255).astype(np.uint8)
    return encode_e2m1(scaled).reshape(rows.shape), scales


def dequantize_mxfp4(codes: np.ndarray, scales: np.ndarray) -> np.ndarray:
    """codes [..., n], one a column, times their block's scale [..., n / 32], in float64."""
    return decode_e2m1(codes) * np.repeat(decode_e8m0(scales), MXFP4_BLOCK, axis=-1)


def pack(codes: np.ndarray) -> np.ndarray:
    """Two codes a byte, the even column in the low four bits, [..., n] -> [..., n / 2]."""
    return codes[..., 0::2] | codes[..., 1::2] << 4


def unpack(packed: np.ndarray) -> np.ndarray:
    """One code a byte, [..., n / 2] -> [..., n]."""
    return np.stack([packed & 15, packed >> 4], axis=-1).reshape(*packed.shape[:-1], -1)


def _fp8_codes(scaled: np.ndarray, limit: np.float32, flavour: str) -> np.ndarray:
    encode = encode_e4m3fn if flavour == "float8_e4m3fn" else encode_e4m3fnuz
    return encode(widen(np.clip(scaled, -limit, limit)))


def _largest(blocks: np.ndarray) -> np.ndarray:
    """max|x| over the last axis, NaN where a value is not finite."""
    largest = np.abs(blocks).max(axis=-1, initial=0)
    return np.where(np.isfinite(largest), largest, np.asarray(np.nan, largest.dtype))


def _shared_exponent(largest: np.ndarray, rule: str) -> np.ndarray:
    """The exponent that codes are found with; -127 occurs under "even" alone."""
    if rule == "rceil":
        # Rounded to 53 bits the quotient of a 24-bit number is 2^k only where it is exactly that.
        mantissa, exponent = np.frexp(np.maximum(largest, widen(np.float32(1e-10))) / 1.5)
        return np.where(mantissa == 0.5, exponent - 1, exponent) - 2
    if rule == "floor":
        return np.maximum(_floor_log2(largest) - 2, -126)
    # Only the mantissa of a normal number can be rounded like that; all the subnormal ones end at the lowest exponent.
    mantissa, exponent = np.frexp(largest)
    power = np.where(mantissa >= 0.875, exponent, exponent - 1)
    return np.where(largest == 0, -127, np.where(power == 128, 127, np.maximum(power - 2, -127)))


def _floor_log2(values: np.ndarray) -> np.ndarray:
    return np.where(values == 0, -127, np.frexp(values)[1] - 1)
