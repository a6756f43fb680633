"""Tile sizes of the expert GEMMs, chosen by how many rows an expert has.

A block of M rows of one expert meets `cols` columns of its weights in steps of `depth`. Few rows an expert (decode)
means the weights are streamed once and M is the smallest the matrix units take; many rows (prefill) means larger tiles.
"""

from __future__ import annotations

import dataclasses
import math

import jax
import jax.numpy as jnp
from jax.typing import DTypeLike

from pallas_kernels.dispatch import Implementation


@dataclasses.dataclass(frozen=True, kw_only=True)
class Tile:
    """One kernel's tile: `cols` output columns, `depth` of the contraction a step, and how it is compiled.

    group: row blocks that walk the same columns before the next columns, so that they share weights in the cache.
    tail: a block with no more live rows than this is multiplied as one of so many rows; 0 for never.
    """

    cols: int
    depth: int
    num_warps: int
    num_stages: int
    group: int = 1
    tail: int = 0

    def __post_init__(self) -> None:
        for name in ("cols", "depth", "tail"):
            value = getattr(self, name)
            if (value < 16 or value & (value - 1)) and not (name == "tail" and value == 0):
                raise ValueError(f"{name} is {value}; expected a power of two of at least 16")


# Block rows -> (gate_up tile, down tile). NVIDIA's were timed on an H200; AMD's are chosen by what they compile to
# (no spills, LDS of gfx942 with its 64 KiB) and have not been timed.
NVIDIA_TILES = {
    16: (
        Tile(cols=64, depth=128, num_warps=4, num_stages=4),
        Tile(cols=128, depth=128, num_warps=4, num_stages=4),
    ),
    32: (
        Tile(cols=64, depth=128, num_warps=8, num_stages=3, tail=16),
        Tile(cols=128, depth=128, num_warps=8, num_stages=3, tail=16),
    ),
    64: (
        Tile(cols=128, depth=64, num_warps=4, num_stages=3, group=4, tail=16),
        Tile(cols=256, depth=64, num_warps=8, num_stages=3, group=4, tail=16),
    ),
    128: (
        Tile(cols=128, depth=64, num_warps=8, num_stages=4, group=4, tail=16),
        Tile(cols=256, depth=64, num_warps=8, num_stages=4, group=4, tail=16),
    ),
}
AMD_TILES = {
    16: (
        Tile(cols=32, depth=128, num_warps=4, num_stages=2),
        Tile(cols=64, depth=128, num_warps=4, num_stages=2),
    ),
    32: (
        Tile(cols=32, depth=128, num_warps=4, num_stages=2, tail=16),
        Tile(cols=64, depth=128, num_warps=4, num_stages=2, tail=16),
    ),
    64: (
        Tile(cols=64, depth=64, num_warps=4, num_stages=2, group=4, tail=16),
        Tile(cols=128, depth=64, num_warps=4, num_stages=2, group=4, tail=16),
    ),
    128: (
        Tile(cols=64, depth=64, num_warps=8, num_stages=2, group=4, tail=16),
        Tile(cols=256, depth=64, num_warps=8, num_stages=2, group=4, tail=16),
    ),
}
_LARGEST = 128


def choose_block_rows(num_routes: int, num_experts: int, implementation: Implementation) -> int:
    """Rows a block holds, so that most experts need one block.

    Pallas: a power of two above the mean rows an expert, no fewer than the 16 of a matrix unit. XLA: the mean and two
    standard deviations of evenly random routing, or one row where experts have less than one on average.
    """
    mean = num_routes / max(num_experts, 1)
    if implementation == "pallas":
        return _power_of_two(1.5 * mean, 16, _LARGEST)
    return 1 if mean < 1 else math.ceil(mean + 2 * math.sqrt(mean))


def choose_tiles(
    block_rows: int, dtype: DTypeLike, *, f: int, h: int, platform: str | None = None
) -> tuple[Tile, Tile]:
    """(gate_up tile, down tile) for blocks of `block_rows` rows, no wider than the arrays need.

    platform: "cuda" or "rocm"; None takes that of this backend ("rocm" where there is no GPU, so that what is
    interpreted on a CPU is what AMD runs).
    """
    table = NVIDIA_TILES if (platform or _platform()) == "cuda" else AMD_TILES
    if block_rows not in table:
        raise ValueError(f"blocks have {block_rows} rows; expected one of {sorted(table)}")
    gate_up, down = table[block_rows]
    wide = jnp.dtype(dtype).itemsize == 4
    return _fit(gate_up, f, h, wide), _fit(down, h, f, wide)


def _fit(tile: Tile, columns: int, depth: int, wide: bool) -> Tile:
    """The tile cut to the array's own size: smaller for 4-byte elements, and with half the depth where edges need
    masks, whose registers would spill.
    """
    cols = _power_of_two(columns, 16, min(tile.cols, 128) if wide else tile.cols)
    steps = _power_of_two(depth, 16, tile.depth // 2 if wide else tile.depth)
    ragged = columns % cols or depth % steps
    return dataclasses.replace(tile, cols=cols, depth=max(16, steps // 2) if ragged else steps)


def _power_of_two(at_least: float, lowest: int, highest: int) -> int:
    """The smallest power of two >= `at_least`, within [lowest, highest]."""
    value = lowest
    while value < at_least and value < highest:
        value *= 2
    return value


def _platform() -> str:
    """ "cuda" on an NVIDIA GPU, else "rocm"."""
    if jax.default_backend() != "gpu":
        return "rocm"
    return "cuda" if "nvidia" in jax.devices()[0].device_kind.lower() else "rocm"
