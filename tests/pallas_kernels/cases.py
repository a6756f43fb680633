"""Awkward routings and shapes shared by the kernel suites, and the error they are all judged by."""

from __future__ import annotations

import dataclasses

import numpy as np


@dataclasses.dataclass(frozen=True)
class Case:
    """Sizes of one problem; D, H and F are no multiples of a tile and all differ."""

    name: str
    tokens: int
    routes_per_token: int
    experts: int
    h: int
    f: int
    masked: float = 0.0
    pick: str = "random"

    def ids(self) -> np.ndarray:
        """[T, K] int32 distinct ids a token; masked routes are -1 or beyond the last expert."""
        rng = np.random.default_rng(len(self.name) + self.tokens)
        if self.pick == "hot":  # every token takes experts 0..K-1
            ids = np.tile(np.arange(self.routes_per_token), (self.tokens, 1))
        elif self.pick == "sparse":  # only even experts are used
            ids = np.stack(
                [2 * rng.permutation(self.experts // 2)[: self.routes_per_token] for _ in range(self.tokens)]
            )
        else:
            ids = np.stack([rng.permutation(self.experts)[: self.routes_per_token] for _ in range(self.tokens)])
        ids = ids.astype(np.int32).reshape(self.tokens, self.routes_per_token)
        if self.masked:
            gone = rng.random(ids.shape) < self.masked
            gone.flat[0] = True
            ids = np.where(gone, np.where(rng.random(ids.shape) < 0.5, -1, self.experts), ids).astype(np.int32)
        return ids


CASES = (
    Case("one_token", 1, 4, 8, 40, 72),
    Case("tile_less_one", 15, 1, 1, 24, 36),
    Case("tile_and_one", 17, 1, 1, 24, 36),
    Case("hot_experts", 37, 2, 16, 130, 50, pick="hot"),
    Case("empty_experts", 21, 3, 12, 56, 20, pick="sparse"),
    Case("masked", 33, 4, 16, 64, 96, masked=0.3),
    Case("all_masked", 5, 2, 4, 24, 40, masked=1.1),
    Case("one_token_masked", 1, 8, 8, 24, 40, masked=0.5),
)


def row_error(got: np.ndarray, want: np.ndarray) -> float:
    """The largest ||got - want|| / ||want|| over rows (last axis), in float64; a zero row must be matched exactly."""
    got, want = np.asarray(got, np.float64), np.asarray(want, np.float64)
    if not np.isfinite(got).all():
        return float("inf")
    if got.size == 0:
        return 0.0
    error, size = np.linalg.norm(got - want, axis=-1), np.linalg.norm(want, axis=-1)
    return float(np.max(np.where(size > 0, error / np.where(size > 0, size, 1), np.where(error > 0, np.inf, 0))))
