"""Checks at full size that take a GPU: experts at the edges of 32-bit offsets, equal bits whatever the tile, equal bits
run after run, and arrays beyond 2^31 elements.

    python scripts/check_full_size.py

1. Rows of experts 0, 127, 128 and 255, in bfloat16, FP8 and MXFP4, whose w2 or w13 has 2^32 bytes: bfloat16 against
   float64, codes against the reference's rows of the same codes; and those experts' bytes against the experts made
   alone.
2. Rows of the tiles chosen for T tokens against those of the smallest tile, for uniform and skewed routing: the largest
   difference, which must be zero.
3. The same call 20 times: every bit equal.
4. T = 65,536 and 65,600, where [T, K, H] has 2^31 elements and more: rows of the first, middle and last token against
   float64.
Exit code 1 if one fails.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from muse_jax.bench.work import Sizes, random_weight, route_sets, row_error
from muse_jax.experts import expert_rows
from muse_jax.quantization.array import Format
from muse_jax.quantization.inputs import ActivationRule
from pallas_kernels import expert_gemm
from pallas_kernels.expert_gemm import Tile
from pallas_kernels.route_map import route_map

SIZES = Sizes(experts=256, routes_per_token=8, h=4096, f=4096, d=8192)
SMALLEST = Tile(cols=64, depth=64, num_warps=4, num_stages=2)
TOKENS = (1, 8, 64, 512, 4096)
MANY = (65_536, 65_600)
RUNS = 20
CORNERS = (0, 127, 128, 255, 1, 254, 64, 191)
FORMATS: tuple[tuple[Format | None, ActivationRule | None], ...] = (
    (None, None),
    ("fp8", None),
    ("mxfp4", "even"),
    ("mxfp4", "w4a16"),
)
SHAPES = (2 * SIZES.f, SIZES.h), (SIZES.h, SIZES.f)
KEYS = jax.random.split(jax.random.key(0), (2, SIZES.experts))


def weights(form: Format | None = None, experts: Sequence[int] = range(SIZES.experts)) -> list[Any]:
    """gate_up and down of these of the random experts, codes in the arrays that the kernels read."""
    picked = KEYS[:, np.array(experts)]
    return [random_weight(keys, shape, jnp.bfloat16, form) for keys, shape in zip(picked, SHAPES, strict=True)]


def differing_bytes(form: Format | None, held: list[Any]) -> int:
    """How many bytes of the corner experts, cut from the whole weights, differ from those of the same experts alone."""
    wrong = 0
    for alone, weight in zip(weights(form, CORNERS), held, strict=True):
        cut = jax.tree.map(lambda part: part[np.array(CORNERS)], weight)
        alone = jax.tree.map(lambda part: part[: len(CORNERS)], alone)
        for given, wanted in zip(jax.tree.leaves(cut), jax.tree.leaves(alone), strict=True):
            flat = [np.ascontiguousarray(part).reshape(-1).view(np.uint8) for part in (given, wanted)]
            wrong += int(np.sum(flat[0] != flat[1]))
    return wrong


def corner_errors(rule: ActivationRule | None, held: list[Any]) -> list[float]:
    """The largest error of a row of the experts in CORNERS at 1, 7, 512 and 4096 tokens."""
    run = jax.jit(lambda x, ids, *held: expert_rows(x, ids, *held, activation_rule=rule)[1])
    gate_up, down = held
    found = []
    for tokens in (1, 7, 512, 4096):
        ids = np.array(route_sets(SIZES, tokens, "uniform", 1)[0])
        ids[0] = CORNERS
        x = jax.random.normal(jax.random.key(tokens), (tokens, SIZES.h), jnp.bfloat16)
        found.append(row_error(x, run(x, jnp.asarray(ids), gate_up, down), ids, gate_up, down, rule))
    return found


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
    for form, rule in FORMATS:
        held = weights(form)
        wrong = differing_bytes(form, held)
        errors = corner_errors(rule, held)
        failed |= wrong > 0 or max(errors) > 1e-2
        about = " ".join(filter(None, (form or "bfloat16", rule)))
        print(
            f"{about}: {wrong} bytes differ from the experts alone; row errors of experts {CORNERS}: {errors}",
            flush=True,
        )
        del held
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
