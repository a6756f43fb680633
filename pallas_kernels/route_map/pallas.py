"""The route map in two kernels and no sort: count each group's routes, then place them.

Program g of `_count` counts the routes of group g. Program g of `_place` sums the blocks of the groups before it, walks
the ids once more and stores its routes by rank, where rank = cumsum(id == g) - 1: ascending, so runs repeat bit for
bit. Reads are R ids a program from the cache; writes are the map itself.
"""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as plt
from jaxtyping import Array, Int32

from pallas_kernels._pallas import pallas_call
from pallas_kernels.dispatch import interpreted
from pallas_kernels.route_map.blocks import UNUSED, Counts

_CHUNK = 1024  # ids a program looks at in one step
_MARKED = 16  # blocks whose group is stored in one step


def _in_group(ids_ref, group, chunk, *, routes: int, experts: int, size: int):
    """(route numbers, membership) of one chunk of ids; the last group is every id outside 0..experts-1."""
    route = chunk * size + jnp.arange(size, dtype=jnp.int32)
    ids = plt.load(ids_ref.at[route], mask=route < routes, other=-1)
    ids = jnp.where((ids < 0) | (ids >= experts), experts, ids)
    return route, (ids == group) & (route < routes)


def _count(ids_ref, counts_ref, *, routes: int, experts: int, size: int):
    group = pl.program_id(0)

    def step(chunk, total):
        _, member = _in_group(ids_ref, group, chunk, routes=routes, experts=experts, size=size)
        return total + jnp.sum(member.astype(jnp.int32))

    plt.store(counts_ref.at[group], lax.fori_loop(0, pl.cdiv(routes, size), step, jnp.int32(0)))


def _place(
    ids_ref,  # [R]
    counts_ref,  # [E + 1]
    rows_ref,  # [B * M]
    group_ref,  # [B]
    *,
    routes: int,
    experts: int,
    size: int,
    block_rows: int,
    limits: Counts,
):
    group = pl.program_id(0)
    blocks = group_ref.shape[0]
    index = jnp.arange(pl.next_power_of_2(experts + 1), dtype=jnp.int32)
    counts = plt.load(counts_ref.at[index], mask=index <= experts, other=0)
    wanted = (counts >= limits.least) & (counts <= (routes if limits.most is None else limits.most))
    wanted = jnp.where(index == experts, limits.least == 0, wanted)
    group_blocks = jnp.where(wanted, (counts + (block_rows - 1)) // block_rows, 0)
    first = jnp.sum(jnp.where(index < group, group_blocks, 0))
    mine = jnp.sum(jnp.where(index == group, group_blocks, 0))

    def step(chunk, done):
        route, member = _in_group(ids_ref, group, chunk, routes=routes, experts=experts, size=size)
        member = member & (mine > 0)
        one = member.astype(jnp.int32)
        rank = done + jnp.cumsum(one) - 1
        plt.store(rows_ref.at[jnp.where(member, first * block_rows + rank, blocks * block_rows)], route, mask=member)
        return done + jnp.sum(one)

    placed = lax.fori_loop(0, pl.cdiv(routes, size), step, jnp.int32(0))
    width = pl.next_power_of_2(block_rows)
    empty = placed + jnp.arange(width, dtype=jnp.int32)
    inside = empty < mine * block_rows
    where = jnp.where(inside, first * block_rows + empty, blocks * block_rows)
    plt.store(rows_ref.at[where], jnp.full((width,), routes, jnp.int32), mask=inside)

    # The last group also marks the blocks that no group uses.
    end = jnp.where(group == experts, blocks, first + mine)

    def mark(step, carry):
        block = first + step * _MARKED + jnp.arange(_MARKED, dtype=jnp.int32)
        value = jnp.where(block < first + mine, group, UNUSED)
        plt.store(group_ref.at[jnp.where(block < end, block, blocks)], value, mask=block < end)
        return carry

    lax.fori_loop(0, pl.cdiv(end - first, _MARKED), mark, jnp.int32(0))


def route_map(
    ids: Int32[Array, "R"],
    num_experts: int,
    block_rows: int,
    blocks: int,
    limits: Counts,
    interpret: bool | None = None,
) -> tuple[jax.Array, jax.Array]:
    """(rows [B, M], group [B]) of flat route ids; see `pallas_kernels.route_map`. Rows of unused blocks are
    undefined.
    """
    interpret = interpreted() if interpret is None else interpret
    routes = ids.shape[0]
    size = min(_CHUNK, pl.next_power_of_2(routes))
    common = {"routes": routes, "experts": num_experts, "size": size}
    counts = pallas_call(
        functools.partial(_count, **common),
        grid=(num_experts + 1,),
        out_shape=jax.ShapeDtypeStruct((num_experts + 1,), jnp.int32),
        num_warps=4,
        num_stages=1,
        interpret=interpret,
        name="muse_route_count",
    )(ids)
    rows, group = pallas_call(
        functools.partial(_place, **common, block_rows=block_rows, limits=limits),
        grid=(num_experts + 1,),
        out_shape=(
            jax.ShapeDtypeStruct((blocks * block_rows,), jnp.int32),
            jax.ShapeDtypeStruct((blocks,), jnp.int32),
        ),
        num_warps=4,
        num_stages=1,
        interpret=interpret,
        name="muse_route_place",
    )(ids, counts)
    return rows.reshape(blocks, block_rows), group
