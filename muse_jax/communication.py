"""What a block on a mesh sends: every collective of one call, its shape and its bytes, from the sizes alone.

    all-reduce       of n bytes over r ranks    a rank sends 2 n (r - 1) / r        (a ring; a tree sends no less)
    reduce-scatter   of n bytes                               n (r - 1) / r
    all-gather       to n bytes                               n (r - 1) / r
A rank's T / dp tokens, in chunks (`muse_jax.schedule`):
    tp > 1, FP8 rows  their largest magnitudes [T, K] all-reduced, once
    tp > 1            rows [C, K, H] all-reduced, or reduce-scattered and combined [C, H] all-gathered
    ep > 1            combined [C, H] all-reduced; where rows were scattered only the rank's own [C / tp, H]
    dp does not divide T        out [T, D] all-gathered
"""

from __future__ import annotations

import math
from collections import Counter
from dataclasses import dataclass
from typing import Literal

import ml_dtypes
import numpy as np

from muse_jax.config import MuseConfig
from muse_jax.schedule import Schedule
from muse_jax.sharding import Axis

Operation = Literal["all-reduce", "reduce-scatter", "all-gather"]
_DTYPES = {"float32": np.dtype(np.float32), "bfloat16": np.dtype(ml_dtypes.bfloat16)}


@dataclass(frozen=True, kw_only=True)
class Collective:
    """One collective of each group of `ranks` devices along `axis`, done `times` times in a call.

    shape, dtype: of the whole array: what is reduced or scattered, or what gathering gives.
    """

    operation: Operation
    axis: Axis
    ranks: int
    shape: tuple[int, ...]
    dtype: str
    times: int = 1

    @property
    def nbytes(self) -> int:
        """Bytes of the whole array, once."""
        return math.prod(self.shape) * _DTYPES[self.dtype].itemsize

    @property
    def sent_bytes(self) -> float:
        """Bytes that one rank sends in a call, all times together."""
        passes = 2 if self.operation == "all-reduce" else 1
        return passes * self.times * self.nbytes * (self.ranks - 1) / self.ranks


def collectives(
    config: MuseConfig,
    tokens: int,
    *,
    dp: int = 1,
    ep: int = 1,
    tp: int = 1,
    dtype: Literal["float32", "bfloat16"] = "bfloat16",
    schedule: Schedule | None = None,
    fp8_row_scales: bool = False,
) -> list[Collective]:
    """Every collective of one call of `ShardedMoE` on x [tokens, D]; none for 0 tokens.

    Args:
      config: widths and routes of the block.
      dp, ep, tp: devices along each axis.
      dtype: of x and the parameters.
      schedule: reduce dtype and chunks; None for the defaults.
      fp8_row_scales: whether the experts are FP8 and each input row finds its own scale
        (`muse_jax.quantization.inputs.finds_row_scales`); no other format sends more than unquantized experts do.
    """
    if dtype not in _DTYPES:
        raise ValueError(f"dtype is {dtype!r}; expected {' or '.join(_DTYPES)}")
    for name, size in (("tokens", tokens + 1), ("dp", dp), ("ep", ep), ("tp", tp)):
        if size < 1:
            raise ValueError(f"{name} is {size - (name == 'tokens')}; expected a number of {name}")
    schedule = schedule or Schedule()
    K, H = config.routes_per_token, config.latent_width
    own_tokens = -(-tokens // dp)
    found: Counter[tuple[Operation, Axis, int, tuple[int, ...], str]] = Counter()
    if tokens and tp > 1 and fp8_row_scales:
        found["all-reduce", "tp", tp, (own_tokens, K), "float32"] += 1
    for chunk in schedule.chunks(own_tokens, K * H, tp) if tokens else ():
        padded = -(-chunk.tokens // tp) * tp if chunk.scatter else chunk.tokens
        if tp > 1:
            operation = "reduce-scatter" if chunk.scatter else "all-reduce"
            found[operation, "tp", tp, (padded, K, H), schedule.reduce_dtype] += 1
        if ep > 1:
            found["all-reduce", "ep", ep, (padded // tp if chunk.scatter else padded, H), schedule.reduce_dtype] += 1
        if chunk.scatter:
            found["all-gather", "tp", tp, (padded, H), dtype] += 1
    if tokens % dp:
        found["all-gather", "dp", dp, (own_tokens * dp, config.model_width), dtype] += 1
    return [
        Collective(operation=operation, axis=axis, ranks=ranks, shape=shape, dtype=kind, times=times)
        for (operation, axis, ranks, shape, kind), times in found.items()
    ]


def sent_bytes(found: list[Collective]) -> float:
    """Bytes that one rank sends in a call."""
    return sum(collective.sent_bytes for collective in found)
