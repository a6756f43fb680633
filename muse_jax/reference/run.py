"""The whole block: chained from x, or each boundary replayed from a given file's own inputs.

    run_block       b[name] = step of name, reading b         for the boundaries in order, from b = {x}
    replay_block    r[name] = step of name, reading given     for each boundary by itself

A replay keeps a difference at one boundary from travelling on to the next. gate_up and down may be quantized: objects
with values, scales, format and input_scale, as `muse_jax.reference.quantized` describes them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from functools import partial
from typing import Any

import numpy as np

from muse_jax.reference import block, sharded
from muse_jax.reference.profiles import PROFILES, Profile, find_profile
from muse_jax.reference.quantized import ACTIVATION_RULES, Quantized, shape_of
from muse_jax.reference.rounding import BFLOAT16, FLOAT32, round_to
from muse_jax.reference.settings import BlockSettings

Arrays = Mapping[str, np.ndarray]
Weights = Mapping[str, Any]  # arrays, or for gate_up and down something quantized
Step = Callable[..., np.ndarray]  # of weights, boundaries, settings, profile and, where _WITH_RULE has it, rule

# Every boundary but x, in order: what it reads of the weights w and of the earlier boundaries b.
STEPS: dict[str, Step] = {
    "router_logits": lambda w, b, s, p: block.router_logits(b["x"], w["router_weight"], s.output_multiplier, p),
    "topk_ids": lambda w, b, s, p: block.topk_ids(b["router_logits"], w["router_bias"], s, p),
    "topk_weights": lambda w, b, s, p: block.topk_weights(b["router_logits"], b["topk_ids"], s, p),
    "latent": lambda w, b, s, p: block.latent(b["x"], w["pre_expert_proj"], p),
    "expert_input": lambda w, b, s, p: block.expert_input(b["latent"], w["pre_expert_norm"], s, p),
    "activation": lambda w, b, s, p, **r: block.activation(b["expert_input"], b["topk_ids"], w["gate_up"], p, **r),
    "expert_rows": lambda w, b, s, p, **r: block.expert_rows(b["activation"], b["topk_ids"], w["down"], p, **r),
    "normed_rows": lambda w, b, s, p: block.normed_rows(b["expert_rows"], b["topk_ids"], w["post_expert_norm"], s, p),
    "combined": lambda w, b, s, p: block.combined(b["normed_rows"], b["topk_ids"], b["topk_weights"], p),
    "out": lambda w, b, s, p: block.out(b["combined"], w["post_expert_proj"], p),
}

_WEIGHT_AXES = {
    "router_weight": "ED",
    "router_bias": "E",
    "pre_expert_proj": "HD",
    "pre_expert_norm": "H",
    "gate_up": "EGH",  # G = 2F
    "down": "EHF",
    "post_expert_norm": "H",
    "post_expert_proj": "DH",
}
_READ_AXES = {
    "x": "TD",
    "router_logits": "TE",
    "topk_ids": "TK",
    "topk_weights": "TK",
    "latent": "TH",
    "expert_input": "TH",
    "activation": "TKF",
    "expert_rows": "TKH",
    "normed_rows": "TKH",
    "combined": "TH",
}
_WITH_RULE = ("activation", "expert_rows")  # the steps that may quantize what they read
_REDUCE_DTYPES = {"float32": FLOAT32, "bfloat16": BFLOAT16}


def run_block(
    weights: Weights,
    x: np.ndarray,
    settings: BlockSettings,
    profile: str | Profile = "exact",
    *,
    activation_rule: str | None = None,
    tp: int = 1,
    ep: int = 1,
    reduce_dtype: str = "float32",
) -> dict[str, np.ndarray]:
    """Every boundary of the block, chained from x [T, D], in the profile's dtypes (topk_ids int32).

    Args:
      weights: a layer's weights: router_weight [E, D], router_bias [E], pre_expert_proj [H, D], pre_expert_norm [H],
        gate_up [E, 2F, H] (gate rows first), down [E, H, F], post_expert_norm [H], post_expert_proj [D, H].
      x: the block's input, any float dtype; T may be 0.
      settings: the numbers that are not in the weights.
      profile: a name in PROFILES or a Profile; quantized weights have "exact" and "vllm".
      activation_rule: with MXFP4 weights, "even", "floor" or "rceil", how the experts' inputs find their shared
        exponents, or "w4a16" to leave them as they are; None is "even".
      tp: ranks that split every expert's width; their partial rows are summed before the norm.
      ep: ranks that share out the experts; their partial sums are added after the norm and the weights.
      reduce_dtype: "float32" or "bfloat16", what the sums over ranks are rounded to.

    With tp or ep above 1 the result is that of vLLM's ranks, so only the "vllm" profile has one.
    Raises ValueError when the weights, x and the settings do not fit together.
    """
    profile = find_profile(profile)
    width = _check_weights(weights, settings)["D"]
    _check_quantized(weights, profile, activation_rule)
    if x.ndim != 2 or x.shape[1] != width:
        raise ValueError(f"x is {x.shape}; expected (tokens, {width}), the width that router_weight reads")
    steps = _with_rule(STEPS | _sharded_steps(profile, tp, ep, reduce_dtype), activation_rule)
    boundaries = {"x": round_to(x, profile.stored)}
    for name, step in steps.items():
        boundaries[name] = step(weights, boundaries, settings, profile)
    return boundaries


def replay_block(
    weights: Weights,
    boundaries: Arrays,
    settings: BlockSettings,
    profile: str | Profile,
    *,
    activation_rule: str | None = None,
) -> dict[str, np.ndarray]:
    """Every boundary but x, each computed from the *given* earlier boundaries instead of the ones computed here.

    Args:
      weights, settings, profile, activation_rule: as for `run_block`.
      boundaries: x and every boundary but out, of one layer and one run; topk_ids in any order, -1 for a masked route.

    Raises ValueError when a boundary is missing, or shapes do not fit together.
    """
    profile = find_profile(profile)
    sizes = _check_weights(weights, settings)
    _check_quantized(weights, profile, activation_rule)
    _check_present("boundaries", boundaries, _READ_AXES)
    _check_shapes("boundaries", boundaries, _READ_AXES, sizes | {"T": len(boundaries["x"])})
    steps = _with_rule(STEPS, activation_rule)
    return {name: step(weights, boundaries, settings, profile) for name, step in steps.items()}


def _with_rule(steps: Mapping[str, Step], rule: str | None) -> dict[str, Step]:
    if rule is None:
        return dict(steps)
    return {name: partial(step, rule=rule) if name in _WITH_RULE else step for name, step in steps.items()}


def _check_quantized(weights: Weights, profile: Profile, rule: str | None) -> None:
    """ValueError for a profile that says nothing of quantized weights, or a rule that does not go with these."""
    formats = {weights[name].format for name in ("gate_up", "down") if isinstance(weights[name], Quantized)}
    if formats and profile not in (PROFILES["exact"], PROFILES["vllm"]):
        raise ValueError(f"profile is {profile.name!r} and the weights are quantized; expected 'exact' or 'vllm'")
    if rule is None:
        return
    if rule not in ACTIVATION_RULES:
        raise ValueError(f"activation_rule is {rule!r}; expected one of {', '.join(ACTIVATION_RULES)}")
    if formats != {"mxfp4"}:
        words = " and ".join(sorted(formats)) or "not quantized"
        raise ValueError(f"activation_rule is {rule!r} and the weights are {words}; only mxfp4 weights have a rule")


def _sharded_steps(profile: Profile, tp: int, ep: int, reduce_dtype: str) -> dict[str, Step]:
    for name, ranks in (("tp", tp), ("ep", ep)):
        if ranks < 1:
            raise ValueError(f"{name} is {ranks}; expected a number of ranks, 1 or more")
    if reduce_dtype not in _REDUCE_DTYPES:
        raise ValueError(f"reduce_dtype is {reduce_dtype!r}; expected one of {', '.join(_REDUCE_DTYPES)}")
    if (tp, ep) != (1, 1) and profile != PROFILES["vllm"]:
        raise ValueError(f"tp is {tp} and ep is {ep} with profile {profile.name!r}; only 'vllm' says how ranks round")
    dtype = _REDUCE_DTYPES[reduce_dtype]
    steps: dict[str, Step] = {}
    if tp > 1:
        steps["expert_rows"] = lambda w, b, s, p, **r: sharded.tp_expert_rows(
            b["activation"], b["topk_ids"], w["down"], tp, dtype, p, **r
        )
    if ep > 1:
        steps["combined"] = lambda w, b, s, p: sharded.ep_combined(
            b["normed_rows"], b["topk_ids"], b["topk_weights"], shape_of(w["down"])[0], ep, dtype, p
        )
    return steps


def _check_weights(weights: Weights, settings: BlockSettings) -> dict[str, int]:
    """The sizes D, H, F, E, K by their letter, once every tensor is there and has the shape that they give it."""
    _check_present("weights", weights, _WEIGHT_AXES)
    for name in ("router_weight", "down"):
        shape = shape_of(weights[name])
        if len(shape) != len(_WEIGHT_AXES[name]):
            raise ValueError(f"weights[{name!r}] is {shape}; expected {len(_WEIGHT_AXES[name])} axes")
    (experts, width), (_, latent, expert) = weights["router_weight"].shape, shape_of(weights["down"])
    routes = settings.routes_per_token
    if routes > experts:
        raise ValueError(f"routes_per_token is {routes}; expected at most the number of experts, {experts}")
    sizes = {"D": width, "H": latent, "F": expert, "G": 2 * expert, "E": experts, "K": routes}
    _check_shapes("weights", weights, _WEIGHT_AXES, sizes)
    return sizes


def _check_present(what: str, arrays: Weights, names: Iterable[str]) -> None:
    missing = [name for name in names if name not in arrays]
    if missing:
        raise ValueError(f"{what} lacks {', '.join(missing)}; expected {', '.join(names)}")


def _check_shapes(what: str, arrays: Weights, axes: Mapping[str, str], sizes: Mapping[str, int]) -> None:
    for name, letters in axes.items():
        expected = tuple(sizes[letter] for letter in letters)
        shape = shape_of(arrays[name])
        if shape != expected:
            raise ValueError(f"{what}[{name!r}] is {shape}; expected [{', '.join(letters)}] = {expected}")
