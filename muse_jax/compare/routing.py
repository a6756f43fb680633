"""Routing compared as sets: which tokens go to the same experts, which differ by a near-tie, and which route is which.

Frameworks list a token's experts in different orders, so routes are paired by expert. Where the sets differ, the
experts that only one side chose are looked at: if their selection scores lie within a stated gap, either choice was
right.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np

PER_ROUTE = ("topk_weights", "activation", "expert_rows", "normed_rows")


@dataclass(frozen=True, kw_only=True)
class Routing:
    """same [T]: tokens whose sets agree. ties, faults: tokens whose sets differ, within the gap or beyond it.

    order_a, order_b [T, K]: the permutations that put each side's routes in ascending expert order.
    widest_tie, narrowest_fault: the scores' spread of the worst tie and of the mildest fault; None without one.
    """

    same: np.ndarray
    ties: tuple[int, ...]
    faults: tuple[int, ...]
    order_a: np.ndarray
    order_b: np.ndarray
    widest_tie: float | None
    narrowest_fault: float | None


def match_routes(
    a: Mapping[str, np.ndarray],
    b: Mapping[str, np.ndarray],
    *,
    bias: np.ndarray | None,
    tie_gap: float,
    scoring: str = "sigmoid",
) -> Routing:
    """How the routes of two layers correspond. Both need topk_ids; scores come from router_logits, b's before a's.

    bias: the selection bias [E]; None takes zero. scoring: "sigmoid" or "softmax". Without router_logits, and where an
    expert is masked or listed twice, no difference can be called a tie.
    """
    ids_a, ids_b = a["topk_ids"], b["topk_ids"]
    order_a, order_b = (np.argsort(ids, axis=1, kind="stable") for ids in (ids_a, ids_b))
    same = np.all(np.take_along_axis(ids_a, order_a, 1) == np.take_along_axis(ids_b, order_b, 1), axis=1)
    logits = b.get("router_logits", a.get("router_logits"))
    ties, faults, tie_spreads, fault_spreads = [], [], [], []
    for token in np.nonzero(~same)[0]:
        spread = np.inf
        if logits is not None:
            scores = selection_scores(logits[token], bias, scoring)
            disputed = np.setxor1d(ids_a[token], ids_b[token])
            distinct = all(np.unique(ids[token]).size == ids[token].size for ids in (ids_a, ids_b))
            if distinct and disputed.min() >= 0 and disputed.max() < scores.size:
                spread = float(np.ptp(scores[disputed]))
        (ties if spread <= tie_gap else faults).append(int(token))
        (tie_spreads if spread <= tie_gap else fault_spreads).append(spread)
    return Routing(
        same=same,
        ties=tuple(ties),
        faults=tuple(faults),
        order_a=order_a,
        order_b=order_b,
        widest_tie=max(tie_spreads, default=None),
        narrowest_fault=min(fault_spreads, default=None),
    )


def selection_scores(logits: np.ndarray, bias: np.ndarray | None, scoring: str = "sigmoid") -> np.ndarray:
    """sigmoid or softmax of one token's logits [E], plus bias, in float64, with the router's rule for values that are
    not finite.
    """
    largest = float(np.finfo(np.float32).max)
    finite = lambda v: np.where(np.isnan(v), -largest, np.clip(v, -largest, largest))
    logits = finite(logits.astype(np.float64))
    with np.errstate(over="ignore", under="ignore"):
        if scoring == "softmax":
            scores = np.exp(logits - logits.max())
            scores /= scores.sum()
        else:
            scores = 1 / (1 + np.exp(-logits))
    return scores if bias is None else finite(scores + bias.astype(np.float64))


def in_expert_order(values: np.ndarray, order: np.ndarray) -> np.ndarray:
    """values [T, K, ...] with each token's routes put in the order [T, K]."""
    return np.take_along_axis(values, order.reshape(order.shape + (1,) * (values.ndim - 2)), axis=1)
