"""The one check that good and broken blocks go through: which boundaries part from the golden ones, and by how much.

float32, float64    max over rows of |ours - golden| / |golden|       <= row_error
bfloat16            share of elements with the same bits              >= equal,   all others within `ulp`
topk_ids            the same set for every token; boundaries of routes are then paired by expert
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass

import numpy as np

from muse_jax.boundaries import BOUNDARIES
from muse_jax.reference.rounding import BFLOAT16, round_to, widen

PER_ROUTE = ("topk_weights", "activation", "expert_rows", "normed_rows")


@dataclass(frozen=True, kw_only=True)
class Limits:
    """row_error for wide dtypes; equal (a share) and ulp (None: any distance) for bfloat16."""

    row_error: float
    equal: float = 1.0
    ulp: int | None = None


def faults(
    ours: Mapping[str, np.ndarray],
    golden: Mapping[str, np.ndarray],
    limits: Limits,
    *,
    our_ids: np.ndarray,
    as_bfloat16: Collection[str] = (),
) -> dict[str, str]:
    """boundary -> what is wrong with it, in dataflow order, for the boundaries that golden has; empty when all is well.

    our_ids pairs our rows of routes with golden's; boundaries in as_bfloat16 are rounded to it before comparing.
    """
    found = {}
    for name in BOUNDARIES[1:]:
        if name not in golden:
            continue
        a, b = ours[name], golden[name]
        if a.shape != b.shape:
            found[name] = f"shape {a.shape}, golden {b.shape}"
        elif name == "topk_ids":
            wrong = np.sum(np.any(np.sort(a) != np.sort(b), axis=-1))
            if wrong:
                found[name] = f"{wrong} tokens go to other experts"
        else:
            if name in PER_ROUTE:
                a, b = by_expert(a, our_ids), by_expert(b, golden["topk_ids"])
            if name in as_bfloat16:
                a, b = round_to(a, BFLOAT16), round_to(b, BFLOAT16)
            fault = _bits_fault(a, b, limits) if a.dtype == b.dtype == BFLOAT16 else _row_fault(a, b, limits)
            if fault:
                found[name] = fault
    return found


def by_expert(values: np.ndarray, ids: np.ndarray) -> np.ndarray:
    """values [T, K, ...] with each token's routes in ascending expert order."""
    order = np.argsort(ids, axis=-1, kind="stable")
    return np.take_along_axis(values, order.reshape(order.shape + (1,) * (values.ndim - 2)), axis=1)


def ulps(a: np.ndarray, b: np.ndarray) -> np.ndarray:
    """Distance of two arrays of one dtype, bfloat16 or float32, counted in their values; 0 where both are NaN."""
    integer = np.int16 if a.dtype == BFLOAT16 else np.int32
    lowest = int(np.iinfo(integer).min)
    ordered = [bits.astype(np.int64) for bits in (a.view(integer), b.view(integer))]
    first, second = (np.where(bits < 0, lowest - bits, bits) for bits in ordered)
    return np.where(np.isnan(widen(a)) & np.isnan(widen(b)), 0, np.abs(first - second))


def row_errors(a: np.ndarray, b: np.ndarray) -> np.ndarray:
    """|a - b| / |b| of each row, Euclidean norms in float64; 0 where both rows are zero."""
    error, size = np.linalg.norm(widen(a) - widen(b), axis=-1), np.linalg.norm(widen(b), axis=-1)
    return np.divide(error, size, out=np.where(error == 0, 0.0, np.inf), where=size > 0)


def _row_fault(a: np.ndarray, b: np.ndarray, limits: Limits) -> str | None:
    worst = row_errors(a, b).max()
    return None if worst <= limits.row_error else f"row error {worst:.2e}, limit {limits.row_error:.2e}"


def _bits_fault(a: np.ndarray, b: np.ndarray, limits: Limits) -> str | None:
    distance = ulps(a, b)
    equal = np.mean(distance == 0)
    if equal < limits.equal:
        return f"{equal:.4%} of elements equal, limit {limits.equal:.4%}"
    if limits.ulp is not None and distance.max() > limits.ulp:
        return f"an element is {distance.max()} ulp away, limit {limits.ulp}"
    return None
