"""Quantize: codes and scales of rows, as the quantized expert GEMMs read them.

    quantize_fp8_rows      q = fp8(clamp(x / s, -M, M)),  s = max(max|x| / M, 1 / (512 M))       x ~ q * s
    quantize_mxfp4_rows    q = e2m1(x / 2^e), two codes a byte, the even column in the low four bits,
                           scale byte = e + 127, one e a block of 32 columns                    x ~ q * 2^e

M is 448 for E4M3FN and 224 for E4M3FNUZ, whose codes are worth half: both give the same numbers. One s a row, or one a
group of columns. A row (FP8) or block (MXFP4) with NaN or infinity is NaN as a whole: its scale says so.
Source: spec f.1, f.2 and f.3; the rules for e are those of `pallas_kernels.formats.mx_exponent`.
"""

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
    "pack_e2m1",
    "quantize_fp8_rows",
    "quantize_mxfp4_rows",
    "unpack_e2m1",
]
