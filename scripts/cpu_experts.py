"""Our experts and transformers' on one CPU, float32, side by side: expert rows, norm, weights and sum.

    python scripts/cpu_experts.py --torch-python PATH [--tokens 1 16 128 1024]

PATH is a Python 3.11 with torch 2.13 and transformers 5.24 (`pip install torch==2.13.0 transformers==5.24.0`). The two
sides run in turn, `--rounds` times each, and the best round of each is printed: other work on the machine only slows.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import time
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np

from muse_jax.experts import expert_rows
from pallas_kernels.finalize import finalize


def ours(sizes: tuple[int, int, int, int], tokens: list[int], repeats: int) -> dict[int, float]:
    """Milliseconds of one call for each token count: the median of `repeats`."""
    experts, routes, h, f = sizes
    rng = np.random.default_rng(0)
    normal = lambda *shape: jnp.asarray(0.03 * rng.standard_normal(shape, dtype=np.float32))
    gate_up, down, gain = normal(experts, 2 * f, h), normal(experts, h, f), normal(h)

    times = {}
    for count in tokens:
        x = jnp.asarray(rng.standard_normal((count, h), dtype=np.float32))
        ids = jnp.asarray(np.stack([rng.permutation(experts)[:routes] for _ in range(count)]).astype(np.int32))
        weights = jnp.asarray(rng.random((count, routes), dtype=np.float32))
        step = jax.jit(_block).lower(x, ids, weights, gate_up, down, gain).compile()
        step(x, ids, weights, gate_up, down, gain).block_until_ready()
        laps = []
        for _ in range(repeats):
            start = time.perf_counter()
            step(x, ids, weights, gate_up, down, gain).block_until_ready()
            laps.append(time.perf_counter() - start)
        times[count] = 1e3 * statistics.median(laps)
    return times


def _block(x, ids, weights, gate_up, down, gain):
    _, rows = expert_rows(x, ids, gate_up, down, implementation="xla")
    return finalize(rows, weights, ids, gain, eps=1e-8, implementation="xla")


def theirs(python: str, sizes: tuple[int, int, int, int], tokens: list[int], repeats: int) -> dict:
    """The report of `cpu_experts_torch.py`, run by the interpreter `python`."""
    request = {"sizes": sizes, "tokens": tokens, "repeats": repeats, "threads": os.cpu_count()}
    script = Path(__file__).with_name("cpu_experts_torch.py")
    done = subprocess.run([python, str(script)], input=json.dumps(request), capture_output=True, text=True, check=False)
    if done.returncode:
        raise SystemExit(f"{python} {script} failed:\n{done.stderr[-2000:]}")
    return json.loads(done.stdout)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--torch-python", required=True, metavar="PATH", help="Python with torch and transformers")
    parser.add_argument("--tokens", type=int, nargs="+", default=[1, 16, 128, 1024])
    parser.add_argument("--sizes", type=int, nargs=4, default=[64, 8, 1024, 1024], metavar=("E", "K", "H", "F"))
    parser.add_argument("--repeats", type=int, default=7)
    parser.add_argument("--rounds", type=int, default=3)
    args = parser.parse_args()
    sizes = tuple(args.sizes)

    mine: dict[int, float] = {}
    peer: dict[int, dict[str, float]] = {}
    report = {}
    for _ in range(args.rounds):
        report = theirs(args.torch_python, sizes, args.tokens, args.repeats)
        for count, found in report["times"].items():
            best = peer.setdefault(int(count), found)
            peer[int(count)] = {name: min(best[name], found[name]) for name in found}
        for count, found in ours(sizes, args.tokens, args.repeats).items():
            mine[count] = min(mine.get(count, found), found)

    print(f"jax {jax.__version__}, torch {report['torch']}, transformers {report['transformers']}, float32, ms a call")
    print(f"E={sizes[0]} K={sizes[1]} H={sizes[2]} F={sizes[3]}, {os.cpu_count()} cores")
    print(f"{'T':>6} {'ours':>9} {'theirs':>9} {'ratio':>6}  their fastest")
    for count in args.tokens:
        name, best = min(peer[count].items(), key=lambda item: item[1])
        print(f"{count:>6} {mine[count]:>9.1f} {best:>9.1f} {mine[count] / best:>6.2f}  {name}")


if __name__ == "__main__":
    main()
