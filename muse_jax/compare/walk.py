"""The walk along the boundaries: each is compared by itself, and the first that parts is named.

same      every element is equal
within    inside the limits
ties      topk_ids: some tokens chose among experts whose scores tie; they are left out from here on
PARTS     the first boundary outside its limits
follows   outside its limits after another parted: what feeds it already differed
absent    in one file only

A number against NaN, and an infinity against anything else, part whatever the limits.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass, field

import numpy as np

from muse_jax.boundaries import BOUNDARIES
from muse_jax.compare.metrics import BFLOAT16, Distance, distance
from muse_jax.compare.routing import PER_ROUTE, Routing, in_expert_order, match_routes

# float32: chains of a few hundred products, rounded to 2^-24 each in two orders. bfloat16: a result that lay between
# two values falls to either, 2^-8 of an element, and the elements of a row rarely do so together.
ROW_LIMITS = {"float32": 2e-6, "bfloat16": 4e-3}
TIE_GAP = 1e-5
_PER_TOKEN_AFTER_ROUTING = ("combined", "out")


@dataclass(frozen=True, kw_only=True)
class Limits:
    """What may differ. rows: largest row error by boundary; `rows_default` for the others, None: by dtype (ROW_LIMITS).

    equal, max_ulp: for boundaries stored in bfloat16, the least share of equal elements and the furthest other element.
    `max_ulp` takes the place of the row error there; `equal` alone comes on top of it. tie_gap: spread of selection
    scores that counts as a tie.
    """

    rows: Mapping[str, float] = field(default_factory=dict)
    rows_default: float | None = None
    equal: float | None = None
    max_ulp: int | None = None
    tie_gap: float = TIE_GAP


@dataclass(frozen=True, kw_only=True)
class BoundaryReport:
    """One boundary's status, its limit and what was found; `note` says what numbers cannot."""

    name: str
    status: str
    limit: str
    distance: Distance | None
    note: str = ""


@dataclass(frozen=True, kw_only=True)
class LayerReport:
    """All boundaries of one layer, in order; `parted` is the first that left its limits."""

    layer: int | None
    boundaries: tuple[BoundaryReport, ...]
    parted: str | None
    routing: Routing | None


def compare_layers(
    layer: int | None,
    a: Mapping[str, np.ndarray],
    b: Mapping[str, np.ndarray],
    limits: Limits,
    *,
    bias: np.ndarray | None = None,
    scoring: str = "sigmoid",
    replayed: bool = False,
) -> LayerReport:
    """Compare one layer of two dumps.

    bias, scoring: the selection bias [E] and the router's scoring, for calling a routing difference a tie.
    replayed: b was computed from a's own boundaries, so its routes stand in a's order whatever its topk_ids say.

    Raises ValueError when they have no boundary in common or shapes differ.
    """
    shared = [name for name in BOUNDARIES if name in a and name in b]
    if not shared:
        raise ValueError(f"layer {layer}: the files have no boundary in common ({_names(a)} against {_names(b)})")
    for name in shared:
        if a[name].shape != b[name].shape:
            raise ValueError(f"layer {layer}: {name} is {a[name].shape} in one file and {b[name].shape} in the other")
    routing = None
    if "topk_ids" in shared:
        routing = match_routes(a, b, bias=bias, tie_gap=limits.tie_gap, scoring=scoring)

    pairing = routing
    if routing is not None and replayed:
        pairing = dataclasses.replace(routing, order_b=routing.order_a, same=np.ones_like(routing.same))

    found: list[BoundaryReport] = []
    parted: str | None = None
    for name in BOUNDARIES:
        if name not in a and name not in b:
            continue
        if name not in shared:
            report = BoundaryReport(
                name=name, status="absent", limit="", distance=None, note=f"only in {'A' if name in a else 'B'}"
            )
        elif name == "topk_ids":
            assert routing is not None
            report = _routing_report(routing, limits)
        else:
            # float32 rows normed from bfloat16 rows of two runs: as far apart as the rows they come from.
            narrow_source = name == "normed_rows" and not replayed and _narrow(a, b, "expert_rows")
            report = _values_report(name, *_aligned(name, a[name], b[name], pairing), limits, narrow_source)
        if report.status == "PARTS" and parted is not None:
            report = dataclasses.replace(report, status="follows")
        elif report.status == "PARTS":
            parted = name
        found.append(report)
    return LayerReport(layer=layer, boundaries=tuple(found), parted=parted, routing=routing)


def _aligned(name: str, a: np.ndarray, b: np.ndarray, routing: Routing | None) -> tuple[np.ndarray, np.ndarray]:
    """Both sides with routes paired by expert, without the tokens that went elsewhere."""
    if routing is None or name not in (*PER_ROUTE, *_PER_TOKEN_AFTER_ROUTING):
        return a, b
    if name in PER_ROUTE:
        a, b = in_expert_order(a, routing.order_a), in_expert_order(b, routing.order_b)
    return a[routing.same], b[routing.same]


def _routing_report(routing: Routing, limits: Limits) -> BoundaryReport:
    limit = f"sets equal, ties within {limits.tie_gap:g}"
    notes = []
    if routing.faults:
        spread = f"{routing.narrowest_fault:.1e}" if np.isfinite(routing.narrowest_fault or 0) else "unknown"
        notes.append(
            f"{len(routing.faults)} tokens go to other experts (first: token {routing.faults[0]}; "
            f"least score spread {spread})"
        )
    if routing.ties:
        notes.append(f"{len(routing.ties)} tokens differ by a tie (widest {routing.widest_tie:.1e}) and are left out")
    status = "PARTS" if routing.faults else "ties" if routing.ties else "same"
    return BoundaryReport(name="topk_ids", status=status, limit=limit, distance=None, note="; ".join(notes))


def _narrow(a: Mapping[str, np.ndarray], b: Mapping[str, np.ndarray], name: str) -> bool:
    return any(name in layer and layer[name].dtype == BFLOAT16 for layer in (a, b))


def _values_report(
    name: str, a: np.ndarray, b: np.ndarray, limits: Limits, narrow_source: bool = False
) -> BoundaryReport:
    found = distance(a, b)
    narrow = BFLOAT16 in (a.dtype, b.dtype)
    inside, limit = found.max_ulp is not None, ""
    if narrow and limits.equal is not None:
        inside &= found.equal >= limits.equal
        limit = f"equal >= {limits.equal:.2%}, "
    if narrow and limits.max_ulp is not None:
        inside &= found.max_ulp is not None and found.max_ulp <= limits.max_ulp
        limit += f"others within {limits.max_ulp} ulp"
    else:
        default = ROW_LIMITS["bfloat16" if narrow or narrow_source else "float32"]
        allowed = limits.rows.get(name, default if limits.rows_default is None else limits.rows_default)
        inside &= found.max_row <= allowed
        limit += f"row <= {allowed:g}"
    status = "same" if found.equal == 1 and a.dtype == b.dtype else "within" if inside else "PARTS"
    return BoundaryReport(name=name, status=status, limit=limit, distance=found)


def _names(layer: Mapping[str, np.ndarray]) -> str:
    return ", ".join(layer)
