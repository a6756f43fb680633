"""`muse-jax convert`: a checkpoint's MoE layers from safetensors into Orbax, quantized on the way if wanted."""

from __future__ import annotations

import argparse
import dataclasses
import json
import time
from typing import get_args

from muse_jax.checkpoint.convert import ConvertedLayer, Online, convert_checkpoint
from muse_jax.quantization.mxfp4 import CHUNK

EPILOG = """\
Each layer with a MoE block becomes one Orbax tree, OUT/layer_<i>; muse_jax.checkpoint.restore.restore_layer puts it on
one device or a mesh. --online mxfp4 quantizes experts that are stored unquantized, a few at a time, but not those of
the model's first and last layer. OUT appears when every layer is written, or not at all. Needs orbax-checkpoint:
pip install 'muse-jax[convert]'. Exit code 0: written; 2: bad input.

example:
  muse-jax convert tests/data/hf-tiny/checkpoint muse-tiny-orbax --online mxfp4
"""


def add_parser(subparsers: argparse._SubParsersAction) -> None:
    """Add the subcommand `convert`."""
    parser = subparsers.add_parser(
        "convert",
        help="safetensors to Orbax, a layer at a time, with online quantization to MXFP4",
        description="Convert the MoE layers of a checkpoint to Orbax.",
        epilog=EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("checkpoint", metavar="CKPT", help="checkpoint folder or .safetensors file")
    parser.add_argument("out", metavar="OUT", help="folder to write; must not exist, or be empty")
    parser.add_argument("--online", choices=get_args(Online), help="quantize unquantized experts to this format")
    parser.add_argument("--layers", metavar="LIST", help="layers such as 0,4-7; default: all with a MoE block")
    parser.add_argument(
        "--chunk", type=int, default=CHUNK, metavar="N", help=f"experts quantized at a time; default: {CHUNK}"
    )
    parser.add_argument("--json", action="store_true", help="print one JSON object instead of lines")
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """Convert args.checkpoint and say what became of each layer."""
    started = time.monotonic()
    converted = convert_checkpoint(
        args.checkpoint,
        args.out,
        layers=None if args.layers is None else layer_numbers(args.layers),
        online=args.online,
        chunk=args.chunk,
        on_layer=(lambda _: None) if args.json else _print_layer,
    )
    seconds = time.monotonic() - started
    if args.json:
        rows = [dataclasses.asdict(layer) for layer in converted]
        print(json.dumps({"out": args.out, "seconds": seconds, "layers": rows}, indent=2))
    else:
        total = sum(layer.nbytes for layer in converted)
        print(f"{args.out}: {len(converted)} layers, {total:,} bytes, {seconds:.1f} s")
    return 0


def layer_numbers(text: str) -> list[int]:
    """[0, 4, 5, 6, 7] of "0,4-7"; raises ValueError for anything else."""
    numbers: list[int] = []
    for part in text.split(","):
        first, dash, last = part.partition("-")
        if not first.isdecimal() or (dash and not last.isdecimal()) or (dash and int(last) < int(first)):
            raise ValueError(f"--layers is {text!r}; expected numbers and ranges such as 0,4-7")
        numbers += range(int(first), int(last if dash else first) + 1)
    return numbers


def _print_layer(layer: ConvertedLayer) -> None:
    change = layer.source if layer.source == layer.format else f"{layer.source} -> {layer.format}"
    print(f"layer {layer.layer}: {change}, {layer.nbytes:,} bytes", flush=True)
