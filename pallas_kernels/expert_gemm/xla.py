"""The expert GEMMs in plain XLA: row blocks, each multiplied by its own expert's weights and no other.

Where experts have a row or more on average, the first block of every expert is multiplied in one batched product that
reads the stacked weights in place, and a loop over blocks takes what is left of the crowded experts. Where most experts
have no row, the loop takes one route at a time. Either way the work is a small multiple of R rows times one expert,
whatever E is; `jax.lax.ragged_dot` would multiply every row by every expert on CPU, CUDA and ROCm. The loop comes
second because XLA copies an expert's weights before each of its products.
"""

from __future__ import annotations

from collections.abc import Callable

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float

from pallas_kernels.formats import round_to, swiglu
from pallas_kernels.route_map import RouteMap

_FULL_PRECISION = {"precision": lax.Precision.HIGHEST, "preferred_element_type": jnp.float32}
_CACHED_BYTES = 2**18  # of one expert's weights that a CPU copies at a time


def gate_up(
    x: Float[Array, "T H"], weight: Float[Array, "E F2 H"], routes: RouteMap, num_routes: int
) -> Float[Array, "R F"]:
    """See `pallas_kernels.expert_gemm.gate_up`."""
    half = weight.shape[1] // 2
    routes_per_token = num_routes // x.shape[0]

    def gather(rows: jax.Array) -> jax.Array:
        return x[jnp.minimum(rows // routes_per_token, x.shape[0] - 1)]

    def finish(product: jax.Array) -> jax.Array:
        return swiglu(product[..., :half], product[..., half:], x.dtype)

    return _multiply_blocks(routes, weight, gather, finish, jnp.zeros((num_routes, half), x.dtype))


def down(activation: Float[Array, "R F"], weight: Float[Array, "E H F"], routes: RouteMap) -> Float[Array, "R H"]:
    """See `pallas_kernels.expert_gemm.down`."""

    def gather(rows: jax.Array) -> jax.Array:
        return activation[jnp.minimum(rows, activation.shape[0] - 1)]

    def finish(product: jax.Array) -> jax.Array:
        return round_to(product, activation.dtype).astype(activation.dtype)

    out = jnp.zeros((activation.shape[0], weight.shape[1]), activation.dtype)
    return _multiply_blocks(routes, weight, gather, finish, out)


def _multiply_blocks(
    routes: RouteMap,
    weight: jax.Array,
    gather: Callable[[jax.Array], jax.Array],
    finish: Callable[[jax.Array], jax.Array],
    out: jax.Array,
) -> jax.Array:
    """`out` with the rows of every expert's blocks set to finish(gather(rows) @ weight[expert].T); others stay zero."""
    num_experts, num_routes = weight.shape[0], out.shape[0]
    blocks = jnp.arange(routes.group.shape[0])
    left = (routes.group >= 0) & (routes.group < num_experts)

    if routes.block_rows > 1:
        expert = jnp.where(left, routes.group, num_experts)
        first = jnp.full((num_experts + 1,), blocks.size).at[expert].min(blocks)
        is_first = left & (first[expert] == blocks)
        rows = jnp.full((num_experts, routes.block_rows), num_routes, jnp.int32)
        rows = rows.at[jnp.where(is_first, expert, num_experts)].set(routes.rows, mode="drop")
        product = lax.dot_general(gather(rows), weight, (((2,), (2,)), ((0,), (0,))), **_FULL_PRECISION)
        out = out.at[rows].set(finish(product), mode="drop")
        left = left & ~is_first

    order = jnp.argsort(~left, stable=True)
    rows_left = jnp.where(left[:, None], routes.rows, num_routes)

    def step(i: jax.Array, out: jax.Array) -> jax.Array:
        rows = rows_left[order[i]]
        return out.at[rows].set(finish(_one_expert(gather(rows), weight, routes.group[order[i]])), mode="drop")

    # With one row a block only masked routes leave blocks unused, and a loop of known length never waits for the host.
    steps = blocks.size if routes.block_rows == 1 else jnp.sum(left)
    return lax.fori_loop(0, steps, step, out)


def _one_expert(rows: jax.Array, weight: jax.Array, expert: jax.Array) -> jax.Array:
    """rows [M, depth] @ weight[expert] [columns, depth].T in float32.

    A CPU walks the columns in pieces whose copy stays in its cache; a last piece that would reach past the end starts
    earlier instead (`dynamic_slice` clamps), and writes the same columns again.
    """
    columns, depth = weight.shape[1:]
    piece = columns if jax.default_backend() == "gpu" else min(columns, max(16, _CACHED_BYTES // (depth * 4)))

    def step(i: jax.Array, product: jax.Array) -> jax.Array:
        own = lax.dynamic_slice(weight, (expert, i * piece, 0), (1, piece, depth))[0]
        part = lax.dot_general(rows, own, (((1,), (1,)), ((), ())), **_FULL_PRECISION)
        return lax.dynamic_update_slice(product, part, (0, i * piece))

    zeros = jnp.zeros((rows.shape[0], columns), jnp.float32)
    return step(jnp.int32(0), zeros) if piece == columns else lax.fori_loop(0, -(-columns // piece), step, zeros)
