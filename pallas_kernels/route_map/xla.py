"""The route map in plain XLA ops: a stable sort by expert, then arithmetic on the counts."""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jaxtyping import Array, Int32

from pallas_kernels.route_map.blocks import UNUSED, Counts


def route_map(
    ids: Int32[Array, "R"], num_experts: int, block_rows: int, blocks: int, limits: Counts
) -> tuple[jax.Array, jax.Array]:
    """(rows [B, M], group [B]) of flat route ids; see `pallas_kernels.route_map`."""
    routes = ids.shape[0]
    group_of = jnp.where((ids < 0) | (ids >= num_experts), num_experts, ids)
    order = jnp.argsort(group_of, stable=True).astype(jnp.int32)
    counts = jnp.bincount(group_of, length=num_experts + 1).astype(jnp.int32)
    first_route = jnp.cumsum(counts) - counts
    wanted = (counts >= limits.least) & (counts <= (routes if limits.most is None else limits.most))
    wanted = wanted.at[num_experts].set(limits.least == 0)
    group_blocks = jnp.where(wanted, (counts + block_rows - 1) // block_rows, 0)
    last_block = jnp.cumsum(group_blocks)

    block = jnp.arange(blocks, dtype=jnp.int32)
    used = block < last_block[-1]
    group = jnp.minimum(jnp.searchsorted(last_block, block, side="right"), num_experts).astype(jnp.int32)
    row_in_group = (block - (last_block - group_blocks)[group]) * block_rows
    row = row_in_group[:, None] + jnp.arange(block_rows, dtype=jnp.int32)[None, :]
    filled = used[:, None] & (row < counts[group][:, None])
    rows = jnp.where(filled, order[jnp.clip(first_route[group][:, None] + row, 0, routes - 1)], routes)
    return rows, jnp.where(used, group, UNUSED)


def one_route_a_block(ids: Int32[Array, "R"], block_rows: int) -> tuple[jax.Array, jax.Array]:
    """The map that puts route r alone in block r: all that one token needs, and a constant beside the ids."""
    routes = ids.shape[0]
    first = jnp.arange(block_rows, dtype=jnp.int32)[None, :] == 0
    return jnp.where(first, jnp.arange(routes, dtype=jnp.int32)[:, None], routes), ids
