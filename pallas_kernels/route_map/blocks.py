"""What a route map is: arrays of row blocks, and how many blocks a routing can need."""

from __future__ import annotations

from typing import NamedTuple

from jaxtyping import Array, Int32

UNUSED = -(2**31)  # the group of a block that is not used; no route may have this id


class RouteMap(NamedTuple):
    """Row blocks of routes; see `pallas_kernels.route_map`."""

    rows: Int32[Array, "B M"]
    group: Int32[Array, "B"]

    @property
    def block_rows(self) -> int:
        return self.rows.shape[1]


def max_blocks(num_routes: int, num_experts: int, block_rows: int) -> int:
    """The most blocks that any routing of `num_routes` routes can need."""
    return (num_routes + min(num_experts + 1, num_routes) * (block_rows - 1)) // block_rows
