"""Routes grouped by expert and cut into row blocks: the map both expert GEMMs walk.

Route r = t * K + k is the k-th choice of token t. Routes of one group (one expert; the last group collects masked
routes, whose id is outside 0..E-1) are kept in ascending order and cut into blocks of M rows:
    rows[b, m]   the route in row m of block b, or R where the row is empty
    group[b]     the expert of block b, another number for masked routes, UNUSED for a block that is not used
The number of blocks is static: at most min(E + 1, R) groups are not empty and each wastes at most M - 1 rows. A map may
be of experts with few routes only, or of those with many, so that each kind is multiplied in blocks that suit it.
"""

from __future__ import annotations

import jax
from jaxtyping import Array, Int32

from pallas_kernels.dispatch import Implementation, resolve
from pallas_kernels.route_map import pallas, xla
from pallas_kernels.route_map.blocks import ANY_COUNT, UNUSED, Counts, RouteMap, max_blocks

__all__ = ["UNUSED", "Counts", "RouteMap", "max_blocks", "route_map"]


def route_map(
    topk_ids: Int32[Array, "T K"],
    *,
    num_experts: int,
    block_rows: int,
    counts: Counts = ANY_COUNT,
    implementation: Implementation | None = None,
    interpret: bool | None = None,
) -> RouteMap:
    """The map of `topk_ids` for blocks of `block_rows` rows.

    Args:
      topk_ids: expert of each route; an id outside 0..num_experts-1 masks its route.
      num_experts: experts held here (E).
      block_rows: rows a block holds (M).
      counts: leaves out the routes of experts that have fewer or more routes.
      implementation: "pallas", "xla" or None for the best here.
      interpret: run the Pallas kernels in interpret mode; None decides by the backend.
    """
    blocks = max_blocks(topk_ids.size, num_experts, block_rows, counts)
    ids = topk_ids.reshape(-1)
    with jax.named_scope("route_map"):
        if topk_ids.size == 0 or (topk_ids.shape[0] == 1 and counts == ANY_COUNT):
            return RouteMap(*xla.one_route_a_block(ids, block_rows))
        if resolve(implementation) == "pallas":
            return RouteMap(*pallas.route_map(ids, num_experts, block_rows, blocks, counts, interpret))
        return RouteMap(*xla.route_map(ids, num_experts, block_rows, blocks, counts))
