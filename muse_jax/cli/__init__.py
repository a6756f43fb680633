"""The command `muse-jax`: one file a subcommand, each with `add_parser(subparsers)` that sets `run`."""

from __future__ import annotations

import argparse
import importlib
import sys
from collections.abc import Sequence

COMMANDS = ("doctor", "demo", "inspect", "dump", "compare", "convert", "bench", "aot")


class InputError(Exception):
    """Bad input from the user: printed as one sentence on stderr, exit code 2."""


def main(argv: Sequence[str] | None = None) -> int:
    """Run one subcommand; returns 0 for success, 1 for a comparison that failed, 2 for bad input."""
    parser = argparse.ArgumentParser(prog="muse-jax", description="Muse Spark's MoE block in JAX.")
    subparsers = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")
    for name in COMMANDS:
        importlib.import_module(f"muse_jax.cli.{name}").add_parser(subparsers)
    args = parser.parse_args(argv)
    try:
        return args.run(args)
    except (InputError, ValueError, NotImplementedError, OSError) as error:
        print(f"muse-jax {args.command}: {error}", file=sys.stderr)
        return 2
