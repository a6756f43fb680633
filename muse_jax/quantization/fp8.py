"""FP8 weights: one scale a row, so that the row's largest magnitude becomes the largest code.

    scale[o] = max_i |w[o, i]| / M, or 2^-23 for a row of zeros        M = 448 (e4m3fn) or 224 (e4m3fnuz)
    values[o, i] = e4m3(w[o, i] / scale[o])                            ties to even

M is 224, not 240, so that both flavours have the same codes and stand for the same numbers. Source: spec d.4, f.3. AMD
Quark divides bfloat16 weights in bfloat16 by the rounded scale, which changes about 2 % of awkward codes; this divides
in float32, which is nearer to the weights.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jax.typing import ArrayLike
from jaxtyping import Float

from muse_jax.quantization.array import QuantizedArray
from pallas_kernels.formats import (
    E4M3_DTYPE,
    E4M3_LIMIT,
    FLOAT_INFINITY,
    Flavour,
    bits_float,
    divide,
    encode_e4m3,
    magnitude_bits,
)

ZERO_ROW_SCALE = 2.0**-23


def quantize_fp8(weight: Float[ArrayLike, "*rows n"], flavour: Flavour = "e4m3fn") -> QuantizedArray:
    """The weight [..., out, in] of any float dtype with one scale a row; a row with NaN or infinity is NaN.

    Raises ValueError for an unknown flavour.
    """
    if flavour not in E4M3_LIMIT:
        raise ValueError(f"flavour is {flavour!r}; expected one of {', '.join(E4M3_LIMIT)}")
    values, scales = _quantize(jnp.asarray(weight), flavour)
    return QuantizedArray(values=values, scales=scales, format="fp8").check()


@jax.jit
def to_fnuz(array: QuantizedArray) -> QuantizedArray:
    """As `muse_jax.checkpoint.to_fnuz`, of a weight on devices: each converts its own codes and scales."""
    if array.values.dtype != E4M3_DTYPE["e4m3fn"]:
        return array
    codes = jax.lax.bitcast_convert_type(array.values, jnp.uint8)
    magnitudes = codes & 0x7F
    codes = jnp.where(magnitudes == 0, jnp.uint8(0), jnp.where(magnitudes == 0x7F, jnp.uint8(0x80), codes))
    return QuantizedArray(
        values=jax.lax.bitcast_convert_type(codes, E4M3_DTYPE["e4m3fnuz"]),
        scales=2 * array.scales,
        format=array.format,
        input_scale=None if array.input_scale is None else 2 * array.input_scale,
    )


@jax.jit(static_argnums=1)
def _quantize(weight: jax.Array, flavour: Flavour) -> tuple[jax.Array, jax.Array]:
    limit, rows = E4M3_LIMIT[flavour], weight.astype(jnp.float32)
    bits = jnp.max(magnitude_bits(rows), axis=-1, initial=0)
    largest = jnp.where(bits < FLOAT_INFINITY, bits_float(bits), jnp.nan)
    scales = divide(largest, jnp.full_like(largest, limit))
    scales = jnp.where(bits < FLOAT_INFINITY, jnp.where(scales == 0, ZERO_ROW_SCALE, scales), jnp.nan)
    codes = encode_e4m3(jnp.clip(divide(rows, scales[..., None]), -limit, limit), flavour)
    return jax.lax.bitcast_convert_type(codes.astype(jnp.uint8), E4M3_DTYPE[flavour]), scales
