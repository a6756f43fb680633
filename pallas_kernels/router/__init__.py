"""Routing: logits to the K experts of each token and their weights.

    s = sigmoid(l)  or  softmax(l)                      unbiased scores, float32
    topk_ids = the K largest of s + bias                ties go to the lowest index, descending
    topk_weights = s[ids] / (sum_k s[ids] + eps) * route_scale
The bias chooses and never weighs. Non-finite values have one rule: NaN counts as the lowest finite float32 and an
infinity as the largest finite float32 of its sign, in the logits and again in s + bias. So the ids of a token are
always K distinct experts, its weights are finite, and no token touches another. Source: spec b.1.
"""

from __future__ import annotations

from typing import Literal, get_args

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float32, Int32

from pallas_kernels.dispatch import Implementation, resolve
from pallas_kernels.router import pallas, xla

Scoring = Literal["sigmoid", "softmax"]


def check_scoring(scoring: str) -> None:
    """Raises ValueError unless `scoring` is a normalization this router knows."""
    if scoring not in get_args(Scoring):
        names = " or ".join(repr(name) for name in get_args(Scoring))
        raise ValueError(f"scoring is {scoring!r}; expected {names}")


def route(
    logits: Float32[Array, "T E"],
    bias: Float32[Array, "E"],
    *,
    routes_per_token: int,
    scoring: Scoring = "sigmoid",
    eps: float | None = 1e-15,
    route_scale: float = 1.0,
    implementation: Implementation | None = None,
    interpret: bool | None = None,
) -> tuple[Float32[Array, "T K"], Int32[Array, "T K"]]:
    """(topk_weights, topk_ids) of each token, experts in descending biased score.

    Args:
      logits: router logits after the output multiplier.
      bias: selection bias of each expert.
      routes_per_token: K, at most E.
      scoring: "sigmoid" or "softmax".
      eps: added to the sum of the chosen scores; None adds nothing.
      route_scale: multiplies every weight.
    """
    check_scoring(scoring)
    experts = logits.shape[1]
    if not 1 <= routes_per_token <= experts:
        raise ValueError(f"routes_per_token is {routes_per_token}; expected 1 to the number of experts, {experts}")
    if bias.shape != (experts,):
        raise ValueError(f"bias is {bias.shape}; expected one value an expert, ({experts},)")
    if logits.dtype != jnp.float32 or bias.dtype != jnp.float32:
        raise TypeError(f"logits is {logits.dtype} and bias is {bias.dtype}; expected float32 both")
    if logits.shape[0] == 0:
        return jnp.zeros((0, routes_per_token), jnp.float32), jnp.zeros((0, routes_per_token), jnp.int32)
    run = xla.route if resolve(implementation) == "xla" else pallas.route
    with jax.named_scope("topk_ids"):
        return run(logits, bias, routes_per_token, scoring, eps or 0.0, route_scale, interpret)
