"""`muse-jax bench`: expert rows and the whole block beside the floor of this device and beside peers, in one run."""

from __future__ import annotations

import argparse
import json
from typing import Any, get_args

import jax
import jax.numpy as jnp
from flax import nnx
from jax.sharding import Mesh

from muse_jax.bench.peers import make_peer
from muse_jax.bench.work import Routing, Sizes, device_rates, floor_us, route_sets, row_error, train_us
from muse_jax.checkpoint import small_config
from muse_jax.cli.mesh import add_mesh_options, open_mesh, schedule_of
from muse_jax.cli.table import print_table, progress
from muse_jax.experts import expert_rows
from muse_jax.moe import MuseMoE
from muse_jax.parallel import ShardedMoE
from pallas_kernels.dispatch import Implementation, resolve

_FULL = Sizes(experts=256, routes_per_token=8, h=4096, f=4096, d=8192)
_SMALL = Sizes(experts=64, routes_per_token=8, h=1024, f=1024, d=2048)
_SETS = 4
EPILOG = """\
Rows are route map, both expert GEMMs and SwiGLU: one unweighted row per route. Block is the whole layer, router and
projections included. Calls are queued back to back over four route sets; a time is the median of five such trains.
Peers do the same rows: torch (torch._grouped_mm), tokamax, ragged_dot. The error is that of one token's rows against
float64. With --mesh only the whole block is timed, and the floor stays that of one device.

example:
  muse-jax bench --sizes 16 4 128 96 256 --tokens 1 33
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
        "--implementations", nargs="+", choices=("pallas", "xla"), help="default: the best that runs here"
    )
    parser.add_argument("--routing", choices=get_args(Routing), default="uniform", help="how routes fall on experts")
    add_mesh_options(parser)
    parser.add_argument("--peers", nargs="+", choices=("torch", "tokamax", "ragged_dot"), default=[])
    parser.add_argument("--json", action="store_true", help="print one JSON object instead of a table")
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """Measure and print; always 0."""
    sizes = _sizes(args)
    mesh = open_mesh(args.mesh) if args.mesh else None
    rates = device_rates()
    found: list[dict[str, Any]] = []
    notes: list[str] = []
    for name in args.implementations or [None]:
        found += _ours(args, sizes, resolve(name), mesh)
    floors = {
        tokens: floor_us(sizes, route_sets(sizes, tokens, args.routing, _SETS), rates, jnp.dtype(args.dtype).itemsize)
        for tokens in args.tokens
    }
    if args.peers:
        found += _peers(args, sizes, notes)
    for entry in found:
        entry["floor_us"] = floors[entry["tokens"]]
        if "rows_us" in entry:
            entry["ratio"] = entry["rows_us"] / entry["floor_us"]
    device = jax.devices()[0].device_kind
    about = {"device": device, "jax": jax.__version__, "dtype": args.dtype, "routing": args.routing}
    about |= {"sizes": vars(sizes), "floor": rates.source, "notes": notes}
    if args.json:
        print(json.dumps(about | {"times": found}, indent=2))
        return 0
    print(f"{device}, jax {jax.__version__}, {args.dtype}, {args.routing} routing; floor: {rates.source}")
    print(" ".join(f"{name}={value}" for name, value in vars(sizes).items()))
    rows = [
        (
            str(entry["tokens"]),
            entry["path"],
            f"{entry['rows_us']:,.0f}" if "rows_us" in entry else "-",
            f"{entry['floor_us']:,.0f}",
            f"{entry['ratio']:.2f}" if "ratio" in entry else "-",
            f"{entry['block_us']:,.0f}" if "block_us" in entry else "-",
            f"{entry['error']:.1e}" if "error" in entry else "-",
        )
        for entry in sorted(found, key=lambda entry: entry["tokens"])
    ]
    print_table(("T", "path", "rows us", "floor us", "ratio", "block us", "row error"), rows)
    for note in notes:
        print(note)
    return 0


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
    args: argparse.Namespace, sizes: Sizes, implementation: Implementation, mesh: Mesh | None
) -> list[dict[str, Any]]:
    config = small_config(
        model_width=sizes.d,
        latent_width=sizes.h,
        expert_width=sizes.f,
        num_experts=sizes.experts,
        routes_per_token=sizes.routes_per_token,
        output_multiplier=2**-2.5,
    )
    make = nnx.jit(lambda: MuseMoE(config, rngs=nnx.Rngs(0), dtype=args.dtype, implementation=implementation))
    moe: MuseMoE | ShardedMoE = make()
    weights = moe.experts.gate_up[...], moe.experts.down[...]
    if mesh is not None:
        moe = ShardedMoE.from_weights(
            config, moe.weights(), mesh, dtype=args.dtype, schedule=schedule_of(args), implementation=implementation
        )
    graph, state = nnx.split(moe)
    rows = jax.jit(lambda x, ids, gate_up, down: expert_rows(x, ids, gate_up, down, implementation=implementation)[1])
    block = jax.jit(lambda state, x: nnx.merge(graph, state)(x))
    found = []
    for tokens in progress(args.tokens, len(args.tokens), implementation):
        ids = route_sets(sizes, tokens, args.routing, _SETS)
        key = jax.random.key(tokens)
        latents = jax.random.normal(key, (_SETS, tokens, sizes.h), args.dtype)
        inputs = jax.random.normal(key, (_SETS, tokens, sizes.d), args.dtype)
        calls = [(latents[i], jnp.asarray(ids[i]), *weights) for i in range(_SETS)]
        repeats = 40 if tokens <= 64 else 8
        entry: dict[str, Any] = {"tokens": tokens, "path": implementation if mesh is None else args.mesh}
        entry["block_us"] = train_us(block, [(state, inputs[i]) for i in range(_SETS)], repeats)
        if mesh is None:
            entry["error"] = row_error(latents[0], rows(*calls[0]), ids[0], *weights)
            entry["rows_us"] = train_us(rows, calls, repeats)
        found.append(entry)
    return found


def _peers(args: argparse.Namespace, sizes: Sizes, notes: list[str]) -> list[dict[str, Any]]:
    key = jax.random.key(0)
    gate_up = jax.random.normal(key, (sizes.experts, 2 * sizes.f, sizes.h), args.dtype) * sizes.h**-0.5
    down = jax.random.normal(key, (sizes.experts, sizes.h, sizes.f), args.dtype) * sizes.f**-0.5
    found = []
    for name in args.peers:
        for tokens in progress(args.tokens, len(args.tokens), name):
            sets = list(route_sets(sizes, tokens, args.routing, _SETS))
            try:
                measure = make_peer(name, gate_up, down)
                found.append({"tokens": tokens, "path": name, "rows_us": measure(sets, 20 if tokens <= 64 else 4)})
            except (NotImplementedError, RuntimeError) as error:
                notes.append(f"{name} at T={tokens}: {str(error).splitlines()[0][:200]}")
    return found
