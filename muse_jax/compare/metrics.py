"""How far two arrays of one boundary are apart: by row, by bits, and at the worst element.

    row error = ||a - b|| / ||b||  of each row (last axis), in float64; 0 for equal rows, infinity where b's row is zero
    ulp       = how many values of the dtype lie between a and b
NaN against NaN in one place is equal; NaN against anything else is infinitely far.
"""

from __future__ import annotations

from dataclasses import dataclass

import ml_dtypes
import numpy as np

BFLOAT16 = np.dtype(ml_dtypes.bfloat16)
_FAR = np.iinfo(np.int64).max


@dataclass(frozen=True, kw_only=True)
class Distance:
    """How far `a` is from `b` over all their rows.

    equal: share of elements with the same value (1.0 for empty arrays). max_ulp: in the narrower of the two dtypes,
    None where a NaN or an infinity stands against something else. worst: index of the worst element, with both values.
    """

    rows: int
    max_row: float
    median_row: float
    worst_row: tuple[int, ...] | None
    equal: float
    max_ulp: int | None
    worst: tuple[int, ...] | None
    worst_values: tuple[float, float] | None


def distance(a: np.ndarray, b: np.ndarray) -> Distance:
    """The distance of two arrays of one shape, bfloat16 or float32 (mixed: bits are compared as bfloat16)."""
    if a.size == 0:
        return Distance(
            rows=0, max_row=0.0, median_row=0.0, worst_row=None, equal=1.0, max_ulp=0, worst=None, worst_values=None
        )
    rows = row_errors(a, b)
    worst_row = np.unravel_index(int(np.argmax(rows)), rows.shape)
    apart = ulps(a, b)
    error = _errors(a, b)
    # Among the elements that are apart, the worst is the one with the largest absolute error.
    worst = np.unravel_index(int(np.argmax(np.where(np.isnan(error), np.inf, error))), error.shape)
    return Distance(
        rows=rows.size,
        max_row=float(rows.max()),
        median_row=float(np.median(rows)),
        worst_row=tuple(map(int, worst_row)),
        equal=float(np.mean(apart == 0)),
        max_ulp=None if apart.max() == _FAR else int(apart.max()),
        worst=tuple(map(int, worst)) if error[worst] else None,
        worst_values=(float(a[worst]), float(b[worst])) if error[worst] else None,
    )


def row_errors(a: np.ndarray, b: np.ndarray) -> np.ndarray:
    """Relative error of each row of a against b."""
    error = np.linalg.norm(_errors(a, b), axis=-1)
    size = np.linalg.norm(np.where(np.isnan(b.astype(np.float64)), 0, b.astype(np.float64)), axis=-1)
    return np.divide(error, size, out=np.where(error == 0, 0.0, np.inf), where=(size > 0) & np.isfinite(size))


def ulps(a: np.ndarray, b: np.ndarray) -> np.ndarray:
    """Distance in values of the dtype; the largest int64 where only one is NaN or they are unequal infinities."""
    if BFLOAT16 in (a.dtype, b.dtype):
        a, b = a.astype(BFLOAT16), b.astype(BFLOAT16)
    integer = np.int16 if a.dtype == BFLOAT16 else np.int32
    lowest = int(np.iinfo(integer).min)
    first, second = (
        np.where(bits < 0, lowest - bits, bits) for bits in (v.view(integer).astype(np.int64) for v in (a, b))
    )
    wide_a, wide_b = a.astype(np.float64), b.astype(np.float64)
    equal = (wide_a == wide_b) | (np.isnan(wide_a) & np.isnan(wide_b))
    finite = np.isfinite(wide_a) & np.isfinite(wide_b)
    return np.where(equal, 0, np.where(finite, np.abs(first - second), _FAR))


def _errors(a: np.ndarray, b: np.ndarray) -> np.ndarray:
    """|a - b| in float64: 0 for equal values and for NaN against NaN, infinity for NaN against a number."""
    wide_a, wide_b = a.astype(np.float64), b.astype(np.float64)
    equal = (wide_a == wide_b) | (np.isnan(wide_a) & np.isnan(wide_b))
    with np.errstate(invalid="ignore"):
        error = np.abs(wide_a - wide_b)
    return np.where(equal, 0.0, np.where(np.isnan(error), np.inf, error))
