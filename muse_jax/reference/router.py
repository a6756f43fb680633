"""The router: K of E experts a token, chosen by biased scores and weighted by unbiased ones.

    router_logits = (x @ router_weight.T) * output_multiplier      [T, E]
    score         = sigmoid(router_logits) or softmax over E       [T, E]
    topk_ids      = the K largest of score + router_bias           [T, K], descending, ties to the lowest index
    p             = score[topk_ids]
    topk_weights  = p / (sum_k p + score_eps) * route_scale        [T, K]

Non-finite values: before scoring, and again before the choice, NaN counts as the lowest finite float32 and infinities
as the largest of their sign. So every token gets K distinct experts and finite weights, whatever its logits.
"""

from __future__ import annotations

import numpy as np

from muse_jax.reference.profiles import Profile
from muse_jax.reference.rounding import round_to, widen
from muse_jax.reference.settings import BlockSettings

_LARGEST = float(np.finfo(np.float32).max)


@np.errstate(all="ignore")
def router_logits(x: np.ndarray, router_weight: np.ndarray, output_multiplier: float, profile: Profile) -> np.ndarray:
    """router_logits = (x @ router_weight.T) * output_multiplier, [T, D] x [E, D] -> [T, E]; not sanitized."""
    multiplier = widen(round_to(output_multiplier, profile.arithmetic))
    if profile.fold_multiplier:
        router_weight = round_to(widen(router_weight) * multiplier, profile.arithmetic)
        multiplier = 1.0
    logits = round_to(widen(x) @ widen(router_weight).T, profile.arithmetic)
    return round_to(widen(logits) * multiplier, profile.arithmetic)


def topk_ids(logits: np.ndarray, router_bias: np.ndarray, settings: BlockSettings, profile: Profile) -> np.ndarray:
    """topk_ids = the K largest of score + router_bias, descending, ties to the lowest index, [T, E] -> [T, K] int32."""
    biased = round_to(widen(_scores(logits, settings, profile)) + widen(router_bias), profile.arithmetic)
    order = np.argsort(-_sanitize(biased), axis=-1, kind="stable")
    return order[:, : settings.routes_per_token].astype(np.int32)


def topk_weights(logits: np.ndarray, ids: np.ndarray, settings: BlockSettings, profile: Profile) -> np.ndarray:
    """topk_weights = p / (sum_k p + score_eps) * route_scale with p = score[topk_ids], [T, K]; 0 where the id is -1."""
    check_ids(ids, logits.shape[-1])
    p = np.take_along_axis(widen(_scores(logits, settings, profile)), np.maximum(ids, 0), axis=-1)
    p = np.where(ids < 0, 0.0, p)
    weights = p / (p.sum(axis=-1, keepdims=True) + settings.score_eps) * settings.route_scale
    return round_to(weights, profile.arithmetic)


def check_ids(ids: np.ndarray, num_experts: int) -> None:
    """ValueError unless every id is that of an expert, or -1."""
    strays = ids[(ids < -1) | (ids >= num_experts)]
    if strays.size:
        raise ValueError(f"topk_ids holds {strays[0]}; expected 0 to {num_experts - 1}, or -1 for a masked route")


@np.errstate(all="ignore")
def _scores(logits: np.ndarray, settings: BlockSettings, profile: Profile) -> np.ndarray:
    finite = _sanitize(logits)
    if settings.scoring == "sigmoid":
        scores = 1.0 / (1.0 + np.exp(-finite))
    else:
        powers = np.exp(finite - finite.max(axis=-1, keepdims=True))
        scores = powers / powers.sum(axis=-1, keepdims=True)
    return round_to(scores, profile.arithmetic)


def _sanitize(values: np.ndarray) -> np.ndarray:
    values = widen(values)
    return np.clip(np.where(np.isnan(values), -_LARGEST, values), -_LARGEST, _LARGEST)
