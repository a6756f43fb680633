"""What a product with a quantized weight reads: rows as codes and scales, or as the numbers those stand for.

    fp8      each row by its own scale, or in groups of 128 columns where the weight has scales of blocks, or all rows
             by the weight's input_scale: codes and scales
    mxfp4    "even", "floor", "rceil": rows quantized to MXFP4 by that rule and read back, exact in bfloat16
             "w4a16": rows as they are
Source: spec f.1, f.2.
"""

from __future__ import annotations

from typing import Literal, get_args

import jax
import jax.numpy as jnp
from jax import lax
from jax.core import Tracer
from jax.typing import DTypeLike
from jaxtyping import Array, Float, Float32

from muse_jax.quantization.array import QuantizedArray
from pallas_kernels.dispatch import Implementation, resolve
from pallas_kernels.expert_gemm import Codes, Planes
from pallas_kernels.formats import (
    E4M3_DTYPE,
    E4M3_LIMIT,
    FLOAT_INFINITY,
    FP8_BLOCK,
    Flavour,
    encode_e4m3,
    magnitude_bits,
)
from pallas_kernels.quantize import (
    dequantize_mxfp4_rows,
    mxfp4_planes,
    quantize_fp8_input,
    quantize_fp8_rows,
    quantize_mxfp4_rows,
)
from pallas_kernels.target import on_nvidia

ActivationRule = Literal["even", "floor", "rceil", "w4a16"]


def check_rule(rule: str | None, weight: Array | QuantizedArray) -> None:
    """Raises ValueError for a rule that does not exist, or one for a weight that has no choice of rules."""
    if rule is None:
        return
    if rule not in get_args(ActivationRule):
        raise ValueError(f"activation_rule is {rule!r}; expected one of {', '.join(get_args(ActivationRule))}")
    if not isinstance(weight, QuantizedArray) or weight.format != "mxfp4":
        held = weight.format if isinstance(weight, QuantizedArray) else weight.dtype
        raise ValueError(f"activation_rule is {rule!r} and the experts are {held}; only MXFP4 experts have a rule")


def check_scales(
    name: str, weight: Array | QuantizedArray, dtype: DTypeLike, implementation: Implementation | None
) -> None:
    """Raises ValueError where the kernels of this device cannot hold a weight's numbers.

    That is MXFP4 with scales of 4 or more in bfloat16 on NVIDIA (`pallas_kernels.expert_gemm.words`). Traced scales
    pass.
    """
    if not isinstance(weight, QuantizedArray) or weight.format != "mxfp4" or isinstance(weight.scales, Tracer):
        return
    if not on_nvidia() or dtype != jnp.bfloat16 or resolve(implementation) != "pallas":
        return
    scales = weight.scales
    beyond = (scales >= 129) & (scales < 255) if scales.dtype == jnp.uint8 else scales >= 4
    if jnp.any(beyond):
        raise ValueError(
            f"{name} has MXFP4 block scales of 4 or more, which overflow in the bfloat16 kernels on NVIDIA; expected "
            'smaller ones (weights below 24), or implementation="xla" or dtype=float32'
        )


def finds_row_scales(weight: Array | QuantizedArray) -> bool:
    """Whether an input row of `weight` has one scale, found in all of its columns."""
    return (
        isinstance(weight, QuantizedArray)
        and weight.format == "fp8"
        and not weight.has_block_scales
        and weight.input_scale is None
    )


def quantized_input(
    rows: Float[Array, "rows n"],
    weight: QuantizedArray,
    rule: ActivationRule | None = None,
    *,
    largest: Float32[Array, "rows"] | None = None,
    implementation: Implementation | None = None,
) -> Codes | Planes | Float[Array, "rows n"]:
    """The input of a product with `weight`: `Codes` for FP8, numbers in the dtype of rows for MXFP4, as `Planes` where
    a kernel quantizes them.

    rule: for MXFP4; None is "even", which is AMD Quark's.
    largest: the largest magnitudes of whole rows, where `rows` and `weight` hold some of the columns; read where
      `finds_row_scales(weight)`.
    """
    check_rule(rule, weight)
    if weight.format == "mxfp4":
        if rule == "w4a16":
            return rows
        if resolve(implementation) == "pallas" and rows.size:
            return Planes(mxfp4_planes(rows, rule or "even"))
        return dequantize_mxfp4_rows(*quantize_mxfp4_rows(rows, rule or "even")).astype(rows.dtype)
    flavour: Flavour = "e4m3fn" if weight.values.dtype == jnp.float8_e4m3fn else "e4m3fnuz"
    if weight.input_scale is not None:
        return _by_one_scale(rows, weight.input_scale, flavour)
    if largest is not None and finds_row_scales(weight):
        values, scales = quantize_fp8_rows(rows, flavour, largest=largest)
    else:
        group = FP8_BLOCK if weight.has_block_scales else None
        values, scales = quantize_fp8_input(
            rows, flavour, group=group, as_numbers=on_nvidia(), implementation=implementation
        )
    return Codes(values=values, scales=scales)


def _by_one_scale(rows: jax.Array, scale: jax.Array, flavour: Flavour) -> Codes:
    """Rows times the reciprocal of one scale, as vLLM's static scheme has it; a row that is not finite is NaN."""
    limit = E4M3_LIMIT[flavour]
    numbers = rows.astype(jnp.float32)
    codes = encode_e4m3(jnp.clip(numbers * (1.0 / scale), -limit, limit), flavour)
    is_finite = jnp.max(magnitude_bits(numbers), axis=-1) < FLOAT_INFINITY
    values = lax.bitcast_convert_type(codes.astype(jnp.uint8), E4M3_DTYPE[flavour])
    return Codes(values=values, scales=jnp.where(is_finite, scale, jnp.nan))
