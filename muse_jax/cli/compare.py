"""`muse-jax compare`: where two dumps part, boundary by boundary, and why; or a dump against a profile's replay of
it.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from muse_jax.boundaries import BOUNDARIES
from muse_jax.checkpoint import load_layer
from muse_jax.cli.table import print_table
from muse_jax.compare import Dump, LayerReport, Limits, compare_layers, read_dump
from muse_jax.compare.explain import CAUSES, best_profiles
from muse_jax.compare.walk import ROW_LIMITS, TIE_GAP
from muse_jax.config import MuseConfig
from muse_jax.dump import block_settings
from muse_jax.reference import PROFILES, replay_block

EPILOG = f"""\
Row errors are ||a - b|| / ||b|| of each row. By default a float32 boundary may differ by {ROW_LIMITS["float32"]:g}, a
bfloat16 one by {ROW_LIMITS["bfloat16"]:g}. Routes are paired by expert; tokens whose disputed experts' scores lie
within --tie-gap count as ties and are left out further down. --bits comes on top of the row error, --max-ulp takes its
place; NaN against a number parts whatever the limits. With --replay, each boundary of A is computed anew from
A's own inputs with the roundings of a profile ({", ".join(PROFILES)}), and A is compared with that. Exit code 0: all
within limits; 1: a boundary parts; 2: bad input.

example:
  muse-jax compare tests/data/hf-tiny/moe_bf16.safetensors --replay hf --checkpoint tests/data/hf-tiny/checkpoint
