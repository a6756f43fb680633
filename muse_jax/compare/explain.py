"""Why a boundary parts: what usually does it there, and which framework's roundings each side has.

A profile's fit at a boundary is the share of elements that its replay, from the side's own inputs, reproduces bit for
bit.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from muse_jax.compare.metrics import distance
from muse_jax.reference import PROFILES, BlockSettings, replay_block

CAUSES = {
    "x": "The inputs differ: nothing below can be compared. Dump both from one input.",
    "router_logits": "The router's product: its weight, its input (the wide x, before pre_expert_proj), the output "
    "multiplier left out or applied twice, or bfloat16 / TF32 where float32 was asked.",
    "topk_ids": "Selection: the bias left out, ties broken by another rule, or scores of another normalization. "
    "A larger --tie-gap says how close the disputed scores are.",
    "topk_weights": "Weights of the chosen: taken from biased scores, not renormalised over all K, or without "
    "the route scale.",
    "latent": "pre_expert_proj: its weight, or partial sums kept in bfloat16.",
    "expert_input": "pre_expert_norm: a gain without its centre of 1, the gain rounded to bfloat16 before it is used, "
    "or another epsilon.",
    "activation": "The first expert GEMM or SwiGLU: experts in another order, gate and up swapped, or silu rounded "
    "once where the other side rounds it before the product too.",
    "expert_rows": "The second expert GEMM: experts in another order, rows already multiplied by the route weight, or "
    "partial rows of a tensor-parallel rank.",
    "normed_rows": "post_expert_norm: the gain after the variance instead of before it, the gain or the gained row "
    "rounded to bfloat16, another epsilon, or the norm of partial rows.",
    "combined": "The weighted sum: weights applied before the norm, a running sum rounded at each route, weights "
    "rounded to bfloat16, or a route counted twice or not at all.",
    "out": "post_expert_proj: its weight, or partial sums kept in bfloat16.",
}


def best_profiles(
    name: str, layer: Mapping[str, np.ndarray], weights: Mapping[str, Any], settings: BlockSettings
) -> list[tuple[str, float]]:
    """(profile, share of elements reproduced at boundary `name`), best first.

    Of a bfloat16 run "exact" is no candidate; of a float32 run it is the only one. Raises ValueError where an input of
    the replay is missing.
    """
    fits = []
    narrow = layer["x"].dtype != np.float32
    known = ("exact", "vllm") if hasattr(weights["gate_up"], "scales") else PROFILES  # those of quantized experts
    for profile in (name for name in known if (name == "exact") != narrow):
        replayed = replay_block(weights, layer, settings, profile)[name]
        own = layer[name]
        fits.append((profile, distance(replayed.astype(own.dtype), own).equal))
    return sorted(fits, key=lambda fit: -fit[1])
