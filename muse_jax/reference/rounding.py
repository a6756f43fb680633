"""Rounding of float64 values to the dtype a framework stores, in one step.

    round_to(v, dtype) = the value of dtype nearest to v, ties to even; beyond the largest one, infinity

Casting float64 to bfloat16 by way of float32 rounds twice: 1 + 2^-8 + 2^-30 becomes a tie in float32 and then 1,
although 1 + 2^-7 is nearer. A framework that accumulates in float32 and rounds once is best predicted by one rounding
of the float64 result.
"""

from __future__ import annotations

import ml_dtypes
import numpy as np
from numpy.typing import ArrayLike, DTypeLike

BFLOAT16 = np.dtype(ml_dtypes.bfloat16)
FLOAT32 = np.dtype(np.float32)
FLOAT64 = np.dtype(np.float64)

_BF16_DIGITS = 8  # significant bits, the implied one included
_BF16_MIN_EXPONENT = -125  # of np.frexp (mantissa in [0.5, 1)) at the smallest normal number, 2^-126
_BF16_OVERFLOW = 2.0**128


def widen(values: ArrayLike) -> np.ndarray:
    """The values as float64, exactly."""
    return np.asarray(values).astype(np.float64)


@np.errstate(all="ignore")
def round_to(values: ArrayLike, dtype: DTypeLike) -> np.ndarray:
    """values, of any shape and float dtype, rounded once to bfloat16, float32 or float64, and stored as that dtype.

    Subnormal numbers are kept, NaN stays NaN. Raises ValueError for another dtype.
    """
    dtype = np.dtype(dtype)
    if dtype in (FLOAT32, FLOAT64):
        return np.asarray(values).astype(dtype)
    if dtype != BFLOAT16:
        raise ValueError(f"dtype is {dtype}; expected bfloat16, float32 or float64")
    exact = widen(values)
    _, exponent = np.frexp(exact)
    unit = np.ldexp(1.0, np.maximum(exponent, _BF16_MIN_EXPONENT) - _BF16_DIGITS)
    nearest = np.rint(exact / unit) * unit
    nearest = np.where(np.abs(nearest) >= _BF16_OVERFLOW, np.copysign(np.inf, nearest), nearest)
    return nearest.astype(BFLOAT16)
