"""The one place that calls `pallas_call`: Triton's lowering for AMD and NVIDIA GPUs, or the interpreter on a CPU.

JAX deprecates this lowering and has no other Pallas path to AMD (its successor there is jax_triton), so its warning is
silenced here and nowhere else, and no Pallas type appears in this package's public signatures.

Inside `jax.shard_map` an output varies over every mesh axis that an input varies over. The interpreter cannot evaluate
a kernel's loops on values that vary, so there they are hidden from it: a kernel knows nothing of the mesh.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Mapping
from typing import Any

import jax
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as plt
from jax.extend.core import Primitive
from jax.interpreters import mlir
from jax.sharding import ManualAxisType

from pallas_kernels.varying import vary_over, varying_axes

warnings.filterwarnings("ignore", "The Pallas Triton backend is deprecated", DeprecationWarning)

_hide_varying = Primitive("hide_varying")
_hide_varying.def_abstract_eval(lambda value: value.update(manual_axis_type=ManualAxisType()))
mlir.register_lowering(_hide_varying, lambda _, value: [value])


def pallas_call(
    kernel: Callable[..., None],
    *,
    grid: tuple[int, ...],
    out_shape: Any,
    num_warps: int,
    num_stages: int,
    interpret: bool,
    name: str,
    aliases: Mapping[int, int] | None = None,
) -> Callable[..., Any]:
    """`kernel` over `grid`, its refs whole arrays that it indexes itself.

    aliases: argument -> the output that is written into its memory.

    The result has no derivative: differentiating it raises NotImplementedError.
    """

    def run(*args: jax.Array) -> Any:
        axes = varying_axes(*args)
        if interpret and axes:
            args = tuple(_hide_varying.bind(arg) if varying_axes(arg) else arg for arg in args)
        manual = ManualAxisType(varying=varying_axes(*args))
        out = pl.pallas_call(
            kernel,
            grid=grid,
            out_shape=jax.tree.map(
                lambda s: jax.ShapeDtypeStruct(s.shape, s.dtype, manual_axis_type=manual), out_shape
            ),
            interpret=interpret,
            name=name,
            input_output_aliases=dict(aliases or {}),
            compiler_params=plt.CompilerParams(num_warps=num_warps, num_stages=num_stages),
        )(*args)
        return jax.tree.map(lambda value: vary_over(value, axes), out)

    def refuse(primals: Any, tangents: Any) -> Any:
        raise NotImplementedError(
            f"the Pallas kernel {name} has no derivative; use implementation='xla' to differentiate"
        )

    call = jax.custom_jvp(run)
    call.defjvp(refuse)
    return call
