"""`muse-jax bench`: expert rows and the whole block beside the floor of this device and beside peers, in one run."""

from __future__ import annotations

import argparse
import dataclasses
import functools
import json
from pathlib import Path
from typing import Any, get_args

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax.sharding import Mesh
from jax.typing import DTypeLike

from muse_jax.bench.breakdown import kernel_times
from muse_jax.bench.peers import make_peer
from muse_jax.bench.tune import add_entries, tune
from muse_jax.bench.work import (
    Rates,
    Routing,
    Sizes,
    block_floor_us,
    bytes_a_weight,
    device_rates,
    even_sets,
    floor_us,
    local_sets,
    random_weight,
    route_sets,
    row_error,
    train_us,
)
from muse_jax.buckets import bucket
from muse_jax.checkpoint import small_config
from muse_jax.cli.mesh import add_mesh_options, open_mesh, schedule_of
from muse_jax.cli.table import print_table, progress
from muse_jax.config import MuseConfig
from muse_jax.experts import expert_rows
from muse_jax.moe import MuseMoE, MuseRouter
from muse_jax.parallel import ShardedMoE
from muse_jax.quantization.array import Format
from muse_jax.quantization.inputs import ActivationRule
from pallas_kernels.dispatch import Implementation, resolve
from pallas_kernels.target import current_target

_FULL = Sizes(experts=256, routes_per_token=8, h=4096, f=4096, d=8192)
_SMALL = Sizes(experts=64, routes_per_token=8, h=1024, f=1024, d=2048)
_SETS = 4
EPILOG = """\
Rows are route map, both expert GEMMs and SwiGLU: one unweighted row per route. Block is the whole layer, router and
projections included; padded is the block on the next bucket of tokens, the rest of which is padding. Even, for routing
that is not uniform, is the time of as many rows spread evenly over as many experts. Calls are queued back to back over
four route sets; a time is the median of five such trains. Peers do the same rows: torch (torch._grouped_mm), tokamax,
ragged_dot. The error is that of one token's rows against float64; with --format against the reference's
rows of the same codes. Times include the quantization of inputs. With --mesh only the whole block is timed, and the
floor stays that of one device. --local-experts N times the rows of a device that holds N of the E experts.
--breakdown prints the device time of each kernel of the block (GPU). --tune FILE times tiles for the sizes and tokens
given, on this GPU, and adds the best to FILE, which MUSE_JAX_TILES=FILE then puts to use.

example:
  muse-jax bench --sizes 16 4 128 96 256 --tokens 1 33 --routing uniform zipf
"""


