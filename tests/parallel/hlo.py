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
_INSTRUCTION = re.compile(r"^ +(?:ROOT )?%([\w.\-]+) = ")
_NAME = re.compile(r"%([\w.\-]+)")
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
    bodies, entry = computations(text)
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


def computations(text: str) -> tuple[dict[str, list[str]], str]:
    """(the lines of every computation of a compiled program, the name of the one that is entered)."""
    bodies: dict[str, list[str]] = {}
    entry = name = ""
    for line in text.splitlines():
        header = _COMPUTATION.match(line)
        if header:
            name = header[2]
            entry = name if header[1] else entry
        bodies.setdefault(name, []).append(line)
    return bodies, entry


class Computation:
    """One computation: which instructions do what, in themselves or in what they call, and what they wait for."""

    def __init__(self, text: str, name: str):
        self.bodies, _ = computations(text)
        self.lines = {found[1]: line for line in self.bodies[name] if (found := _INSTRUCTION.match(line))}
        self.uses = {own: set(_NAME.findall(line)) & self.lines.keys() - {own} for own, line in self.lines.items()}

    def doing(self, pattern: re.Pattern[str]) -> set[str]:
        """The instructions that match, or call one that does."""
        return {name for name, line in self.lines.items() if self._does(line, pattern)}

    def needed_by(self, names: set[str]) -> set[str]:
        """Everything that must be there before these instructions can start."""
        found: set[str] = set()
        left = list(names)
        while left:
            new = self.uses[left.pop()] - found
            found |= new
            left += new
        return found

    def _does(self, line: str, pattern: re.Pattern[str]) -> bool:
        called = (self.bodies[name] for _, name in _CALLED.findall(line) if name in self.bodies)
        return bool(pattern.search(line)) or any(self._does(inner, pattern) for lines in called for inner in lines)


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
