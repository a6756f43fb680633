"""Tile sizes of the expert GEMMs: data files, one a target, chosen by how many rows an expert has.

A block of `block_rows` rows of one expert meets `cols` columns of its weights in steps of `depth`. Few rows an expert
(decode) means the weights are streamed once; many rows (prefill) means that what a program loads is used by more rows.
    tuned/{gfx942,gfx950,sm_90}.json     {"target": ..., "entries": [{dtype, experts, h, f, max_rows, config}, ...]}
An entry serves blocks whose mean rows an expert, T*K/E, is at most `max_rows`. Entries that name `experts`, `h` and `f`
come before those that leave them null, which serve every shape: those are the heuristic, cut to the array's own size.
A file named by the environment variable MUSE_JAX_TILES, as `muse-jax bench --tune` writes it, comes before the
project's own.
"""

from __future__ import annotations

import dataclasses
import functools
import json
import math
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
from jax.typing import DTypeLike

from pallas_kernels.target import TARGETS, current_architecture

TABLES = Path(__file__).parent / "tuned"
TILES_VARIABLE = "MUSE_JAX_TILES"
UNTIMED = "untimed"


@dataclasses.dataclass(frozen=True, kw_only=True)
class Tile:
    """One kernel's tile: `cols` output columns, `depth` of the contraction a step, and how it is compiled.

    group: row blocks that walk the same columns before the next columns, so that they share weights in the cache.
    tails: row counts below the block's for which there is code of its own: a block runs with the first that holds its
      live rows. Ascending.
    weights_first: multiply weights by inputs, so that the sums are [columns, rows]. NVIDIA's matrix units take their
      first operand from registers, where MXFP4 weights are unpacked.
    """

    cols: int
    depth: int
    num_warps: int
    num_stages: int
    group: int = 1
    tails: tuple[int, ...] = ()
    weights_first: bool = False

    def __post_init__(self) -> None:
        object.__setattr__(self, "tails", tuple(self.tails))
        for name in ("cols", "depth"):
            value = getattr(self, name)
            if value < 16 or value & (value - 1):
                raise ValueError(f"{name} is {value}; expected a power of two of at least 16")
        if list(self.tails) != sorted(set(self.tails)):
            raise ValueError(f"tails is {self.tails}; expected ascending row counts")

    def sizes(self, block_rows: int) -> tuple[int, ...]:
        """The row counts that there is code for, the whole block's last."""
        return (*(tail for tail in self.tails if tail < block_rows), block_rows)


@dataclasses.dataclass(frozen=True, kw_only=True)
class GemmConfig:
    """What both kernels need to agree on, and where it comes from.

    block_rows: rows a block holds: a power of two, or a multiple of 64 that is multiplied as powers of two (192 is 128
      and 64). Products of fewer than 64 rows take other matrix instructions on NVIDIA, and a loop with both kinds gave
      wrong sums on an H200 (144 as 128 and 16).
    crowded, crowded_from: another configuration, in launches of its own, for experts with so many rows or more: when
      routes crowd on a few experts, blocks that suit the mean would read those experts' weights over and over.
    timed: the device, versions and date it was timed with, or UNTIMED for one that was only compiled.
    why: the reason for the choice, where it is not a timing.
    """

    block_rows: int
    gate_up: Tile
    down: Tile
    crowded: GemmConfig | None = None
    crowded_from: int | None = None
    timed: str = UNTIMED
    why: str = ""

    def __post_init__(self) -> None:
        for size in {self.block_rows, *self.gate_up.tails, *self.down.tails}:
            if size < 16 or (size & (size - 1) and size % 64):
                raise ValueError(f"a block of {size} rows; expected a power of two from 16 on, or a multiple of 64")
        if (self.crowded is None) != (self.crowded_from is None):
            raise ValueError("crowded and crowded_from go together; one of them is missing")

    def fit(self, *, h: int, f: int) -> GemmConfig:
        """The configuration for experts of these widths."""
        crowded = self.crowded and self.crowded.fit(h=h, f=f)
        return dataclasses.replace(self, gate_up=_fit(self.gate_up, f, h), down=_fit(self.down, h, f), crowded=crowded)

    def to_json(self) -> dict[str, Any]:
        """The configuration as a table holds it, without what is default."""
        found: dict[str, Any] = {"block_rows": self.block_rows}
        for kernel in ("gate_up", "down"):
            tile = dataclasses.asdict(getattr(self, kernel))
            found[kernel] = {name: value for name, value in tile.items() if value not in ((), False)}
        if self.crowded is not None:
            found |= {"crowded_from": self.crowded_from, "crowded": self.crowded.to_json()}
        return found | {name: value for name in ("timed", "why") if (value := getattr(self, name))}

    @classmethod
    def from_json(cls, item: Mapping[str, Any]) -> GemmConfig:
        """The configuration that `to_json` wrote. Raises KeyError, TypeError or ValueError for another."""
        item = dict(item)
        item |= {kernel: Tile(**item[kernel]) for kernel in ("gate_up", "down")}
        if "crowded" in item:
            item["crowded"] = cls.from_json(item["crowded"])
        return cls(**item)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Entry:
    """One row of a table; None for `experts`, `h`, `f` or `max_rows` means any."""

    dtype: str
    config: GemmConfig
    experts: int | None = None
    h: int | None = None
    f: int | None = None
    max_rows: float | None = None

    def rank(self, rows: float, experts: int, h: int, f: int) -> tuple[int, float] | None:
        """How well the entry serves a problem, smaller is better; None where it does not."""
        named = [(self.experts, experts), (self.h, h), (self.f, f)]
        limit = math.inf if self.max_rows is None else self.max_rows
        if rows > limit or any(own is not None and own != given for own, given in named):
            return None
        return sum(own is None for own, _ in named), limit

    def to_json(self) -> dict[str, Any]:
        """The entry as `read_entries` reads it."""
        named = {name: getattr(self, name) for name in ("dtype", "experts", "h", "f", "max_rows")}
        return named | {"config": self.config.to_json()}


