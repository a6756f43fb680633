"""What sharding the experts over ranks does to the roundings: tensor parallel rows, expert parallel sums.

    TP, n ranks    partial_r = stored(activation[F_r] @ down[:, F_r].T)       rows = sum_r partial_r     before the norm
    EP, n ranks    combined_r = stored(sum over the routes of rank r's experts)    combined = sum_r combined_r

F_r is rank r's 1/n of the expert width; experts are placed in order and the first E % n ranks hold one more. A sum over
ranks is float32, or is rounded to bfloat16 after each rank, ascending. The norm reads the sum of rows as it was
reduced; the sum of combined_r is rounded to the stored dtype.
"""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np
from numpy.typing import DTypeLike

from muse_jax.reference import block
from muse_jax.reference.profiles import Profile
from muse_jax.reference.quantized import Weight, columns, shape_of
from muse_jax.reference.rounding import BFLOAT16, round_to, widen


def tp_expert_rows(
    activation: np.ndarray,
    ids: np.ndarray,
    down: Weight,
    ranks: int,
    reduce_dtype: DTypeLike,
    profile: Profile,
    rule: str | None = None,
) -> np.ndarray:
    """expert_rows summed over `ranks` slices of the expert width, [T, K, F] -> [T, K, H] in reduce_dtype.

    Where down is quantized, every rank quantizes the columns of activation that it holds.
    Raises ValueError when the expert width is no multiple of ranks, or a slice would split a quantization block.
    """
    width = shape_of(down)[-1]
    if width % ranks:
        raise ValueError(f"tp is {ranks}; expected a divisor of the expert width, {width}")
    slices = [slice(r * width // ranks, (r + 1) * width // ranks) for r in range(ranks)]
    parts = [(activation[..., cut], columns(down, cut)) for cut in slices]
    partial = (block.expert_rows(rows, ids, weight, profile, rule) for rows, weight in parts)
    return _all_reduce(partial, reduce_dtype)


def ep_combined(
    normed_rows: np.ndarray,
    ids: np.ndarray,
    weights: np.ndarray,
    num_experts: int,
    ranks: int,
    reduce_dtype: DTypeLike,
    profile: Profile,
) -> np.ndarray:
    """combined summed over `ranks` that each hold some experts and mask the routes of the others, [T, K, H] -> [T, H].

    Raises ValueError as `expert_owners` does.
    """
    owner = expert_owners(num_experts, ranks)
    local = (np.where((ids >= 0) & (owner[ids] == rank), ids, -1) for rank in range(ranks))
    return round_to(
        _all_reduce((block.combined(normed_rows, mine, weights, profile) for mine in local), reduce_dtype),
        profile.stored,
    )


def expert_owners(num_experts: int, ranks: int) -> np.ndarray:
    """The rank of every expert, [E]: contiguous, the first E % ranks ranks hold one more.

    Raises ValueError when a rank would hold no expert.
    """
    if ranks > num_experts:
        raise ValueError(f"ep is {ranks}; expected at most the number of experts, {num_experts}")
    share, left = divmod(num_experts, ranks)
    return np.repeat(np.arange(ranks), [share + (rank < left) for rank in range(ranks)])


@np.errstate(all="ignore")
def _all_reduce(parts: Iterable[np.ndarray], reduce_dtype: DTypeLike) -> np.ndarray:
    total = 0.0
    for part in parts:
        total = total + widen(part)
        if np.dtype(reduce_dtype) == BFLOAT16:
            total = widen(round_to(total, BFLOAT16))
    return round_to(total, reduce_dtype)
