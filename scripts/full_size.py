"""One layer at Muse Spark's full size on a GPU: every implementation right against float64, and its time beside the
floor.

    PYTHONPATH=. python scripts/full_size.py [--tokens 1 7 512 4096] [--implementations pallas xla]

E=256, K=8, D=8192, H=F=4096 in bfloat16 (about 26 GB of weights). Tokens 0 and T-1 are routed to experts 0, 127, 128
and 255 among others, whose rows lie at the ends of the arrays and of 31-bit offsets. The floor is the larger of the
bytes of the experts that have a route over `--memory-rate` and the operations over `--matrix-rate`; the defaults are
an H200's copy and matrix rates. Exit code 1 if a row is further than 8e-3 from float64 (four bfloat16 roundings) or a
time is over 3x the floor at T <= 512.
"""

from __future__ import annotations

import argparse
import statistics
import time

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from muse_jax.checkpoint import small_config
from muse_jax.experts import expert_rows
from muse_jax.moe import MuseMoE
from pallas_kernels.dispatch import Implementation

D, H, F, E, K = 8192, 4096, 4096, 256, 8
CHECKED = (0, 127, 128, 255)
ROUTE_SETS = 4


def full_block(implementation: Implementation) -> MuseMoE:
    config = small_config(
        model_width=D, latent_width=H, expert_width=F, num_experts=E, routes_per_token=K, output_multiplier=2**-2.5
    )
    return nnx.jit(lambda: MuseMoE(config, rngs=nnx.Rngs(0), implementation=implementation))()


def routes(tokens: int) -> np.ndarray:
    """[sets, T, K] distinct random experts a token; the first and the last token take the checked ones first."""
    rng = np.random.default_rng(tokens)
    ids = np.argsort(rng.random((ROUTE_SETS, tokens, E)), axis=-1)[..., :K].astype(np.int32)
    others = np.setdiff1d(np.arange(E), CHECKED)
    for edge in {0, tokens - 1}:
        ids[:, edge] = np.concatenate([CHECKED, rng.permutation(others)[: K - len(CHECKED)]])
    return ids


def floor_us(ids: np.ndarray, memory_rate: float, matrix_rate: float) -> float:
    experts = statistics.mean(len(np.unique(one)) for one in ids)
    return 1e6 * max(experts * 3 * H * F * 2 / memory_rate, ids[0].size * 3 * H * F * 2 / matrix_rate)


def row_error(x, rows, ids, gate_up, down) -> float:
    """The largest relative error of the first and last token's rows of checked experts, against float64."""
    worst = 0.0
    for token in {0, x.shape[0] - 1}:
        for k, expert in enumerate(CHECKED):
            assert ids[token, k] == expert
            h = np.asarray(gate_up[expert], np.float64) @ np.asarray(x[token], np.float64)
            want = np.asarray(down[expert], np.float64) @ (h[:F] / (1 + np.exp(-h[:F])) * h[F:])
            got = np.asarray(rows[token, k], np.float64)
            worst = max(worst, float(np.linalg.norm(got - want) / np.linalg.norm(want)))
    return worst


def microseconds(call, arguments: list, repeats: int) -> float:
    """Time of one call with calls queued back to back over all arguments: the median of five such trains."""
    jax.block_until_ready([call(*one) for one in arguments])
    laps = []
    for _ in range(5):
        start = time.perf_counter()
        jax.block_until_ready([call(*arguments[i % len(arguments)]) for i in range(repeats)])
        laps.append((time.perf_counter() - start) / repeats)
    return 1e6 * statistics.median(laps)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tokens", type=int, nargs="+", default=[1, 7, 512, 4096])
    parser.add_argument("--implementations", nargs="+", default=["pallas", "xla"])
    parser.add_argument("--memory-rate", type=float, default=4.3e12, help="bytes a second")
    parser.add_argument("--matrix-rate", type=float, default=790e12, help="operations a second")
    args = parser.parse_args()

    device = jax.devices()[0]
    print(f"{device.device_kind}, jax {jax.__version__}, bfloat16, E={E} K={K} D={D} H={H} F={F}")
    print(f"{'T':>6} {'path':>7} {'rows us':>9} {'floor':>8} {'ratio':>6} {'error':>8} {'block us':>9}")
    failed = False
    for implementation in args.implementations:
        block = full_block(implementation)
        gate_up, down = block.experts.gate_up[...], block.experts.down[...]
        rows_of = jax.jit(lambda x, ids, g, d, name=implementation: expert_rows(x, ids, g, d, implementation=name)[1])
        graph, state = nnx.split(block)
        run = jax.jit(lambda state, x, graph=graph: nnx.merge(graph, state)(x))
        for tokens in args.tokens:
            ids = routes(tokens)
            keys = jax.random.split(jax.random.key(tokens), ROUTE_SETS)
            latents = [jax.random.normal(key, (tokens, H), jnp.bfloat16) for key in keys]
            inputs = [jax.random.normal(key, (tokens, D), jnp.bfloat16) for key in keys]
            calls = [(x, jnp.asarray(one), gate_up, down) for x, one in zip(latents, ids, strict=True)]
            error = row_error(latents[0], rows_of(*calls[0]), ids[0], gate_up, down)
            repeats = 40 if tokens <= 64 else 8
            rows_us = microseconds(rows_of, calls, repeats)
            block_us = microseconds(run, [(state, x) for x in inputs], repeats)
            floor = floor_us(ids, args.memory_rate, args.matrix_rate)
            failed |= error > 8e-3 or (tokens <= 512 and rows_us > 3 * floor)
            print(
                f"{tokens:>6} {implementation:>7} {rows_us:>9.0f} {floor:>8.0f} {rows_us / floor:>6.2f} {error:>8.1e} "
                f"{block_us:>9.0f}",
                flush=True,
            )
        del block, state, gate_up, down  # 26 GB, before the next block is made
    return int(failed)


if __name__ == "__main__":
    raise SystemExit(main())
