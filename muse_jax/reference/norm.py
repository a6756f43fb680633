"""The RMSNorm family of Muse Spark: one formula, with the gain after or before the variance.

    gain after    y = x / sqrt(mean_v(x^2) + eps) * (w + c)
    gain first    z = x * (w + c);   y = z / sqrt(mean(z^2) + eps)

x [..., H], gain w [H] with centre c, mean_v over the first `variance_width` columns. The two differ by more than a
factor: a gain that is not the same in every column changes the variance.
"""

from __future__ import annotations

import math

import numpy as np
from numpy.typing import DTypeLike

from muse_jax.reference.rounding import FLOAT32, round_to, widen

GAIN_CENTERS = (
    "one",
    "zero",
    "inverse_residual_index",
    "inverse_residual_index_v2",
    "inverse_residual_index_p1",
    "inverse_sqrt_residual_index",
    "inverse_sqrt_layers",
)


@np.errstate(all="ignore")
def rms_norm(
    x: np.ndarray,
    weight: np.ndarray | None = None,
    *,
    eps: float,
    gain_center: float = 1.0,
    gain_first: bool = False,
    variance_width: int | None = None,
    out_dtype: DTypeLike | None = None,
    arithmetic: DTypeLike = FLOAT32,
    gain_dtype: DTypeLike | None = None,
    product_dtype: DTypeLike | None = None,
) -> np.ndarray:
    """x [..., H] normalised along its last axis, in out_dtype.

    Args:
      x: any float dtype.
      weight: gain without its centre, [H]; None leaves the gain out.
      eps: added to the mean square.
      gain_center: added to the gain, after rounding to `arithmetic`; 0.0 for a gain that is stored whole.
      gain_first: apply the gain before the variance; `variance_width` then counts for nothing.
      variance_width: columns that enter the variance; None takes all.
      out_dtype: dtype of the result; None takes x's.
      arithmetic: float32 or float64, whose range the sum of squares has: past it the mean is infinite, so finite
        columns become 0 and infinite ones NaN.
      gain_dtype: what w + c is rounded to; None takes `arithmetic`.
      product_dtype: what x * (w + c) is rounded to before the variance, with gain_first; None takes `arithmetic`.

    Raises ValueError when weight does not have x's width or variance_width is beyond it.
    """
    width = x.shape[-1]
    if weight is not None and weight.shape != (width,):
        raise ValueError(f"weight is {weight.shape} and x has {width} columns; expected one gain a column, ({width},)")
    if variance_width is not None and not 1 <= variance_width <= width:
        raise ValueError(f"variance_width is {variance_width}; expected 1 to the width of x, {width}")
    values, gain = widen(x), None
    if weight is not None:
        centre = round_to(gain_center, arithmetic)
        gain = widen(round_to(widen(weight) + widen(centre), gain_dtype or arithmetic))
    if gain_first:
        variance_width = None
        if gain is not None:
            values, gain = widen(round_to(values * gain, product_dtype or arithmetic)), None
    counted = values[..., :variance_width]
    square_sum = widen(round_to(np.sum(counted**2, axis=-1, keepdims=True), arithmetic))
    y = values * (1.0 / np.sqrt(square_sum / counted.shape[-1] + eps))
    if gain is not None:
        y = y * gain
    return round_to(y, x.dtype if out_dtype is None else out_dtype)


@np.errstate(all="ignore")
def rms_norm_residual(
    x: np.ndarray,
    residual: np.ndarray,
    weight: np.ndarray | None = None,
    *,
    out_dtype: DTypeLike | None = None,
    arithmetic: DTypeLike = FLOAT32,
    **options,
) -> tuple[np.ndarray, np.ndarray]:
    """(rms_norm of x + residual, x + residual in x's dtype); the norm reads the sum in `arithmetic`.

    Args as for `rms_norm`. Raises ValueError as it does, and when residual does not have x's shape.
    """
    if residual.shape != x.shape:
        raise ValueError(f"residual is {residual.shape}; expected the shape of x, {x.shape}")
    total = round_to(widen(x) + widen(residual), arithmetic)
    out_dtype = x.dtype if out_dtype is None else out_dtype
    return rms_norm(total, weight, out_dtype=out_dtype, arithmetic=arithmetic, **options), round_to(total, x.dtype)


def gain_center(kind: str, *, residual_id: int, num_layers: int | None = None) -> float:
    """The centre of a gain by its rule: 1, 0, or a function of the norm's place among the residual branches.

    Args:
      kind: one of GAIN_CENTERS.
      residual_id: place of the branch, counted from 1.
      num_layers: decoder layers; "inverse_sqrt_layers" needs it.

    Raises ValueError for an unknown rule, for a missing num_layers, and where the rule would divide by zero.
    """
    if kind not in GAIN_CENTERS:
        raise ValueError(f"gain centre is {kind!r}; expected one of {', '.join(GAIN_CENTERS)}")
    if kind in ("one", "zero"):
        return float(kind == "one")
    if kind == "inverse_sqrt_layers":
        if num_layers is None or num_layers < 1:
            raise ValueError(f"num_layers is {num_layers}; gain centre {kind!r} needs the number of decoder layers")
        return 1.0 / math.sqrt(num_layers)
    in_pairs = kind in ("inverse_residual_index", "inverse_sqrt_residual_index")
    divisor = 2 * math.ceil(residual_id / 2) if in_pairs else residual_id + 1
    if divisor < 1:
        raise ValueError(f"residual_id is {residual_id}; gain centre {kind!r} counts residual branches from 1")
    return 1.0 / (math.sqrt(divisor) if kind == "inverse_sqrt_residual_index" else divisor)
