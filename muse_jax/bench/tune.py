"""Tiles timed on this device: each candidate that compiles is run, and the fastest becomes an entry of a table.

The two GEMMs are timed apart over the same row blocks, and one configuration takes the best tile of each for one size
of blocks. An entry serves experts, H and F as given and mean rows an expert up to the next power of two.
"""

from __future__ import annotations

import concurrent.futures
import dataclasses
import datetime
import itertools
import math
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
from jax.typing import DTypeLike

from muse_jax.bench.work import Sizes, route_sets, train_us
from pallas_kernels import expert_gemm
from pallas_kernels.expert_gemm import Tile, choose_config
from pallas_kernels.expert_gemm.tiles import Entry, read_table, write_table
from pallas_kernels.route_map import route_map
from pallas_kernels.target import Target

_SETS = 4


def bucket_of_rows(rows_per_expert: float) -> float:
    """The mean rows an expert up to which an entry timed at `rows_per_expert` serves: the next power of two."""
    return 2.0 ** math.ceil(math.log2(rows_per_expert))


def candidates(target: Target, rows_per_expert: float, itemsize: int, *, halves: int) -> Iterator[tuple[int, Tile]]:
    """(block rows, tile) worth timing: tiles whose stages fit the local memory, for blocks that suit the mean.

    halves: 2 for gate_up, whose tile is twice as wide as its columns, 1 for down.
    """
    if rows_per_expert < 6:
        blocks: tuple[tuple[int, tuple[int, ...]], ...] = ((16, ()), (32, (16,)), (64, (16, 32)))
    elif rows_per_expert < 64:
        blocks = ((32, (16,)), (64, (16, 32)), (128, (16, 32, 64)))
    else:
        blocks = ((128, (16, 32, 64)), (192, (64, 128)), (192, (16, 64, 128)))
    groups = (1, 4) if rows_per_expert < 64 else (4, 8)
    widths, depths = (64, 128, 256), (64, 128, 256)
    for (block_rows, tails), width, depth, warps, stages, group in itertools.product(
        blocks, widths, depths, (4, 8), (2, 3, 4), groups
    ):
        depth = depth * 2 // itemsize
        local = (width + block_rows) * depth * itemsize * (stages if target.platform == "cuda" else stages - 1)
        accumulators = width * block_rows / (32 * warps)
        if local <= target.lds_bytes and 8 <= accumulators <= 192 and width // halves >= 16:
            tile = Tile(cols=width // halves, depth=depth, num_warps=warps, num_stages=stages, group=group, tails=tails)
            yield block_rows, tile


def tune(
    sizes: Sizes, tokens: int, dtype: DTypeLike, gate_up: jax.Array, down: jax.Array, target: Target, *, about: str
) -> tuple[Entry, float, float]:
    """(the best entry, its microseconds, those of what the tables hold now) for uniform routing of `tokens`."""
    ids = [jnp.asarray(one) for one in route_sets(sizes, tokens, "uniform", _SETS)]
    rows_per_expert = tokens * sizes.routes_per_token / sizes.experts
    key = jax.random.key(tokens)
    latents = jax.random.normal(key, (tokens, sizes.h), dtype)
    activations = jax.random.normal(key, (tokens * sizes.routes_per_token, sizes.f), dtype)
    now = choose_config(rows_per_expert, dtype, experts=sizes.experts, h=sizes.h, f=sizes.f)
    itemsize = jnp.dtype(dtype).itemsize
    maps: dict[int, list[Any]] = {}

    def routes(block_rows: int) -> list[Any]:
        if block_rows not in maps:
            make = jax.jit(lambda one: route_map(one, num_experts=sizes.experts, block_rows=block_rows))
            maps[block_rows] = [make(one) for one in ids]
        return maps[block_rows]

    def first(tile: Tile) -> Any:
        return jax.jit(
            lambda x, w, r: expert_gemm.gate_up(
                x, w, r, routes_per_token=sizes.routes_per_token, implementation="pallas", tile=tile
            )
        )

    def second(tile: Tile) -> Any:
        return jax.jit(lambda a, w, r: expert_gemm.down(a, w, r, implementation="pallas", tile=tile))

    def times(
        make: Any, current: Tile, tiles: set[tuple[int, Tile]], x: jax.Array, w: jax.Array
    ) -> dict[tuple[int, Tile], float]:
        """Microseconds of each tile that compiles and whose rows are those of the current one."""
        ordered = sorted(tiles, key=lambda one: one != (now.block_rows, current))
        wanted = None
        for block_rows in {block_rows for block_rows, _ in ordered}:
            routes(block_rows)
        with concurrent.futures.ThreadPoolExecutor() as pool:
            compiled = list(pool.map(lambda one: _compile(make(one[1]), x, w, routes(one[0])[0]), ordered))
        found = {}
        for (block_rows, tile), call in zip(ordered, compiled, strict=True):
            if call is not None:
                calls = [(x, w, one) for one in routes(block_rows)]
                if wanted is None:
                    wanted = call(*calls[0])
                if bool(jnp.allclose(call(*calls[0]), wanted, rtol=2**-6, atol=2**-8)):
                    found[block_rows, tile] = train_us(call, calls, 12 if tokens <= 64 else 4)
        return found

    gate_ups = {(now.block_rows, now.gate_up), *candidates(target, rows_per_expert, itemsize, halves=2)}
    downs = {(now.block_rows, now.down), *candidates(target, rows_per_expert, itemsize, halves=1)}
    first_times = times(first, now.gate_up, gate_ups, latents, gate_up)
    second_times = times(second, now.down, downs, activations, down)
    best = None
    for block_rows in {rows for rows, _ in first_times} & {rows for rows, _ in second_times}:
        one, two = (
            min(((us, tile) for (rows, tile), us in found.items() if rows == block_rows), key=lambda timed: timed[0])
            for found in (first_times, second_times)
        )
        if best is None or one[0] + two[0] < best[0]:
            best = one[0] + two[0], block_rows, one[1], two[1]
    assert best is not None
    us, block_rows, gate_up_tile, down_tile = best
    config = dataclasses.replace(
        now, block_rows=block_rows, gate_up=gate_up_tile, down=down_tile, timed=f"{about}: {us:.0f} us at T={tokens}"
    )
    entry = Entry(
        dtype=jnp.dtype(dtype).name,
        experts=sizes.experts,
        h=sizes.h,
        f=sizes.f,
        max_rows=bucket_of_rows(rows_per_expert),
        config=config,
    )
    before = first_times[now.block_rows, now.gate_up] + second_times[now.block_rows, now.down]
    return entry, us, before


def about_here() -> str:
    """What a timing was made with."""
    return f"{jax.devices()[0].device_kind}, jax {jax.__version__}, {datetime.date.today().isoformat()}"


def add_entries(file: Path, target: str, entries: Iterable[Entry]) -> None:
    """Add entries to a table, replacing those that serve the same problem; makes the file if it is not there."""
    found: dict[tuple[Any, ...], Entry] = {}
    if file.exists():
        found_for, table = read_table(file)
        if found_for != target:
            raise ValueError(f"{file} is a table for {found_for}; expected {target}, name another file")
        found = {_key(entry): entry for entry in table}
    found |= {_key(entry): entry for entry in entries}
    write_table(file, target, list(found.values()))


def _key(entry: Entry) -> tuple[Any, ...]:
    return entry.dtype, entry.experts, entry.h, entry.f, entry.max_rows


def _compile(function: Any, *arguments: Any) -> Any:
    """The compiled call, None where the tile does not fit this device."""
    try:
        return function.lower(*arguments).compile()
    except (jax.errors.JaxRuntimeError, NotImplementedError, ValueError):
        return None