def add_parser(subparsers: argparse._SubParsersAction) -> None:
    """Add the subcommand `bench`."""
    parser = subparsers.add_parser(
        "bench",
        help="time the block against the floor of this device and against peers",
        description="Time one layer's experts and the whole block on this device.",
        epilog=EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--tokens", type=int, nargs="+", default=[1, 8, 64, 512, 4096], metavar="T")
    parser.add_argument(
        "--sizes",
        type=int,
        nargs=5,
        metavar=("E", "K", "H", "F", "D"),
        help="default: Muse Spark's on a GPU, small ones else",
    )
    parser.add_argument("--dtype", choices=("bfloat16", "float32"), default="bfloat16")
    parser.add_argument(
        "--format", choices=get_args(Format), help="experts quantized to it; default: they have the dtype of the rows"
    )
    parser.add_argument(
        "--activation-rule", choices=get_args(ActivationRule), help="how inputs of MXFP4 experts are quantized"
    )
    parser.add_argument(
        "--implementations", nargs="+", choices=("pallas", "xla"), help="default: the best that runs here"
    )
    parser.add_argument(
        "--routing", nargs="+", choices=get_args(Routing), default=["uniform"], help="how routes fall on experts"
    )
    parser.add_argument("--local-experts", type=int, metavar="N", help="experts held here, of the E of --sizes")
    parser.add_argument("--breakdown", action="store_true", help="device time of each kernel of the block")
    parser.add_argument("--tune", type=Path, metavar="FILE", help="time tiles and add the best to this table")
    add_mesh_options(parser)
    parser.add_argument("--peers", nargs="+", choices=("torch", "tokamax", "ragged_dot"), default=[])
    parser.add_argument("--json", action="store_true", help="print one JSON object instead of a table")
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """Measure and print; always 0."""
    sizes = _sizes(args)
    if args.tune is not None:
        return _tune(args, sizes)
    mesh = open_mesh(args.mesh) if args.mesh else None
    rates = device_rates()
    found: list[dict[str, Any]] = []
    notes: list[str] = []
    for name in args.implementations or [None]:
        found += _ours(args, sizes, resolve(name), mesh, rates, notes)
    if args.peers:
        found += _peers(args, sizes, notes)
    itemsize = bytes_a_weight(args.dtype, args.format)
    for entry in found:
        ids = _ids(args, sizes, entry["tokens"], entry["routing"])
        entry["floor_us"] = floor_us(sizes, ids, rates, itemsize)
        if "rows_us" in entry:
            entry["ratio"] = entry["rows_us"] / entry["floor_us"]
        if "block_us" in entry:
            entry["block_floor_us"] = block_floor_us(sizes, ids, rates, itemsize, jnp.dtype(args.dtype).itemsize)
    device = jax.devices()[0].device_kind
    about = {"device": device, "jax": jax.__version__, "dtype": args.dtype, "format": args.format, "sizes": vars(sizes)}
    about |= {"local_experts": args.local_experts, "floor": rates.source, "notes": notes}
    if args.json:
        print(json.dumps(about | {"times": found}, indent=2))
        return 0
    experts = f", {args.format} experts {args.activation_rule or ''}".rstrip() if args.format else ""
    print(f"{device}, jax {jax.__version__}, {args.dtype}{experts}; floor: {rates.source}")
    held = f" experts held here={args.local_experts}" if args.local_experts else ""
    print(" ".join(f"{name}={value}" for name, value in vars(sizes).items()) + held)
    order = sorted(found, key=lambda entry: (args.routing.index(entry["routing"]), entry["tokens"]))
    print_table([title for title, _, _ in _COLUMNS], [_row(entry) for entry in order])
    for entry in order:
        if "kernels" in entry:
            print(f"T={entry['tokens']}, {entry['routing']}: {entry['span_us']:,.1f} us from first kernel to last")
            print_table(("kernel", "us"), [(name, f"{us:,.1f}") for name, us in entry["kernels"].items()])
    for note in notes:
        print(note)
    return 0


_COLUMNS = (
    ("T", "tokens", "d"),
    ("routing", "routing", "s"),
    ("path", "path", "s"),
    ("rows us", "rows_us", ",.0f"),
    ("floor us", "floor_us", ",.0f"),
    ("ratio", "ratio", ".2f"),
    ("even us", "even_us", ",.0f"),
    ("block us", "block_us", ",.0f"),
    ("block floor", "block_floor_us", ",.0f"),
    ("padded us", "padded_us", ",.0f"),
    ("row error", "error", ".1e"),
)


def _row(entry: dict[str, Any]) -> tuple[str, ...]:
    return tuple(format(entry[key], form) if key in entry else "-" for _, key, form in _COLUMNS)


def _ids(args: argparse.Namespace, sizes: Sizes, tokens: int, routing: Routing) -> np.ndarray:
    ids = route_sets(sizes, tokens, routing, _SETS)
    return local_sets(ids, args.local_experts) if args.local_experts else ids


def _tune(args: argparse.Namespace, sizes: Sizes) -> int:
    target = current_target()
    if target is None:
        raise ValueError(
            "--tune times tiles on a GPU of a known target, and this machine has none; see `muse-jax doctor`"
        )
    gate_up, down = _weights(sizes, sizes.experts, args.dtype, args.format)
    for tokens in args.tokens:
        entry, us, before = tune(sizes, tokens, gate_up, down, target)
        add_entries(args.tune, target.name, [entry])
        print(f"T={tokens}: {us:,.0f} us, {before:,.0f} before; {json.dumps(entry.to_json())}", flush=True)
    print(f"added to {args.tune}; MUSE_JAX_TILES={args.tune} puts it to use")
    return 0


def _weights(sizes: Sizes, experts: int, dtype: DTypeLike, form: Format | None) -> tuple[Any, Any]:
    """(gate_up, down) of random experts."""
    first, second = jax.random.split(jax.random.key(0), (2, experts))
    return (
        random_weight(first, (2 * sizes.f, sizes.h), dtype, form),
        random_weight(second, (sizes.h, sizes.f), dtype, form),
    )


def _block(
    config: MuseConfig, experts: tuple[Any, Any], args: argparse.Namespace, implementation: Implementation
) -> MuseMoE:
    """A random block with these experts."""
    few = dataclasses.replace(config, num_experts=config.routes_per_token)  # its own experts are not used
    block = MuseMoE(few, rngs=nnx.Rngs(0), dtype=args.dtype, implementation=implementation)
    router = MuseRouter(config, rngs=nnx.Rngs(1), implementation=implementation)
    weights = block.weights() | {"router_weight": router.weight[...], "router_bias": router.bias[...]}
    return MuseMoE.from_weights(
        config,
        weights | dict(zip(("gate_up", "down"), experts, strict=True)),
        dtype=args.dtype,
        activation_rule=args.activation_rule,
        implementation=implementation,
    )


def _sizes(args: argparse.Namespace) -> Sizes:
    if args.sizes is None:
        sizes = _FULL if jax.default_backend() == "gpu" else _SMALL
    else:
        experts, routes_per_token, h, f, d = args.sizes
        sizes = Sizes(experts=experts, routes_per_token=routes_per_token, h=h, f=f, d=d)
    if min(vars(sizes).values()) < 1 or sizes.routes_per_token > sizes.experts:
        raise ValueError(
            f"--sizes is {' '.join(map(str, vars(sizes).values()))}; expected positive numbers with K at most E"
        )
    if min(args.tokens) < 1:
        raise ValueError(f"--tokens is {' '.join(map(str, args.tokens))}; expected 1 or more each")
    return sizes


def _ours(
    args: argparse.Namespace,
    sizes: Sizes,
    implementation: Implementation,
    mesh: Mesh | None,
    rates: Rates,
    notes: list[str],
) -> list[dict[str, Any]]:
    held = args.local_experts or sizes.experts
    config = small_config(
        model_width=sizes.d,
        latent_width=sizes.h,
        expert_width=sizes.f,
        num_experts=held,
        routes_per_token=sizes.routes_per_token,
        output_multiplier=2**-2.5,
    )
    weights = _weights(sizes, held, args.dtype, args.format)
    moe: MuseMoE | ShardedMoE = _block(config, weights, args, implementation)
    if mesh is not None:
        moe = ShardedMoE.from_weights(
            config,
            moe.weights(),
            mesh,
            dtype=args.dtype,
            schedule=schedule_of(args),
            activation_rule=args.activation_rule,
            implementation=implementation,
        )
    graph, state = nnx.split(moe)
    block = jax.jit(lambda state, x, **padding: nnx.merge(graph, state)(x, **padding))

    def rows(spread_over: int) -> Any:
        return jax.jit(
            lambda x, ids, gate_up, down: expert_rows(
                x,
                ids,
                gate_up,
                down,
                spread_over=spread_over,
                activation_rule=args.activation_rule,
                implementation=implementation,
            )[1]
        )

    uniform = rows(sizes.experts)
    found = []
    runs = [(routing, tokens) for routing in args.routing for tokens in args.tokens]
    for routing, tokens in progress(runs, len(runs), implementation):
        ids = _ids(args, sizes, tokens, routing)
        key = jax.random.key(tokens)
        latents = jax.random.normal(key, (_SETS, tokens, sizes.h), args.dtype)
        calls = [(latents[i], jnp.asarray(ids[i]), *weights) for i in range(_SETS)]
        repeats = 40 if tokens <= 64 else 8
        path = implementation if mesh is None else args.mesh
        entry: dict[str, Any] = {"tokens": tokens, "routing": routing, "path": path}
        if mesh is None:
            entry["error"] = row_error(
                latents[0], uniform(*calls[0]), ids[0], *weights, activation_rule=args.activation_rule
            )
            entry["rows_us"] = train_us(uniform, calls, repeats)
        if routing != "uniform":
            even, used = even_sets(ids)
            calls = [(latents[i], jnp.asarray(even[i]), *weights) for i in range(_SETS)]
            entry["even_us"] = train_us(rows(used), calls, repeats)
        elif args.local_experts is None:
            inputs = jax.random.normal(key, (_SETS, tokens, sizes.d), args.dtype)
            calls = [(state, inputs[i]) for i in range(_SETS)]
            entry["block_us"] = train_us(block, calls, repeats)
            if mesh is None:
                padded = jnp.pad(inputs, ((0, 0), (0, bucket(tokens) - tokens), (0, 0)))
                with_padding = functools.partial(block, num_tokens=jnp.int32(tokens))
                entry["padded_us"] = train_us(with_padding, [(state, padded[i]) for i in range(_SETS)], repeats)
            if args.breakdown:
                try:
                    entry["kernels"], entry["span_us"] = kernel_times(block, calls, 20 if tokens <= 64 else 4)
                except NotImplementedError as error:
                    notes.append(f"no breakdown: {error}")
        found.append(entry)
    return found


def _peers(args: argparse.Namespace, sizes: Sizes, notes: list[str]) -> list[dict[str, Any]]:
    gate_up, down = _weights(sizes, sizes.experts, args.dtype, None)
    found = []
    for name in args.peers:
        try:
            measure = make_peer(name, gate_up, down)
        except NotImplementedError as error:
            notes.append(f"{name}: {error}")
            continue
        for tokens in progress(args.tokens, len(args.tokens), name):
            sets = list(route_sets(sizes, tokens, args.routing[0], _SETS))
            try:
                us = measure(sets, 20 if tokens <= 64 else 4)
                found.append({"tokens": tokens, "routing": args.routing[0], "path": name, "rows_us": us})
            except (NotImplementedError, RuntimeError) as error:
                notes.append(f"{name} at T={tokens}: {str(error).splitlines()[0][:200]}")
    return found
