"""Number formats by bits, in jnp: the same code runs in XLA paths and inside kernels.

A float32 value is rounded to bfloat16 (nearest, ties to even) with integer arithmetic,
    u = bits(x);  u + 0x7FFF + ((u >> 16) & 1), low 16 bits cleared,
because XLA may drop a float32 -> bfloat16 -> float32 pair of casts (`xla_allow_excess_precision`), and a dropped
rounding changes results. The derivative of a rounding is taken as 1: gradients pass through unrounded.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jax import lax
from jax.typing import DTypeLike
from jaxtyping import Array, Float32


@jax.custom_jvp
def round_bf16(x: Float32[Array, "*shape"]) -> Float32[Array, "*shape"]:
    """x rounded to the nearest bfloat16 (ties to even), kept as float32; NaN stays NaN, overflow goes to infinity."""
    bits = lax.bitcast_convert_type(x, jnp.uint32)
    odd = (bits >> jnp.uint32(16)) & jnp.uint32(1)
    rounded = (bits + jnp.uint32(0x7FFF) + odd) & jnp.uint32(0xFFFF0000)
    return jnp.where(jnp.isnan(x), x, lax.bitcast_convert_type(rounded, jnp.float32))


@round_bf16.defjvp
def _round_bf16_jvp(primals: tuple[jax.Array], tangents: tuple[jax.Array]) -> tuple[jax.Array, jax.Array]:
    return round_bf16(*primals), tangents[0]


def round_to(x: Float32[Array, "*shape"], dtype: DTypeLike) -> Float32[Array, "*shape"]:
    """x rounded to `dtype` (bfloat16 or float32), kept as float32 for the arithmetic that follows."""
    if dtype == jnp.float32:
        return x
    if dtype == jnp.bfloat16:
        return round_bf16(x)
    raise TypeError(f"dtype is {jnp.dtype(dtype).name}; expected bfloat16 or float32")


def swiglu(gate: Float32[Array, "*shape"], up: Float32[Array, "*shape"], dtype: DTypeLike) -> jax.Array:
    """round(round(silu(round(gate))) * round(up)) in `dtype`: the roundings of Muse Spark's SwiGLU between its GEMMs.

    gate and up are the float32 accumulators of the first GEMM; silu(g) = g / (1 + exp(-g)) in float32.
    Source: spec b, steps 5 and 6 (one rounding after the GEMM, one after silu, one after the product).
    """
    gate, up = round_to(gate, dtype), round_to(up, dtype)
    silu = round_to(gate / (1.0 + jnp.exp(-gate)), dtype)
    return round_to(silu * up, dtype).astype(dtype)


def swiglu_gradient(
    gate: Float32[Array, "*shape"], up: Float32[Array, "*shape"], gradient: Float32[Array, "*shape"], dtype: DTypeLike
) -> tuple[jax.Array, jax.Array]:
    """Gradients of `gate` and `up` in float32, from that of `swiglu(gate, up, dtype)`.

    With s = 1 / (1 + exp(-gate)): d_gate = gradient * up * s * (1 + gate * (1 - s)),  d_up = gradient * gate * s.
    """
    gate, up = round_to(gate, dtype), round_to(up, dtype)
    s = 1.0 / (1.0 + jnp.exp(-gate))
    return gradient * up * s * (1.0 + gate * (1.0 - s)), gradient * gate * s
