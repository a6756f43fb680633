"""`muse-jax inspect`: what a checkpoint holds, layer by layer, and what is missing or stray; reads headers only."""

from __future__ import annotations

import argparse
import dataclasses
import json
from collections import Counter

from muse_jax.checkpoint.audit import KINDS, LayerAudit, describe
from muse_jax.checkpoint.inventory import Inventory, take_inventory, totals
from muse_jax.cli.table import print_table
from muse_jax.config import MuseConfig

EPILOG = """\
A checkpoint is a folder with config.json and model.safetensors (or an index and its shards), or a single .safetensors
file beside a config.json. Exit code 0: readable and complete; 2: unreadable, or tensors are missing, stray, wrong, or
not in the format that the quantization_config of config.json gives their layer.
formats: bf16, f32, mxfp4, and of FP8 fp8 (one scale a row), fp8_tensor, fp8_block (one scale a 128 x 128 block).

example:
  muse-jax inspect tests/data/hf-tiny/checkpoint
"""


def add_parser(subparsers: argparse._SubParsersAction) -> None:
    """Add the subcommand `inspect`."""
    parser = subparsers.add_parser(
        "inspect",
        help="what a checkpoint holds: formats, layers, shapes, what is missing or stray",
        description="Show what a checkpoint holds, from its headers alone.",
        epilog=EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("checkpoint", metavar="CKPT", help="checkpoint folder or .safetensors file")
    parser.add_argument("--json", action="store_true", help="print one JSON object instead of tables")
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """Print the inventory of args.checkpoint; ValueError after printing when something is wrong with a tensor."""
    inventory = take_inventory(args.checkpoint)
    if args.json:
        config = dataclasses.asdict(inventory.config)
        print(json.dumps({"config": config, **inventory.to_dict()}, indent=2))
    else:
        _print(inventory)
    if inventory.conflicts:
        count = len(inventory.conflicts)
        raise ValueError(
            f"{inventory.source} has {count} {'layer' if count == 1 else 'layers'} whose tensors and "
            f"quantization_config disagree: {inventory.conflicts[0]}"
        )
    if inventory.faults:
        counts = [(kind, sum(fault.kind == kind for fault in inventory.faults)) for kind in KINDS]
        words = ", ".join(f"{count} {kind}" for kind, count in counts if count)
        raise ValueError(f"{inventory.source} has tensors that are not as its config.json asks: {words}")
    return 0


def _print(inventory: Inventory) -> None:
    print(f"{inventory.source}: {len(inventory.files)} file(s), {_size(inventory.nbytes)}")
    print("elements: " + ", ".join(f"{count:,} {dtype}" for dtype, count in inventory.elements.items()))
    print(_settings(inventory.config))
    print()
    columns = ("layer", "attention", "format", "experts", "gate_up", "down", "size", "faults")
    print_table(columns, [_row(audit, inventory.config) for audit in inventory.layers])
    for audit in inventory.layers:
        if audit.faults:
            print(f"layer {audit.layer}: {describe(audit.faults)}")
        if audit.conflict:
            print(audit.conflict)
    if inventory.beyond:
        print(f"beyond layer {inventory.config.num_layers - 1}: {describe(inventory.beyond)}")


def _settings(config: MuseConfig) -> str:
    return (
        f"{config.num_layers} layers, {len(config.moe_layers)} with a MoE block: "
        f"D={config.model_width} H={config.latent_width} F={config.expert_width} "
        f"E={config.num_experts} K={config.routes_per_token}\n"
        f"output multiplier {config.output_multiplier:g}, route scale {config.route_scale:g}, "
        f"norm eps {config.norm_eps:g}, post-norm eps {config.post_norm_eps:g}"
    )


def _row(audit: LayerAudit, config: MuseConfig) -> tuple[str, ...]:
    nbytes, _ = totals(entry for _, entry in audit.tensors)
    attention = config.attention_types[audit.layer].removesuffix("_attention")
    faults = str(len(audit.faults)) if audit.faults else "-"
    head = (str(audit.layer), attention, audit.label, audit.layout.replace("_", " "))
    return (*head, _shapes(audit, "gate_up"), _shapes(audit, "down"), _size(nbytes), faults)


def _shapes(audit: LayerAudit, weight: str) -> str:
    """The stored shapes of a weight's tensors, scales apart, each with its number: '32 of [96, 64]'."""
    pairs = [pair for pair in audit.tensors if pair[0].weight == weight and pair[0].part == "weight"]
    counts = Counter(f"{list(entry.shape)}" for _, entry in pairs)
    return ", ".join(shape if count == 1 else f"{count} of {shape}" for shape, count in counts.items()) or "-"


def _size(nbytes: int) -> str:
    value, unit = float(nbytes), "B"
    for unit in ("B", "KiB", "MiB", "GiB", "TiB"):
        if value < 1024 or unit == "TiB":
            break
        value /= 1024
    return f"{value:.0f} {unit}" if unit == "B" else f"{value:.1f} {unit}"