def choose_config(
    rows_per_expert: float, dtype: DTypeLike | str, *, experts: int, h: int, f: int, target: str | None = None
) -> GemmConfig:
    """The configuration of both kernels for a mean of `rows_per_expert` rows (T*K/E), no wider than the arrays need.

    Args:
      rows_per_expert: over the experts that routes go to, held here or not.
      dtype: of the weights.
      experts: held here.
      h, f: latent width and expert width held here.
      target: a name in `pallas_kernels.target.TARGETS`; None takes this device's, or the nearest that has a table
        ("gfx942" where there is no GPU, so that what is interpreted on a CPU is what AMD runs).
    """
    name = dtype if isinstance(dtype, str) else jnp.dtype(dtype).name
    target = target or _target_here()
    ranked = []
    for order, entry in enumerate(entries(target)):
        rank = entry.rank(rows_per_expert, experts, h, f) if entry.dtype == name else None
        if rank is not None:
            ranked.append((rank, order, entry.config))
    if not ranked:
        raise ValueError(f"no tile of {target} serves {name} weights with {rows_per_expert} rows an expert")
    return min(ranked)[2].fit(h=h, f=f)


def entries(target: str) -> tuple[Entry, ...]:
    """Every entry for `target`, the user's own file first."""
    own = os.environ.get(TILES_VARIABLE)
    found_for, found = read_table(Path(own)) if own else (target, ())
    return (found if found_for == target else ()) + _project_table(target)


@functools.cache
def _project_table(target: str) -> tuple[Entry, ...]:
    return read_table(TABLES / f"{target}.json")[1]


def read_table(path: Path) -> tuple[str, tuple[Entry, ...]]:
    """(target, entries) of a file. Raises ValueError, naming it, for one that is not a table."""
    try:
        table = json.loads(path.read_text())
    except (OSError, json.JSONDecodeError) as error:
        raise ValueError(f"{path} is no table of tiles: {error}; `muse-jax bench --tune FILE` writes one") from None
    return table.get("target"), read_entries(table, str(path))


def read_entries(table: Mapping[str, Any], source: str) -> tuple[Entry, ...]:
    """The entries of a table. Raises ValueError, naming `source` and the entry, for one that is not well formed."""
    found = []
    for number, item in enumerate(table.get("entries", ())):
        try:
            found.append(Entry(**{**item, "config": GemmConfig.from_json(item["config"])}))
        except (KeyError, TypeError, ValueError) as error:
            raise ValueError(f"entry {number} of {source} is not a tile config: {error}") from None
    return tuple(found)


def write_table(path: Path, target: str, table: Sequence[Entry]) -> None:
    """Write entries to a file, whole or not at all."""
    lines = ",\n".join("    " + json.dumps(entry.to_json()) for entry in table)
    partial = path.with_name(path.name + ".partial")
    partial.write_text(f'{{\n  "target": "{target}",\n  "entries": [\n{lines}\n  ]\n}}\n')
    partial.replace(path)


def _fit(tile: Tile, columns: int, depth: int) -> Tile:
    """The tile cut to the array's own size, with half the depth where edges need masks, whose registers would spill."""
    cols = _power_of_two(columns, 16, tile.cols)
    steps = _power_of_two(depth, 16, tile.depth)
    ragged = columns % cols or depth % steps
    return dataclasses.replace(tile, cols=cols, depth=max(16, steps // 2) if ragged else steps)


def _power_of_two(at_least: float, lowest: int, highest: int) -> int:
    """The smallest power of two >= `at_least`, within [lowest, highest]."""
    value = lowest
    while value < at_least and value < highest:
        value *= 2
    return value


def _target_here() -> str:
    """The table for this device: its own, or that of the nearest target of its platform."""
    here = current_architecture()
    if here in TARGETS:
        return here
    nvidia = jax.default_backend() == "gpu" and "nvidia" in jax.devices()[0].device_kind.lower()
    return "sm_90" if nvidia else "gfx942"
