"""`muse-jax aot`: every kernel and tile config compiled for AMD on any machine, and what it compiled to."""

from __future__ import annotations

import argparse
import dataclasses
import json

from muse_jax.cli.table import print_table
from pallas_kernels import aot
from pallas_kernels.target import TARGETS, find_target

_ROCM = [name for name, target in TARGETS.items() if target.platform == "rocm"]
EPILOG = f"""\
Needs the package triton, and no GPU. Registers are estimates (XLA bundles another Triton); spills and
matrix opcodes show reliably. Exit code 0: every kernel is fine; 1: one spills, needs more LDS than the chip has, or
lacks its matrix instruction; 2: bad input.

example:
  muse-jax aot --target {" ".join(_ROCM)}
"""


def add_parser(subparsers: argparse._SubParsersAction) -> None:
    """Add the subcommand `aot`."""
    parser = subparsers.add_parser(
        "aot",
        help="compile every kernel for AMD on any machine: registers, spills, LDS, MFMA",
        description="Compile every kernel and tile config for AMD GPUs without one.",
        epilog=EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument(
        "--target", nargs="+", default=_ROCM, metavar="NAME", help=f"{' or '.join(_ROCM)}; all by default"
    )
    parser.add_argument("--json", action="store_true", help="print one JSON list instead of a table")
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """Print what every kernel compiled to; 1 if one is not fit for its chip."""
    for name in args.target:
        find_target(name)
    checked = aot.check(args.target)
    if args.json:
        print(json.dumps([dataclasses.asdict(report) | {"faults": faults} for report, faults in checked], indent=2))
    else:
        columns = (
            "target",
            "case",
            "kernel",
            "warps",
            "VGPRs",
            "spills",
            "LDS",
            "occupancy",
            "MFMA",
            "MFMA in loop",
            "bytes/MFMA",
            "faults",
        )
        print_table(columns, [_row(report, faults) for report, faults in checked])
    return int(any(faults for _, faults in checked))


def _row(report: aot.Report, faults: list[str]) -> tuple[str, ...]:
    return (
        report.target,
        report.case,
        report.kernel,
        str(report.num_warps),
        str(report.vgprs),
        str(report.spills),
        str(report.lds_bytes),
        str(report.occupancy),
        ", ".join(f"{count} {opcode}" for opcode, count in report.mfma.items()) or "-",
        str(report.loop_mfma),
        f"{report.bytes_per_mfma:.0f}",
        "; ".join(faults) or "none",
    )
