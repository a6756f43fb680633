"""Checks at full size that take a GPU: equal bits whatever the tile, equal bits run after run, and arrays beyond 2^31
elements.

    python scripts/check_full_size.py

1. Rows of the tiles chosen for T tokens against those of the smallest tile, for uniform and skewed routing: the largest
   difference, which must be zero.
2. The same call 20 times: every bit equal.
3. T = 65,536 and 65,600, where [T, K, H] has 2^31 elements and more: rows of the first, middle and last token against
   float64.
Exit code 1 if one fails.
"""

from __future__ import annotations

import sys

import jax
import jax.numpy as jnp
import numpy as np

from muse_jax.bench.work import Sizes, route_sets, row_error
from muse_jax.experts import expert_rows
from pallas_kernels import expert_gemm
from pallas_kernels.expert_gemm import Tile
from pallas_kernels.route_map import route_map

SIZES = Sizes(experts=256, routes_per_token=8, h=4096, f=4096, d=8192)
SMALLEST = Tile(cols=64, depth=64, num_warps=4, num_stages=2)
TOKENS = (1, 8, 64, 512, 4096)
MANY = (65_536, 65_600)
RUNS = 20


def weights() -> tuple[jax.Array, jax.Array]:
    """Random experts, made one at a time."""

    def make(key: jax.Array, rows: int, columns: int) -> jax.Array:
        one = lambda key: (jax.random.normal(key, (rows, columns)) * columns**-0.5).astype(jnp.bfloat16)
        return jax.jit(lambda: jax.lax.map(one, jax.random.split(key, SIZES.experts)))()

    return make(jax.random.key(0), 2 * SIZES.f, SIZES.h), make(jax.random.key(1), SIZES.h, SIZES.f)


@jax.jit
def rows_of(x: jax.Array, ids: jax.Array, gate_up: jax.Array, down: jax.Array) -> jax.Array:
    """Expert rows as a user gets them."""
    return expert_rows(x, ids, gate_up, down)[1]


@jax.jit
def plain_rows(x: jax.Array, ids: jax.Array, gate_up: jax.Array, down: jax.Array) -> jax.Array:
    """Expert rows with the smallest tile for everything."""
    routes = route_map(ids, num_experts=SIZES.experts, block_rows=16)
    activation = expert_gemm.gate_up(x, gate_up, routes, routes_per_token=SIZES.routes_per_token, tile=SMALLEST)
    return expert_gemm.down(activation, down, routes, tile=SMALLEST).reshape(*ids.shape, SIZES.h)


def main() -> int:
    """Run the checks and print one line each."""
    if jax.default_backend() != "gpu":
        print("this machine has no GPU; full-size checks need one", file=sys.stderr)
        return 2
    failed = False
    gate_up, down = weights()
    for routing in ("uniform", "zipf", "hot", "few"):
        for tokens in TOKENS:
            ids = jnp.asarray(route_sets(SIZES, tokens, routing, 1)[0])
            x = jax.random.normal(jax.random.key(tokens), (tokens, SIZES.h), jnp.bfloat16)
            first = rows_of(x, ids, gate_up, down)
            difference = int(jnp.sum(first != plain_rows(x, ids, gate_up, down)))
            repeats = sum(int(jnp.sum(first != rows_of(x, ids, gate_up, down))) for _ in range(RUNS))
            failed |= bool(difference or repeats)
            print(
                f"{routing} T={tokens}: {difference} elements differ from the smallest tile's, {repeats} in {RUNS} runs"
            )
    for tokens in MANY:
        ids = route_sets(SIZES, tokens, "uniform", 1)[0]
        x = jax.random.normal(jax.random.key(tokens), (tokens, SIZES.h), jnp.bfloat16)
        rows = rows_of(x, jnp.asarray(ids), gate_up, down)
        picked = np.array([0, tokens // 2, tokens - 1])
        errors = [row_error(x[t : t + 1], rows[t : t + 1], ids[t : t + 1], gate_up, down) for t in picked]
        failed |= max(errors) > 1e-2
        print(f"T={tokens}, {rows.size - 2**31:+,} elements beyond 2^31: row errors {errors}")
        del rows
    return int(failed)


if __name__ == "__main__":
    sys.exit(main())
