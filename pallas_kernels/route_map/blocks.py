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


class Counts(NamedTuple):
    """Which experts a map is of: those with `least` to `most` routes (None: no limit). Masked routes belong to the map
    with least = 0.
    """

    least: int = 0
    most: int | None = None


ANY_COUNT = Counts()


def max_blocks(num_routes: int, num_experts: int, block_rows: int, counts: Counts = ANY_COUNT) -> int:
    """The most blocks that any routing of `num_routes` routes can need."""
    groups = min(num_experts + 1, num_routes) if counts.least == 0 else min(num_experts, num_routes // counts.least)
    return max(1, (num_routes + groups * (block_rows - 1)) // block_rows) if num_routes else 0
