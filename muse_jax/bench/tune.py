"""Tiles timed on this device: each candidate that compiles is run, and the fastest becomes an entry of a table.

The two GEMMs are timed apart over the same row blocks, and one configuration takes the best tile of each for one size
of blocks. An entry serves experts, H and F as given and mean rows an expert up to the next power of two.
"""

from __future__ import annotations

import concurrent.futures
import dataclasses
import datetime
import functools
import itertools
import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp

from muse_jax.bench.work import Sizes, route_sets, train_us
from muse_jax.quantization.array import QuantizedArray
from muse_jax.quantization.inputs import quantized_input
from pallas_kernels import expert_gemm
from pallas_kernels.expert_gemm import Planes, Tile, choose_config
from pallas_kernels.expert_gemm.tiles import Entry, read_table, write_table
from pallas_kernels.route_map import RouteMap, route_map
from pallas_kernels.target import Target

_SETS = 4


def bucket_of_rows(rows_per_expert: float) -> float:
    """The mean rows an expert up to which an entry timed at `rows_per_expert` serves: the next power of two."""
    return 2.0 ** math.ceil(math.log2(rows_per_expert))


def candidates(target: Target, rows_per_expert: float, kind: str, *, halves: int) -> Iterator[tuple[int, Tile]]:
    """(block rows, tile) worth timing: tiles whose stages fit the local memory, for blocks that suit the mean.

    kind: the weights' name in the tables.
    halves: 2 for gate_up, whose tile is twice as wide as its columns, 1 for down.
    """
    if rows_per_expert < 6:
        blocks: tuple[tuple[int, tuple[int, ...]], ...] = ((16, ()), (32, (16,)), (64, (16, 32)))
    elif rows_per_expert < 64:
        blocks = ((32, (16,)), (64, (16, 32)), (128, (16, 32, 64)))
    else:
        blocks = ((128, (16, 32, 64)), (192, (64, 128)), (192, (16, 64, 128)))
    groups = (1, 4) if rows_per_expert < 64 else (4, 8)
    # What is unpacked in registers goes to wgmma as the left operand only.
    orders = (False, True) if kind == "mxfp4" or (kind == "fp8" and target.platform == "cuda") else (False,)
    weight_bytes, input_bytes = _BYTES[kind], _BYTES["bfloat16"] if kind == "mxfp4" else _BYTES[kind]
    for (block_rows, tails), width, depth, warps, stages, group, first in itertools.product(
        blocks, (64, 128, 256), (64, 128, 256), (4, 8), (2, 3, 4), groups, orders
    ):
        depth = int(depth * 2 // input_bytes)
        step = (width * weight_bytes + block_rows * input_bytes) * depth
        local = step * (stages if target.platform == "cuda" else stages - 1)
        accumulators = width * block_rows / (32 * warps)
        if local <= target.lds_bytes and 8 <= accumulators <= 192 and width // halves >= 16:
            yield (
                block_rows,
                Tile(
                    cols=width // halves,
                    depth=depth,
                    num_warps=warps,
                    num_stages=stages,
                    group=group,
                    tails=tails,
                    weights_first=first,
                ),
            )


_BYTES = {"bfloat16": 2, "float32": 4, "fp8": 1, "mxfp4": 17 / 32}  # of a weight, scales included


@dataclasses.dataclass(frozen=True, kw_only=True)
class Problem:
    """One GEMM as it is timed: `call(tile)` makes a function of (input, weight, routes)."""

    call: Callable[[Tile], Callable[..., jax.Array]]
    x: Any
    weight: Any
    repeats: int

    def times(
        self, tiles: Iterable[tuple[int, Tile]], routes: Callable[[int], Sequence[RouteMap]]
    ) -> dict[tuple[int, Tile], float]:
        """Microseconds of each (block rows, tile) that compiles and whose rows are those of the first."""
        ordered = list(dict.fromkeys(tiles))
        for block_rows in {block_rows for block_rows, _ in ordered}:
            routes(block_rows)
        with concurrent.futures.ThreadPoolExecutor() as pool:
            compiled = list(pool.map(lambda one: self._compile(one[1], routes(one[0])[0]), ordered))
        found: dict[tuple[int, Tile], float] = {}
        wanted = None
        for one, call in zip(ordered, compiled, strict=True):
            if call is None:
                continue
            calls = [(self.x, self.weight, each) for each in routes(one[0])]
            rows = call(*calls[0])
            wanted = rows if wanted is None else wanted
            if bool(jnp.allclose(rows, wanted, rtol=2**-6, atol=2**-8 * jnp.max(jnp.abs(wanted)))):
                found[one] = train_us(call, calls, self.repeats)
        return found

    def _compile(self, tile: Tile, routes: RouteMap) -> Any:
        """The compiled call, None where the tile does not fit this device."""
        try:
            return jax.jit(self.call(tile)).lower(self.x, self.weight, routes).compile()
        except (jax.errors.JaxRuntimeError, NotImplementedError, ValueError):
            return None


def tune(
    sizes: Sizes, tokens: int, gate_up: jax.Array | QuantizedArray, down: jax.Array | QuantizedArray, target: Target
) -> tuple[Entry, float, float]:
    """(the best entry, its microseconds, those of what the tables hold now) for uniform routing of `tokens`.

    The time is that of both GEMMs: MXFP4 inputs are not quantized here, FP8 ones before.
    """
    kind = gate_up.format if isinstance(gate_up, QuantizedArray) else gate_up.dtype.name
    rows_per_expert = tokens * sizes.routes_per_token / sizes.experts
    now = choose_config(rows_per_expert, kind, experts=sizes.experts, h=sizes.h, f=sizes.f)
    first, second = _problems(sizes, tokens, gate_up, down)
    ids = [jnp.asarray(one) for one in route_sets(sizes, tokens, "uniform", _SETS)]

    @functools.cache
    def routes(block_rows: int) -> list[RouteMap]:
        make = jax.jit(lambda one: route_map(one, num_experts=sizes.experts, block_rows=block_rows))
        return [make(one) for one in ids]

    tiles = lambda halves: candidates(target, rows_per_expert, kind, halves=halves)
    first_times = first.times([(now.block_rows, now.gate_up), *tiles(2)], routes)
    second_times = second.times([(now.block_rows, now.down), *tiles(1)], routes)
    us, block_rows, gate_up_tile, down_tile = min(_pairs(first_times, second_times), key=lambda pair: pair[0])
    timed = f"{about_here()}: {us:.0f} us at T={tokens}"
    config = dataclasses.replace(now, block_rows=block_rows, gate_up=gate_up_tile, down=down_tile, timed=timed)
    entry = Entry(
        dtype=kind,
        experts=sizes.experts,
        h=sizes.h,
        f=sizes.f,
        max_rows=bucket_of_rows(rows_per_expert),
        config=config,
    )
    before = first_times[now.block_rows, now.gate_up] + second_times[now.block_rows, now.down]
    return entry, us, before


def _problems(sizes: Sizes, tokens: int, gate_up: Any, down: Any) -> tuple[Problem, Problem]:
    key = jax.random.key(tokens)
    dtype = jnp.bfloat16 if isinstance(gate_up, QuantizedArray) else gate_up.dtype
    latents = jax.random.normal(key, (tokens, sizes.h), dtype)
    activations = jax.random.normal(key, (tokens * sizes.routes_per_token, sizes.f), dtype)
    common: dict[str, Any] = {"out_dtype": dtype, "implementation": "pallas"}
    repeats = 12 if tokens <= 64 else 4
    return (
        Problem(
            call=lambda tile: functools.partial(
                expert_gemm.gate_up, routes_per_token=sizes.routes_per_token, tile=tile, **common
            ),
            x=_input(latents, gate_up),
            weight=_codes(gate_up),
            repeats=repeats,
        ),
        Problem(
            call=lambda tile: functools.partial(expert_gemm.down, tile=tile, **common),
            x=_input(activations, down),
            weight=_codes(down),
            repeats=repeats,
        ),
    )


def _input(rows: jax.Array, weight: Any) -> Any:
    if not isinstance(weight, QuantizedArray):
        return rows
    if weight.format == "mxfp4":
        return jax.jit(Planes.of)(rows)
    return jax.jit(quantized_input)(rows, weight)


def _codes(weight: Any) -> Any:
    return weight.codes if isinstance(weight, QuantizedArray) else weight


def _pairs(
    first: dict[tuple[int, Tile], float], second: dict[tuple[int, Tile], float]
) -> Iterator[tuple[float, int, Tile, Tile]]:
    """(microseconds of both, block rows, the best tile of each) for every size of blocks that both were timed with."""
    for block_rows in sorted({rows for rows, _ in first} & {rows for rows, _ in second}):
        best = [
            min(((us, tile) for (rows, tile), us in found.items() if rows == block_rows), key=lambda timed: timed[0])
            for found in (first, second)
        ]
        yield best[0][0] + best[1][0], block_rows, best[0][1], best[1][1]


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
