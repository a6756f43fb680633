"""`muse-jax demo`: small checkpoints through the real loader, every implementation, every boundary against the
truth.
"""

from __future__ import annotations

import argparse
import contextlib
import functools
import itertools
import json
import math
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jax
import numpy as np

from muse_jax.checkpoint import load_layer, small_config, write_random_checkpoint
from muse_jax.cli.mesh import axis_sizes, open_mesh
from muse_jax.cli.table import print_table, progress
from muse_jax.compare import LayerReport, Limits, compare_layers
from muse_jax.dump import compute_boundaries
from muse_jax.quantization import write_quantized_checkpoint
from pallas_kernels.dispatch import Implementation, interpreted

_LAYER = 1  # of two
_WRITE = write_random_checkpoint
_QUANTIZED = functools.partial(write_quantized_checkpoint, layers=(_LAYER,))
# How each checkpoint is written, and the precision its block runs in.
FORMATS = (
    ("bfloat16, experts whole", functools.partial(_WRITE, layout="consolidated", shards=2), "bfloat16"),
    ("bfloat16, a tensor an expert", functools.partial(_WRITE, layout="per_expert", shards=3), "bfloat16"),
    ("bfloat16, run in float32", functools.partial(_WRITE, layout="consolidated"), "float32"),
    ("float32", functools.partial(_WRITE, dtype="float32", layout="consolidated"), "float32"),
    ("Quark FP8, run in float32", functools.partial(_QUANTIZED, format="fp8"), "float32"),
    ("Quark MXFP4, run in float32", functools.partial(_QUANTIZED, format="mxfp4"), "float32"),
)
IMPLEMENTATIONS: tuple[Implementation, ...] = ("xla", "pallas")
# (number of the format, mesh): where the block also runs over several devices.
MESH_RUNS = (
    *((0, "ep=2"), (0, "tp=4"), (0, "dp=2,ep=2,tp=2"), (3, "ep=4"), (3, "ep=2,tp=4")),
    *((4, "dp=2,ep=2,tp=2"), (5, "ep=2,tp=3")),
)
_MOST_DEVICES = 8
TOKENS = 21
EPILOG = """\
Each row is one run of the block; the columns are the largest error of a row, ||ours - truth|| / ||truth||, at that
boundary. The truth is float64 numpy: unrounded for float32 runs (limit 2e-6), with the source framework's roundings
for bfloat16 runs (limit 4e-3). Exit code 1 if any boundary is outside.

example:
  muse-jax demo
"""


def add_parser(subparsers: argparse._SubParsersAction) -> None:
    """Add the subcommand `demo`."""
    parser = subparsers.add_parser(
        "demo",
        help="make small checkpoints, run them by every implementation, check every boundary",
        description="Make a small checkpoint in each format, run its block, and check it against the numpy truth.",
        epilog=EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--json", action="store_true", help="print one JSON object instead of a table")
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """Run every format by every implementation; 1 if a boundary parts from the truth."""
    config = small_config(expert_width=96)
    with contextlib.suppress(RuntimeError):  # JAX has started: its devices are what there is
        jax.config.update("jax_num_cpu_devices", _MOST_DEVICES)
    if not args.json:
        mode = "interpreted here" if interpreted() else "compiled"
        print(f"muse-jax demo on {jax.devices()[0].device_kind}, jax {jax.__version__}; Pallas kernels are {mode}")
        print(
            f"block: D={config.model_width} H={config.latent_width} F={config.expert_width} E={config.num_experts} "
            f"K={config.routes_per_token}, {TOKENS} tokens, random weights\n"
        )
    found = []
    for entry in progress(_runs(config), len(FORMATS) * len(IMPLEMENTATIONS) + len(MESH_RUNS), "running"):
        found.append(entry)
        if not args.json and not sys.stderr.isatty():
            print(f"  {entry['format']}, {entry['implementation']}, {entry['mesh']}: {_verdict(entry['report'])}")
    if args.json:
        shown = [{**entry, "report": None, "errors": _errors(entry["report"])} for entry in found]
        for one, entry in zip(shown, found, strict=True):
            one["parted"] = entry["report"].parted
            del one["report"]
        print(json.dumps({"runs": shown}, indent=2))
    else:
        names = list(_errors(found[0]["report"]))
        rows = [
            (
                entry["format"],
                entry["implementation"],
                entry["mesh"],
                *(_short(_errors(entry["report"])[name]) for name in names),
                _verdict(entry["report"]),
            )
            for entry in found
        ]
        print()
        print_table(("checkpoint", "implementation", "mesh", *names, "verdict"), rows)
        ties = sum(len(entry["report"].routing.ties) for entry in found)
        print(f"\n{len(found)} runs, every boundary checked against the numpy truth; {ties} near-ties in routing")
        if len(jax.devices()) < _MOST_DEVICES:
            print(f"meshes of up to {_MOST_DEVICES} devices are left out: there are {len(jax.devices())}")
    return int(any(entry["report"].parted for entry in found))


def _runs(config: Any) -> Iterator[dict[str, Any]]:
    rng = np.random.default_rng(0)
    x = rng.standard_normal((TOKENS, config.model_width)).astype(np.float32)
    with tempfile.TemporaryDirectory() as folder:
        for number, (label, write, dtype) in enumerate(FORMATS):
            path = write(Path(folder) / f"checkpoint{number}", config=config, seed=number)
            weights = load_layer(path, _LAYER)
            meshes = [axes for number_of_format, axes in MESH_RUNS if number_of_format == number]
            for implementation, axes in itertools.chain(
                itertools.product(IMPLEMENTATIONS, [None]), itertools.product(IMPLEMENTATIONS[:1], meshes)
            ):
                if axes is not None and math.prod(axis_sizes(axes).values()) > len(jax.devices()):
                    continue
                mesh = None if axes is None else open_mesh(axes)
                truth = compute_boundaries(weights, config, x, dtype=dtype, implementation="reference", mesh=mesh)
                start = time.perf_counter()
                ours = compute_boundaries(weights, config, x, dtype=dtype, implementation=implementation, mesh=mesh)
                yield {
                    "format": label,
                    "dtype": dtype,
                    "implementation": implementation,
                    "mesh": axes or "one device",
                    "seconds": round(time.perf_counter() - start, 2),
                    "report": compare_layers(_LAYER, ours, truth, Limits(), bias=np.asarray(weights["router_bias"])),
                }


def _errors(report: LayerReport) -> dict[str, float]:
    return {found.name: found.distance.max_row for found in report.boundaries if found.distance and found.name != "x"}


def _short(error: float) -> str:
    return "0" if error == 0 else f"{error:.0e}"


def _verdict(report: LayerReport) -> str:
    return "ok" if report.parted is None else f"PARTS at {report.parted}"
