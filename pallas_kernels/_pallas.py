"""The one place that calls `pallas_call`: Triton's lowering for AMD and NVIDIA GPUs, or the interpreter on a CPU.

JAX deprecates this lowering and has no other Pallas path to AMD (its successor there is jax_triton), so its warning is
silenced here and nowhere else, and no Pallas type appears in this package's public signatures.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as plt

warnings.filterwarnings("ignore", "The Pallas Triton backend is deprecated", DeprecationWarning)


def pallas_call(
    kernel: Callable[..., None],
    *,
    grid: tuple[int, ...],
    out_shape: Any,
    num_warps: int,
    num_stages: int,
    interpret: bool,
    name: str,
) -> Callable[..., Any]:
    """`kernel` over `grid`, its refs whole arrays that it indexes itself."""
    return pl.pallas_call(
        kernel,
        grid=grid,
        out_shape=out_shape,
        interpret=interpret,
        name=name,
        compiler_params=plt.CompilerParams(num_warps=num_warps, num_stages=num_stages),
    )
