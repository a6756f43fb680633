"""Muse Spark's expert block in float64, one function a boundary, rounded where a profile says.

    router_logits  = (x @ router_weight.T) * output_multiplier           [T, E]
    topk_ids       = top K of score + router_bias                        [T, K]
    topk_weights   = p / (sum_k p + score_eps) * route_scale             [T, K]   p = score[topk_ids]
    latent         = x @ pre_expert_proj.T                               [T, H]
    expert_input   = rms_norm(latent) * (1 + pre_expert_norm)            [T, H]
    activation     = silu(expert_input @ gate_e.T) * (expert_input @ up_e.T)      [T, K, F]   e = topk_ids
    expert_rows    = activation @ down_e.T                               [T, K, H]
    normed_rows    = rms_norm(expert_rows * (1 + post_expert_norm))      [T, K, H]   gain before the variance
    combined       = sum_k topk_weights * normed_rows                    [T, H]   norm before weight
    out            = combined @ post_expert_proj.T                       [T, D]

A route whose id is -1 is masked: its rows are exactly zero and nothing reads what was handed in for them, NaN included.

Where gate_up and down are quantized, both products of the experts read quantized rows too: expert_input quantized once
a token, activation once a route (`muse_jax.reference.quantized`). Products of codes are exact.
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from muse_jax.reference.norm import rms_norm
from muse_jax.reference.profiles import Profile
from muse_jax.reference.quantized import Weight, expert_of, quantized_inputs, shape_of
from muse_jax.reference.rounding import round_to, widen
from muse_jax.reference.router import check_ids, router_logits, topk_ids, topk_weights
from muse_jax.reference.settings import BlockSettings

__all__ = [
    "activation",
    "combined",
    "expert_input",
    "expert_rows",
    "finalize",
    "latent",
    "normed_rows",
    "out",
    "router_logits",
    "topk_ids",
    "topk_weights",
]


def latent(x: np.ndarray, pre_expert_proj: np.ndarray, profile: Profile) -> np.ndarray:
    """latent = x @ pre_expert_proj.T, [T, D] x [H, D] -> [T, H]."""
    return _linear(x, pre_expert_proj, profile)


def expert_input(
    latent: np.ndarray, pre_expert_norm: np.ndarray, settings: BlockSettings, profile: Profile
) -> np.ndarray:
    """expert_input = latent / sqrt(mean(latent^2) + norm_eps) * (1 + pre_expert_norm), [T, H]."""
    return rms_norm(
        latent,
        pre_expert_norm,
        eps=settings.norm_eps,
        out_dtype=profile.stored,
        arithmetic=profile.arithmetic,
        gain_dtype=profile.gain,
    )


@np.errstate(all="ignore")
def activation(
    expert_input: np.ndarray, ids: np.ndarray, gate_up: Weight, profile: Profile, rule: str | None = None
) -> np.ndarray:
    """activation = silu(expert_input @ gate_e.T) * (expert_input @ up_e.T), [T, H] -> [T, K, F] with e = ids [T, K].

    gate_e is the first half of gate_up[e] [2F, H], up_e the second; masked routes are zero. rule: how MXFP4 weights
    have expert_input quantized, as for `quantized_inputs`.
    """
    experts, double_width, _ = shape_of(gate_up)
    rows = np.zeros((*ids.shape, double_width // 2), profile.stored)
    inputs = quantized_inputs(expert_input, gate_up, rule)
    for expert, token, slot in _routes_by_expert(ids, experts):
        gate, up = np.split(widen(_linear(inputs[token], expert_of(gate_up, expert), profile)), 2, axis=-1)
        rows[token, slot] = round_to(widen(_silu(gate, profile)) * up, profile.stored)
    return rows


def expert_rows(
    activation: np.ndarray, ids: np.ndarray, down: Weight, profile: Profile, rule: str | None = None
) -> np.ndarray:
    """expert_rows = activation @ down_e.T, [T, K, F] x [E, H, F] -> [T, K, H], not weighted; masked routes are zero.

    rule: how MXFP4 weights have activation quantized, as for `quantized_inputs`.
    """
    experts, width, _ = shape_of(down)
    rows = np.zeros((*ids.shape, width), profile.stored)
    inputs = quantized_inputs(activation, down, rule)
    for expert, token, slot in _routes_by_expert(ids, experts):
        rows[token, slot] = _linear(inputs[token, slot], expert_of(down, expert), profile)
    return rows


def normed_rows(
    expert_rows: np.ndarray, ids: np.ndarray, post_expert_norm: np.ndarray, settings: BlockSettings, profile: Profile
) -> np.ndarray:
    """z = expert_rows * (1 + post_expert_norm);  normed_rows = z / sqrt(mean(z^2) + post_norm_eps), [T, K, H]."""
    return rms_norm(
        np.where(ids[..., None] < 0, 0, expert_rows),
        post_expert_norm,
        eps=settings.post_norm_eps,
        gain_first=True,
        out_dtype=profile.normed_rows,
        arithmetic=profile.arithmetic,
        gain_dtype=profile.gain,
        product_dtype=profile.gained_row,
    )


@np.errstate(all="ignore")
def combined(normed_rows: np.ndarray, ids: np.ndarray, weights: np.ndarray, profile: Profile) -> np.ndarray:
    """combined = sum_k topk_weights * normed_rows, [T, K, H] -> [T, H]; masked routes never enter the sum."""
    weighted = np.where(ids[..., None] < 0, 0.0, widen(weights)[..., None] * widen(normed_rows))
    if not profile.running_sum:
        return round_to(weighted.sum(axis=1), profile.stored)
    by_expert = np.take_along_axis(weighted, np.argsort(ids, axis=-1, kind="stable")[..., None], axis=1)
    total = np.zeros_like(weighted[:, 0])
    for route in range(ids.shape[1]):
        total = widen(round_to(total + widen(round_to(by_expert[:, route], profile.stored)), profile.stored))
    return round_to(total, profile.stored)


def finalize(
    expert_rows: np.ndarray,
    ids: np.ndarray,
    weights: np.ndarray,
    post_expert_norm: np.ndarray,
    settings: BlockSettings,
    profile: Profile,
) -> np.ndarray:
    """combined from expert_rows: each route's row normalised, then weighted, then summed over the token's routes."""
    return combined(normed_rows(expert_rows, ids, post_expert_norm, settings, profile), ids, weights, profile)


def out(combined: np.ndarray, post_expert_proj: np.ndarray, profile: Profile) -> np.ndarray:
    """out = combined @ post_expert_proj.T, [T, H] x [D, H] -> [T, D]."""
    return _linear(combined, post_expert_proj, profile)


@np.errstate(all="ignore")
def _linear(x: np.ndarray, weight: np.ndarray, profile: Profile) -> np.ndarray:
    return round_to(widen(x) @ widen(weight).T, profile.stored)


@np.errstate(all="ignore")
def _silu(gate: np.ndarray, profile: Profile) -> np.ndarray:
    return round_to(gate / (1.0 + np.exp(-gate)), profile.silu)


def _routes_by_expert(ids: np.ndarray, num_experts: int) -> Iterator[tuple[int, np.ndarray, np.ndarray]]:
    """(expert, tokens, slots) of every expert that has routes, ascending."""
    check_ids(ids, num_experts)
    for expert in np.unique(ids[ids >= 0]):
        tokens, slots = np.nonzero(ids == expert)
        yield int(expert), tokens, slots