"""


def add_parser(subparsers: argparse._SubParsersAction) -> None:
    """Add the subcommand `compare`."""
    parser = subparsers.add_parser(
        "compare",
        help="where two dumps part, boundary by boundary, and why",
        description="Walk the boundaries of two dumps in order and name the first that parts.",
        epilog=EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("a", metavar="A", help="dump file (safetensors with L.<boundary> or <boundary>)")
    parser.add_argument("b", metavar="B", nargs="?", help="dump file to compare with; none with --replay")
    parser.add_argument("--layer", type=int, nargs="+", metavar="L", help="only these layers")
    parser.add_argument(
        "--tolerance", metavar="TOL", help="largest row error: one number, or boundary=number,boundary=number,..."
    )
    parser.add_argument("--bits", type=float, metavar="SHARE", help="bfloat16: least share of equal elements (0 to 1)")
    parser.add_argument("--max-ulp", type=int, metavar="N", help="bfloat16: furthest any element may be")
    parser.add_argument("--tie-gap", type=float, default=TIE_GAP, metavar="GAP", help="score spread that is a tie")
    parser.add_argument("--replay", choices=tuple(PROFILES), help="compare A with this profile's replay of A")
    parser.add_argument("--checkpoint", metavar="CKPT", help="weights for --replay, and to name the profiles that fit")
    parser.add_argument("--plot", metavar="DIR", help="write a picture of the row errors of each layer into DIR")
    parser.add_argument("--json", action="store_true", help="print one JSON object instead of tables")
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """Print the comparison; 1 if a boundary of some layer parts."""
    if (args.b is None) == (args.replay is None):
        raise ValueError("give either a second dump B or --replay PROFILE")
    if args.replay and not args.checkpoint:
        raise ValueError("--replay computes boundaries anew and needs the weights: give --checkpoint CKPT")
    limits = _limits(args)
    first = read_dump(args.a)
    second = read_dump(args.b) if args.b else None
    config = MuseConfig.from_checkpoint(args.checkpoint) if args.checkpoint else None

    reports: list[LayerReport] = []
    fits: list[dict[str, Any]] = []
    for layer in _layers(args, first.layers, None if second is None else second.layers):
        a = first.layers[layer]
        weights = None if config is None else load_layer(args.checkpoint, _numbered(layer, args.a), config)
        if second is not None:
            b = second.layers[layer]
        else:
            assert config is not None
            assert weights is not None
            b = {"x": a["x"]} if "x" in a else {}
            b |= _stored_as(replay_block(weights, a, block_settings(config), args.replay), a)
        bias = None if weights is None else np.asarray(weights["router_bias"])
        scoring = "sigmoid" if config is None else config.scoring
        report = compare_layers(layer, a, b, limits, bias=bias, scoring=scoring, replayed=second is None)
        reports.append(report)
        fits.append({})
        if report.parted and weights is not None and config is not None and second is not None:
            for side, values in (("A", a), ("B", b)):
                if all(name in values for name in BOUNDARIES):
                    fits[-1][side] = best_profiles(report.parted, values, weights, block_settings(config))

    if args.plot:
        _plot(Path(args.plot), reports, first.layers, second.layers if second else None)
    if args.json:
        print(json.dumps(_strict(_as_json(args, reports, fits, (first, second))), indent=2, allow_nan=False))
    else:
        for report, fit in zip(reports, fits, strict=True):
            _print(report, fit)
        for dump in (first, second):
            if dump is not None and dump.ignored:
                print(f"{dump.path}: {dump.ignored} other tensors are no boundaries and were left alone")
        if args.layer is None and (skipped := _skipped(first, second)):
            print(f"not compared, in one file only: layers {_list(skipped)}")
    return int(any(report.parted for report in reports))


def _limits(args: argparse.Namespace) -> Limits:
    rows: dict[str, float] = {}
    default = None
    for part in (args.tolerance or "").split(","):
        name, separator, number = part.rpartition("=")
        if not part:
            continue
        try:
            value = float(number)
        except ValueError:
            raise ValueError(f"--tolerance has {part!r}; expected a number or boundary=number") from None
        if separator and name not in BOUNDARIES:
            raise ValueError(f"--tolerance names {name!r}; expected one of {', '.join(BOUNDARIES)}")
        if not 0 <= value < math.inf:
            raise ValueError(f"--tolerance has {part!r}; expected a finite number, 0 or more")
        if separator:
            rows[name] = value
        else:
            default = value
    if args.bits is not None and not 0 <= args.bits <= 1:
        raise ValueError(f"--bits is {args.bits}; expected a share, 0 to 1")
    if args.max_ulp is not None and args.max_ulp < 0:
        raise ValueError(f"--max-ulp is {args.max_ulp}; expected 0 or more")
    if not 0 <= args.tie_gap < math.inf:
        raise ValueError(f"--tie-gap is {args.tie_gap}; expected a finite number, 0 or more")
    equal, max_ulp = args.bits, args.max_ulp
    if args.replay and args.tolerance is None and equal is None and max_ulp is None:
        equal, max_ulp = 0.999, 2
    return Limits(rows=rows, rows_default=default, equal=equal, max_ulp=max_ulp, tie_gap=args.tie_gap)


def _layers(args: argparse.Namespace, first: Mapping[int | None, Any], second: Mapping[int | None, Any] | None) -> list:
    """The layers to compare: those asked for, or all that both files hold."""
    shared = [layer for layer in first if second is None or layer in second]
    if args.layer is None:
        if not shared:
            raise ValueError(
                f"{args.a} has layers {_list(first)} and {args.b} has {_list(second or {})}: none in common"
            )
        return sorted(shared, key=lambda layer: -1 if layer is None else layer)
    for layer in args.layer:
        if layer not in shared:
            raise ValueError(f"layer {layer} is not in both files; in common: {_list(shared)}")
    return args.layer


def _skipped(first: Dump, second: Dump | None) -> list[int | None]:
    """Layers that one file alone holds."""
    alone = set() if second is None else first.layers.keys() ^ second.layers.keys()
    return sorted(alone, key=lambda layer: -1 if layer is None else layer)


def _list(layers: Any) -> str:
    return ", ".join("without a number" if layer is None else str(layer) for layer in layers) or "none"


def _numbered(layer: int | None, path: str) -> int:
    if layer is None:
        raise ValueError(f"{path} does not say which layer its boundaries are of; rename them L.<boundary>")
    return layer


def _stored_as(replayed: Mapping[str, np.ndarray], a: Mapping[str, np.ndarray]) -> dict[str, np.ndarray]:
    """The replay in the dtypes of A, where the profile has more digits than a file can hold."""
    return {
        name: value.astype(np.float32) if value.dtype == np.float64 else value
        for name, value in replayed.items()
        if name in a
    }


def _print(report: LayerReport, fits: Mapping[str, list[tuple[str, float]]]) -> None:
    print("layer ?" if report.layer is None else f"layer {report.layer}")
    columns = ("boundary", "status", "max row error", "median", "equal", "ulp", "limit", "worst element")
    rows = []
    for found in report.boundaries:
        d = found.distance
        if d is None:
            rows.append((found.name, found.status, "", "", "", "", found.limit, found.note))
            continue
        worst = ""
        if d.worst is not None and d.worst_values is not None:
            worst = f"{list(d.worst)}: {d.worst_values[0]:.7g} against {d.worst_values[1]:.7g}"
        ulp = "nan" if d.max_ulp is None else str(d.max_ulp)
        rows.append(
            (
                found.name,
                found.status,
                f"{d.max_row:.2e}",
                f"{d.median_row:.1e}",
                f"{d.equal:.4%}",
                ulp,
                found.limit,
                worst,
            )
        )
    print_table(columns, rows)
    if report.parted is None:
        absent = [found.name for found in report.boundaries if found.status == "absent"]
        compared = len(report.boundaries) - len(absent)
        if absent:
            print(f"{compared} boundaries agree; {len(absent)} are in one file only and were not compared")
        else:
            print("all boundaries agree")
    else:
        print(f"first boundary that parts: {report.parted}. {CAUSES[report.parted]}")
        for side, fit in fits.items():
            shown = ", ".join(f"{name} {share:.3%}" for name, share in fit)
            print(f"  {side} at {report.parted}, share of elements that a profile's replay reproduces: {shown}")
    print()


def _as_json(args: argparse.Namespace, reports: list[LayerReport], fits: list[dict[str, Any]], dumps: Any) -> dict:
    return {
        "a": args.a,
        "b": args.b,
        "replay": args.replay,
        "parted": any(report.parted for report in reports),
        "layers_not_compared": _skipped(*dumps) if args.layer is None else [],
        "ignored_tensors": sum(dump.ignored for dump in dumps if dump is not None),
        "layers": [
            {
                "layer": report.layer,
                "parted": report.parted,
                "explanation": CAUSES[report.parted] if report.parted else None,
                "profile_fits": fit,
                "ties": [] if report.routing is None else list(report.routing.ties),
                "routing_faults": [] if report.routing is None else list(report.routing.faults),
                "boundaries": [dataclasses.asdict(found) for found in report.boundaries],
            }
            for report, fit in zip(reports, fits, strict=True)
        ],
    }


def _strict(value: Any) -> Any:
    """`value` with every NaN and infinity as a string, which JSON has no number for."""
    if isinstance(value, dict):
        return {key: _strict(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_strict(item) for item in value]
    return str(value) if isinstance(value, float) and not math.isfinite(value) else value


def _plot(folder: Path, reports: list[LayerReport], first: Any, second: Any) -> None:
    try:
        from matplotlib.figure import Figure
    except ImportError:
        raise ValueError("--plot needs matplotlib; install it with `pip install 'muse-jax[plot]'`") from None
    folder.mkdir(parents=True, exist_ok=True)
    for report in reports:
        shown = [found for found in report.boundaries if found.distance is not None]
        figure = Figure(figsize=(9, 4), layout="constrained")
        axes = figure.subplots()
        names = [found.name for found in shown]
        floor = 1e-9  # a zero has no place on a log axis
        for label, attribute, mark in (("largest", "max_row", "o"), ("median", "median_row", "x")):
            values = [max(getattr(found.distance, attribute), floor) for found in shown]
            axes.plot(names, [min(value, 1e3) for value in values], mark, label=f"{label} row error")
        axes.set_yscale("log")
        axes.set_ylabel("||a - b|| / ||b||")
        axes.set_title(f"layer {report.layer}: " + (f"parts at {report.parted}" if report.parted else "agrees"))
        axes.tick_params(axis="x", rotation=30)
        axes.grid(axis="y", alpha=0.3)
        axes.legend()
        figure.savefig(folder / f"layer_{report.layer}.png", dpi=120)
