"""`muse-jax dump`: run one MoE block of a checkpoint and write every boundary to a file."""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path

import jax
import numpy as np

import muse_jax
from muse_jax.checkpoint import load_layer
from muse_jax.cli.mesh import add_mesh_options, open_mesh, schedule_of
from muse_jax.cli.table import print_table
from muse_jax.compare import read_dump, write_dump
from muse_jax.config import MuseConfig
from muse_jax.dump import DTYPES, check_profile, compute_boundaries
from muse_jax.reference import PROFILES
from muse_jax.reference.quantized import ACTIVATION_RULES
from pallas_kernels.dispatch import interpreted, resolve

EPILOG = """\
FILE of --input is safetensors and holds L.x or x, [T, D]. The file of --out gets L.<boundary> for every boundary,
whole or not at all. float32 widens the weights and rounds nothing in between; bfloat16 rounds where vLLM on AMD does,
and the reference can take another framework's roundings with --profile. --implementation pallas interprets the
kernels on a CPU. --mesh runs over several devices (a CPU is split into as many as it takes); the reference then rounds
as vLLM's ranks do, each with its own scales of FP8 rows. Quantized experts keep their codes and scales; what they read
is quantized as their format says.

example:
  muse-jax dump tests/data/hf-tiny/checkpoint --layer 0 --input tests/data/hf-tiny/moe_f32.safetensors \\
    --out layer0.safetensors
"""


def add_parser(subparsers: argparse._SubParsersAction) -> None:
    """Add the subcommand `dump`."""
    parser = subparsers.add_parser(
        "dump",
        help="run one MoE block of a checkpoint and write every boundary",
        description="Run one MoE block of a checkpoint on a given input and write every boundary.",
        epilog=EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("checkpoint", metavar="CKPT", help="checkpoint folder or .safetensors file")
    parser.add_argument("--layer", type=int, required=True, metavar="L", help="layer whose block runs")
    parser.add_argument("--input", required=True, metavar="FILE", help="safetensors with L.x or x")
    parser.add_argument("--out", required=True, metavar="FILE", help="dump file to write")
    parser.add_argument("--dtype", choices=tuple(DTYPES), default="float32", help="default: float32")
    parser.add_argument(
        "--implementation", choices=("pallas", "xla", "reference"), help="default: the best that runs here"
    )
    parser.add_argument("--profile", choices=tuple(PROFILES), help="roundings of the reference, default: the dtype's")
    parser.add_argument(
        "--activation-rule",
        choices=ACTIVATION_RULES,
        help="how inputs of MXFP4 experts find their shared exponents, or w4a16 to leave them be; default: even",
    )
    add_mesh_options(parser)
    parser.add_argument("--json", action="store_true", help="print one JSON object instead of a table")
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """Compute and write the boundaries; 0 when the file is there."""
    profile = check_profile(args.profile, args.dtype, args.implementation)
    config = MuseConfig.from_checkpoint(args.checkpoint)
    layer = config.check_moe_layer(args.layer)
    out = Path(args.out)
    if not out.absolute().parent.is_dir():
        raise ValueError(f"--out is {out}; its folder does not exist")
    mesh = open_mesh(args.mesh) if args.mesh else None
    x = _input(args.input, layer)
    implementation = args.implementation or resolve(None)
    if implementation == "pallas" and interpreted():
        print("pallas on this backend means interpret mode: slow, for checking only", file=sys.stderr)
    weights = load_layer(args.checkpoint, layer, config)
    found = compute_boundaries(
        weights,
        config,
        x,
        dtype=args.dtype,
        implementation=implementation,
        profile=profile,
        mesh=mesh,
        schedule=schedule_of(args),
        activation_rule=args.activation_rule,
    )
    metadata = {
        "made_by": f"muse-jax {muse_jax.__version__}, jax {jax.__version__}",
        "checkpoint": Path(args.checkpoint).name,
        "dtype": args.dtype,
        "implementation": implementation,
        "profile": profile,
        "activation_rule": args.activation_rule or "the format's own",
        "mesh": args.mesh or "one device",
        "reduce_dtype": args.reduce_dtype if args.mesh else "none",
        "device": "numpy" if implementation == "reference" else jax.devices()[0].device_kind,
    }
    write_dump(out, {layer: found}, metadata)
    if args.json:
        shapes = {name: {"shape": value.shape, "dtype": value.dtype.name} for name, value in found.items()}
        print(json.dumps(metadata | {"out": str(out), "layer": layer, "boundaries": shapes}, indent=2))
        return 0
    print(f"{out}: layer {layer}, {x.shape[0]} tokens, {args.dtype}, {implementation}, profile {profile}")
    print_table(("boundary", "shape", "dtype"), [(n, str(list(v.shape)), v.dtype.name) for n, v in found.items()])
    return 0


def _input(path: str, layer: int) -> np.ndarray:
    layers = read_dump(path).layers
    for key in (layer, None):
        if "x" in layers.get(key, {}):
            return layers[key]["x"]
    raise ValueError(f"{path} holds neither {layer}.x nor x; expected the block's input [T, D]")
