"""The RMSNorm family of Muse Spark: one formula, with the gain after or before the variance.

    after:   y = x / sqrt(mean_v(x^2) + eps) * (w + c)                  MuseSpark1xRMSNorm
    before:  z = x * (w + c);  y = z / sqrt(mean(z^2) + eps)            MuseSpark1xRMSNormWithInputScale
mean_v runs over the first `variance_width` columns. Everything is float32 and rounded once, to `out_dtype`. The two
are not equal: a gain that differs between columns changes the variance. Source: spec c.
"""

from __future__ import annotations

import math
from typing import Literal, get_args

import jax.numpy as jnp
from jax import lax
from jax.typing import DTypeLike
from jaxtyping import Array, Float

from pallas_kernels.formats import round_to

GainCenter = Literal[
    "one",
    "zero",
    "inverse_residual_index",
    "inverse_residual_index_v2",
    "inverse_residual_index_p1",
    "inverse_sqrt_residual_index",
    "inverse_sqrt_layers",
]


def rms_norm(
    x: Float[Array, "*rows H"],
    weight: Float[Array, "H"] | None = None,
    *,
    eps: float,
    gain_center: float = 1.0,
    gain_first: bool = False,
    variance_width: int | None = None,
    out_dtype: DTypeLike | None = None,
) -> Float[Array, "*rows H"]:
    """x normalised along its last axis.

    Args:
      x: bfloat16 or float32.
      weight: gain without its centre; None normalises only.
      eps: added to the mean square.
      gain_center: added to the gain in float32; 0.0 for a gain that is stored whole.
      gain_first: apply the gain before the variance; the variance then always covers all columns.
      variance_width: columns that count for the variance; None counts all.
      out_dtype: dtype of the result; None takes x's.
    """
    return _normalise(x.astype(jnp.float32), x, weight, eps, gain_center, gain_first, variance_width, out_dtype)


def rms_norm_residual(
    x: Float[Array, "*rows H"],
    residual: Float[Array, "*rows H"],
    weight: Float[Array, "H"] | None = None,
    *,
    eps: float,
    gain_center: float = 1.0,
    gain_first: bool = False,
    variance_width: int | None = None,
    out_dtype: DTypeLike | None = None,
) -> tuple[Float[Array, "*rows H"], Float[Array, "*rows H"]]:
    """(norm of x + residual, x + residual in x's dtype); the norm reads the float32 sum before it is rounded."""
    total = x.astype(jnp.float32) + residual.astype(jnp.float32)
    out = _normalise(total, x, weight, eps, gain_center, gain_first, variance_width, out_dtype)
    return out, round_to(total, x.dtype).astype(x.dtype)


def gain_center(kind: GainCenter, *, residual_id: int, num_layers: int | None = None) -> float:
    """The centre of a gain by its rule: 1, 0, or a function of the norm's place among the residual branches.

    Raises ValueError for an unknown rule, for "inverse_sqrt_layers" without `num_layers`, and where the rule divides
    by zero.
    """
    if kind not in get_args(GainCenter):
        raise ValueError(f"gain centre is {kind!r}; expected one of {', '.join(get_args(GainCenter))}")
    if kind == "one":
        return 1.0
    if kind == "zero":
        return 0.0
    if kind == "inverse_sqrt_layers":
        if num_layers is None:
            raise ValueError("gain centre 'inverse_sqrt_layers' needs num_layers; pass the number of decoder layers")
        return 1.0 / math.sqrt(num_layers)
    pair = kind in ("inverse_residual_index", "inverse_sqrt_residual_index")
    divisor = 2 * math.ceil(residual_id / 2) if pair else residual_id + 1
    if divisor <= 0:
        raise ValueError(
            f"gain centre {kind!r} divides by {divisor} at residual_id {residual_id}; residual ids count from 1"
        )
    return 1.0 / (math.sqrt(divisor) if kind == "inverse_sqrt_residual_index" else divisor)


def _normalise(x32, x, weight, eps, gain_center, gain_first, variance_width, out_dtype):
    width = x.shape[-1]
    if weight is not None and weight.shape != (width,):
        raise ValueError(f"weight is {weight.shape} and x has {width} columns; expected one gain a column, ({width},)")
    if variance_width is not None and not 1 <= variance_width <= width:
        raise ValueError(f"variance_width is {variance_width}; expected 1 to the width of x, {width}")
    gain = None if weight is None else weight.astype(jnp.float32) + jnp.float32(gain_center)
    if gain is not None:
        gain = gain.reshape((1,) * (x.ndim - 1) + (width,))
    if gain_first and gain is not None:
        x32 = x32 * gain
    counted = x32 if variance_width is None or gain_first else x32[..., :variance_width]
    y = x32 * lax.rsqrt(_mean_square(counted) + eps)
    if not gain_first and gain is not None:
        y = y * gain
    out_dtype = jnp.dtype(out_dtype or x.dtype)
    return round_to(y, out_dtype).astype(out_dtype)


def _mean_square(x):
    """Mean of x^2 along the last axis, kept as an axis of one.

    Eighths of the row are added to one another first: a CPU sums in sequence, and after an outlier each further square
    would lose half a unit of the outlier's.
    """
    width = x.shape[-1]
    squares = jnp.pad(x * x, [(0, 0)] * (x.ndim - 1) + [(0, -width % 8)])
    for _ in range(3):
        first, second = jnp.split(squares, 2, axis=-1)
        squares = first + second
    return jnp.sum(squares, axis=-1, keepdims=True) / width
