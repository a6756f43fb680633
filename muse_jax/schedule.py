"""How the tokens of a device are cut into chunks, and what carries the sum of a chunk's rows over tp.

    C = max(1, chunk_elements // (K * H)) tokens a chunk, the last one what is left
    a chunk of fewer than scatter_min_tokens:  all-reduce of rows [C, K, H], every rank finalizes all of them
    any other:   reduce-scatter of rows over tokens, each rank finalizes its C / tp tokens, all-gather of [C, H]
Only tp > 1 has chunks: elsewhere rows never travel. Source: spec e.2, e.3.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, get_args

ReduceDtype = Literal["float32", "bfloat16"]


@dataclass(frozen=True, kw_only=True)
class Chunk:
    """Tokens of one step; `scatter`: whether the sum of its rows is scattered over tp or given to every rank."""

    tokens: int
    scatter: bool


@dataclass(frozen=True, kw_only=True)
class Schedule:
    """The choices of a block on a mesh that change its memory, its traffic and the order of its sums.

    reduce_dtype: what sums over tp and ep are computed in; partial rows and partial outputs are rounded to the block's
      own dtype before. "bfloat16" halves the traffic and rounds every sum.
    chunk_elements: K * H elements a token; bounds the rows that are held in `reduce_dtype` at a time.
    scatter_min_tokens: tokens of a chunk from which its rows are scattered.
    """

    reduce_dtype: ReduceDtype = "float32"
    chunk_elements: int = 2**25
    scatter_min_tokens: int = 256

    def __post_init__(self) -> None:
        if self.reduce_dtype not in get_args(ReduceDtype):
            names = " or ".join(map(repr, get_args(ReduceDtype)))
            raise ValueError(f"reduce_dtype is {self.reduce_dtype!r}; expected {names}")
        for name in ("chunk_elements", "scatter_min_tokens"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} is {getattr(self, name)}; expected a number above 0")

    def chunks(self, tokens: int, elements_per_token: int, tp: int) -> list[Chunk]:
        """The chunks of a device's tokens, at least one, all but the last of the same size."""
        size = tokens if tp == 1 else max(1, self.chunk_elements // elements_per_token)
        sizes = [min(size, tokens - start) for start in range(0, tokens, size or 1)] or [0]
        return [Chunk(tokens=count, scatter=tp > 1 and count >= self.scatter_min_tokens) for count in sizes]
