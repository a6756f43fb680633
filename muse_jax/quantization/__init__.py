"""Quantized weights on devices: codes and scales as one pytree, and what makes them from unquantized weights.

QuantizedArray            values, scales, format; its docstring is its decoding equation
quantize_fp8              float8 codes, one scale a row
quantize_mxfp4            E2M1 codes, one exponent a block of 32 columns
quantize_experts_mxfp4    the same of [E, out, in], a few experts at a time
"""

from muse_jax.quantization.array import QuantizedArray
from muse_jax.quantization.fp8 import quantize_fp8
from muse_jax.quantization.mxfp4 import quantize_experts_mxfp4, quantize_mxfp4

__all__ = ["QuantizedArray", "quantize_experts_mxfp4", "quantize_fp8", "quantize_mxfp4"]
