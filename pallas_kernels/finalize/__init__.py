"""Finalize: normalise each route's row, then weight it, then sum over the routes of a token.

    z[t, k] = rows[t, k] * (weight + gain_center)                      float32
    n[t, k] = z[t, k] / sqrt(mean_h(z[t, k]^2) + eps)                  float32
    out[t]  = round(sum_k topk_weights[t, k] * n[t, k])                float32 sum, one rounding
The gain comes before the variance, so it changes the variance: this is not an ordinary RMSNorm with a gain. A masked
route (id < 0) is left out by selection, so a NaN in its row never reaches the sum. Source: spec b steps 9 and 10, b.3.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jax.typing import DTypeLike
from jaxtyping import Array, Float, Float32, Int32

from pallas_kernels.dispatch import Implementation, resolve
from pallas_kernels.finalize import pallas, xla


def finalize(
    rows: Float[Array, "T K H"],
    topk_weights: Float32[Array, "T K"],
    topk_ids: Int32[Array, "T K"],
    weight: Float[Array, "H"],
    *,
    eps: float,
    gain_center: float = 1.0,
    out_dtype: DTypeLike | None = None,
    implementation: Implementation | None = None,
    interpret: bool | None = None,
) -> Float[Array, "T H"]:
    """The weighted sum of the normalised rows of each token.

    Args:
      rows: one unweighted row per route, bfloat16 or float32 (float32 when partial sums were reduced).
      topk_weights: router weight of each route.
      topk_ids: ids of the routes; only their sign is read: negative leaves the route out.
      weight: gain of post_expert_norm, shared by all experts, without its centre.
      eps: added to the mean square (1e-8 for this model).
      gain_center: added to the gain in float32.
      out_dtype: dtype of the sum; None takes that of `rows`.
      interpret: run the Pallas kernel in interpret mode; None decides by the backend.
    """
    if rows.ndim != 3 or topk_weights.shape != rows.shape[:2] or topk_ids.shape != rows.shape[:2]:
        raise ValueError(
            f"rows is {rows.shape}, topk_weights {topk_weights.shape}, topk_ids {topk_ids.shape}; "
            "expected [T, K, H], [T, K], [T, K]"
        )
    if weight.shape != rows.shape[2:]:
        raise ValueError(f"weight is {weight.shape}; expected one gain a column, {rows.shape[2:]}")
    out_dtype = jnp.dtype(out_dtype or rows.dtype)
    if rows.shape[0] == 0:
        return jnp.zeros((0, rows.shape[2]), out_dtype)
    run = xla.finalize if resolve(implementation) == "xla" else pallas.finalize
    with jax.named_scope("combined"):
        return run(rows, topk_weights, topk_ids, weight, eps, gain_center, out_dtype, interpret)
