"""The collectives of a program, read from its text: compiled HLO, or the StableHLO that JAX hands to the compiler.

Found is (operation, ranks or 0, shape of the whole array, dtype) -> how often it happens in a call.
"""

from __future__ import annotations

import math
import re
from collections import Counter

Found = Counter[tuple[str, int, tuple[int, ...], str]]

_DTYPES = {"f32": "float32", "bf16": "bfloat16", "s32": "int32"}
_COMPUTATION = re.compile(r"^(ENTRY )?%?([\w.\-]+) .*\{$")
_COLLECTIVE = re.compile(
    r" = (\(?[^=]*?\)?) (all-reduce|reduce-scatter|all-gather|all-to-all|collective-permute)(-start)?\("
)
_ARRAY = re.compile(r"([a-z0-9]+)\[([\d,]*)\]")
_CALLED = re.compile(r"(body|to_apply|calls|condition)=%?([\w.\-]+)")
_TRIPS = re.compile(r'"known_trip_count":\{"n":"(\d+)"')
_STABLEHLO = re.compile(
    r'"?stablehlo\.(all_reduce|reduce_scatter|all_gather|all_to_all|collective_permute)"?\(.*?'
    r": \(tensor<([^>]*)>\) -> tensor<([^>]*)>",
    re.S,
)


def collectives(text: str) -> Found:
    """The collectives of a compiled program, those of a loop as often as it runs."""
    bodies: dict[str, list[str]] = {}
    entry = name = ""
    for line in text.splitlines():
        header = _COMPUTATION.match(line)
        if header:
            name = header[2]
            entry = name if header[1] else entry
        bodies.setdefault(name, []).append(line)
    found: Found = Counter()

    def visit(computation: str, times: int) -> None:
        for line in bodies[computation]:
            collective = _COLLECTIVE.search(line)
            if collective:
                ranks = _ranks(line)
                for dtype, sizes in _ARRAY.findall(collective[1]):
                    shape = tuple(int(size) for size in sizes.split(",") if size)
                    if collective[2] == "reduce-scatter":
                        shape = (shape[0] * ranks, *shape[1:])
                    found[collective[2], ranks, shape, _DTYPES[dtype]] += times
                continue
            trips = _TRIPS.search(line)
            for role, called in _CALLED.findall(line):
                visit(called, times * (int(trips[1]) if trips and role == "body" else 1))

    visit(entry, 1)
    return found


def asked_collectives(text: str) -> Found:
    """The collectives of StableHLO, each loop once and ranks 0; dtypes are those that a CPU compiler may widen."""
    found: Found = Counter()
    for operation, operand, result in _STABLEHLO.findall(text):
        *sizes, dtype = (result if operation == "all_gather" else operand).split("x")
        found[operation.replace("_", "-"), 0, tuple(map(int, sizes)), _DTYPES[dtype]] += 1
    return found


def _ranks(line: str) -> int:
    """Devices of one group: of named axes of a mesh, of an iota, or of a list."""
    named = re.search(r"replica_groups=mesh\[([^\]]*)\] \{([^}]*)\}", line)
    if named:
        sizes = dict(re.findall(r"'([^']+)'=(\d+)", named[1]))
        return math.prod(int(sizes[axis]) for axis in re.findall(r"'([^']+)'", named[2]))
    iota = re.search(r"replica_groups=\[\d+,(\d+)\]<=", line)
    if iota:
        return int(iota[1])
    listed = re.search(r"replica_groups=\{\{([\d,]+)\}", line)
    return len(listed[1].split(",")) if listed else 0
