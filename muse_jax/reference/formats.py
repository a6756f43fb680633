"""The small number formats, by their definition: every code has a value, a number gets the nearest code.

    E2M1       sign, 2 exponent bits (bias 1), 1 mantissa bit      0, .5, 1, 1.5, 2, 3, 4, 6; no infinity, no NaN
    E4M3FN     sign, 4 exponent bits (bias 7), 3 mantissa bits     up to 448; 0x7F and 0xFF are NaN
    E4M3FNUZ   sign, 4 exponent bits (bias 8), 3 mantissa bits     up to 240; 0x80 is NaN, there is no -0
    E8M0       8 exponent bits (bias 127)                          2^(byte - 127); 255 is NaN, there is no zero

    value = (-1)^sign * 2^(exponent - bias) * (1 + mantissa)    or, for exponent 0, 2^(1 - bias) * mantissa

The codes of one sign ascend with their values, so the code with the last bit 0 is the one with the even mantissa.
Source: OCP 8-bit floating point 1.0, OCP microscaling formats 1.0; E4M3FNUZ as ml_dtypes defines it.
"""

from __future__ import annotations

import numpy as np


def _magnitudes(codes: int, mantissa_bits: int, bias: int) -> np.ndarray:
    exponent, mantissa = np.divmod(np.arange(codes), 2**mantissa_bits)
    fraction = mantissa / 2.0**mantissa_bits
    return np.where(exponent > 0, 2.0 ** (exponent - bias) * (1 + fraction), 2.0 ** (1 - bias) * fraction)


# The finite values without sign, by code.
E2M1 = _magnitudes(8, mantissa_bits=1, bias=1)
E4M3FN = _magnitudes(127, mantissa_bits=3, bias=7)
E4M3FNUZ = _magnitudes(128, mantissa_bits=3, bias=8)


def decode_e2m1(codes: np.ndarray) -> np.ndarray:
    """The float64 value of each E2M1 code, 0 to 15."""
    return np.where(codes & 8, -1.0, 1.0) * E2M1[codes & 7]


def encode_e2m1(values: np.ndarray) -> np.ndarray:
    """The E2M1 code (uint8) nearest to each value, ties to the even code, 6 for whatever is larger, never -0."""
    magnitude = _nearest(np.abs(values), E2M1)
    return np.where((values < 0) & (magnitude > 0), magnitude | 8, magnitude).astype(np.uint8)


def decode_e4m3fn(codes: np.ndarray) -> np.ndarray:
    """The float64 value of each E4M3FN byte."""
    return np.where(codes & 0x80, -1.0, 1.0) * np.append(E4M3FN, np.nan)[codes & 0x7F]


def encode_e4m3fn(values: np.ndarray) -> np.ndarray:
    """The E4M3FN byte nearest to each value, ties to even, 448 for whatever is larger; NaN is 0x7F, -0 is 0x80."""
    code = _nearest(np.abs(values), E4M3FN)
    return np.where(np.isnan(values), 0x7F, np.where(np.signbit(values), code | 0x80, code)).astype(np.uint8)


def decode_e4m3fnuz(codes: np.ndarray) -> np.ndarray:
    """The float64 value of each E4M3FNUZ byte."""
    values = np.where(codes & 0x80, -1.0, 1.0) * E4M3FNUZ[codes & 0x7F]
    return np.where(codes == 0x80, np.nan, values)


def encode_e4m3fnuz(values: np.ndarray) -> np.ndarray:
    """The E4M3FNUZ byte nearest to each value, ties to even, 240 for whatever is larger; NaN is 0x80, zero is 0."""
    code = _nearest(np.abs(values), E4M3FNUZ)
    signed = np.where((values < 0) & (code > 0), code | 0x80, code)
    return np.where(np.isnan(values), 0x80, signed).astype(np.uint8)


def decode_e8m0(codes: np.ndarray) -> np.ndarray:
    """The float64 value of each E8M0 byte."""
    return np.where(codes == 255, np.nan, np.ldexp(1.0, codes.astype(np.int64) - 127))


def _nearest(magnitudes: np.ndarray, table: np.ndarray) -> np.ndarray:
    """The index of the table's nearest value, ties to the even index, the last one for all that is larger."""
    halfway = (table[:-1] + table[1:]) / 2
    below = np.searchsorted(halfway, magnitudes, side="left")  # a value halfway gets the lower of its two neighbours
    above = np.searchsorted(halfway, magnitudes, side="right")
    return np.where(below % 2 == 0, below, above)
