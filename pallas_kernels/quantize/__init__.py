"""Quantize: codes and scales of rows, as the quantized expert GEMMs read them.

    quantize_fp8_rows      q = fp8(clamp(x / s, -M, M)),  s = max(max|x| / M, 1 / (512 M))       x ~ q * s
    quantize_mxfp4_rows    q = e2m1(x / 2^e), two codes a byte, the even column in the low four bits,
                           scale byte = e + 127, one e a block of 32 columns                    x ~ q * 2^e

M is 448 for E4M3FN and 224 for E4M3FNUZ, whose codes are worth half: both give the same numbers. One s a row, or one a
group of columns. A row (FP8) or block (MXFP4) with NaN or infinity is NaN as a whole: its scale says so.
`quantize_fp8_input` and `mxfp4_planes` do it in one kernel for the input rows of a GEMM.
Source: spec f.1, f.2 and f.3; the rules for e are those of `pallas_kernels.formats.mx_exponent`.
"""

from __future__ import annotations

import jax
from jaxtyping import Array, Float

from pallas_kernels.dispatch import Implementation, resolve
from pallas_kernels.formats import MX_BLOCK, MX_RULES, Flavour, Rule
from pallas_kernels.quantize import pallas
from pallas_kernels.quantize.xla import (
    dequantize_fp8_rows,
    dequantize_mxfp4_rows,
    largest_magnitudes,
    pack_e2m1,
    quantize_fp8_rows,
    quantize_mxfp4_rows,
    unpack_e2m1,
)

__all__ = [
    "dequantize_fp8_rows",
    "dequantize_mxfp4_rows",
    "largest_magnitudes",
    "mxfp4_planes",
    "pack_e2m1",
    "quantize_fp8_input",
    "quantize_fp8_rows",
    "quantize_mxfp4_rows",
    "unpack_e2m1",
]


def quantize_fp8_input(
    x: Float[Array, "R n"],
    flavour: Flavour,
    *,
    group: int | None = None,
    as_numbers: bool = False,
    implementation: Implementation | None = None,
    interpret: bool | None = None,
) -> tuple[jax.Array, jax.Array]:
    """`quantize_fp8_rows` of a GEMM's input rows, which may be none.

    as_numbers: a kernel gives what the codes stand for in float16, exact, as NVIDIA's kernels multiply them.
    """
    if resolve(implementation) == "xla" or x.size == 0 or (group is not None and x.shape[1] % group):
        return quantize_fp8_rows(x, flavour, group=group)
    return pallas.quantize_fp8(x, flavour, group=group, as_numbers=as_numbers, interpret=interpret)


def mxfp4_planes(x: Float[Array, "R n"], rule: Rule, *, interpret: bool | None = None) -> Float[Array, "4 R n_fourth"]:
    """Rows quantized to MXFP4 and read back, exact in x's dtype: plane p has columns p, p + 4, p + 8, ...

    Raises ValueError for an unknown rule, or n that is no multiple of 32.
    """
    if rule not in MX_RULES:
        raise ValueError(f"rule is {rule!r}; expected one of {', '.join(MX_RULES)}")
    if x.shape[1] % MX_BLOCK:
        raise ValueError(f"x has {x.shape[1]} columns; MXFP4 needs a multiple of {MX_BLOCK}")
    return pallas.mxfp4_planes(x, rule, interpret=interpret)
