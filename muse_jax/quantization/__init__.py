"""Quantized weights on devices: codes and scales as one pytree, and what makes them from unquantized weights.

QuantizedArray                values, scales, format; its docstring is its decoding equation
quantize_fp8                  float8 codes, one scale a row
quantize_mxfp4                E2M1 codes, one exponent a block of 32 columns
quantize_experts_mxfp4        the same of [E, out, in], a few experts at a time
online_layers                 which layers of a bfloat16 checkpoint that is done to
write_quantized_checkpoint    a small checkpoint of random weights as AMD Quark lays it out
"""

from muse_jax.quantization.array import QuantizedArray
from muse_jax.quantization.fp8 import quantize_fp8
from muse_jax.quantization.mxfp4 import online_layers, quantize_experts_mxfp4, quantize_mxfp4
from muse_jax.quantization.synthetic import write_quantized_checkpoint

__all__ = [
    "QuantizedArray",
    "online_layers",
    "quantize_experts_mxfp4",
    "quantize_fp8",
    "quantize_mxfp4",
    "write_quantized_checkpoint",
]
