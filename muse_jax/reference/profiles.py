"""Rounding profiles: the block's maths with the roundings of one implementation, said switch by switch.

    stored value = round_to(float64 value of the step, the switch's dtype)

Steps always compute in float64; a profile only says where and to what their results are rounded. "exact" rounds
nothing.
"""

from __future__ import annotations

from dataclasses import dataclass, fields

import numpy as np

from muse_jax.reference.rounding import BFLOAT16, FLOAT32, FLOAT64


@dataclass(frozen=True, kw_only=True)
class Profile:
    """Where one implementation of the block rounds.

    Attributes:
      name: what `run_block` and `replay_block` call it.
      arithmetic: router logits, scores and weights; range of the sums of squares in the norms.
      stored: x, latent, expert_input, gate and up, activation, expert_rows, combined and out.
      gain: the gain 1 + w of both norms.
      gained_row: a row times its gain, before the variance of post_expert_norm.
      silu: silu(gate), before it meets up.
      normed_rows: the output of post_expert_norm.
      fold_multiplier: the output multiplier scales the router's weight (rounded to `arithmetic`), not the logits.
      running_sum: each weighted row, and the sum after each of them, is rounded to `stored`, experts ascending;
        otherwise the weighted sum over a token's routes is rounded once.
    """

    name: str
    arithmetic: np.dtype
    stored: np.dtype
    gain: np.dtype
    gained_row: np.dtype
    silu: np.dtype
    normed_rows: np.dtype
    fold_multiplier: bool
    running_sum: bool

    def __post_init__(self) -> None:
        for field in fields(self):
            value = getattr(self, field.name)
            if field.type == "np.dtype" and value not in (BFLOAT16, FLOAT32, FLOAT64):
                raise ValueError(f"{field.name} is {value!r}; expected the dtype bfloat16, float32 or float64")
        if self.arithmetic == BFLOAT16:
            raise ValueError("arithmetic is bfloat16; expected float32 or float64")


_EXACT = Profile(
    name="exact",
    arithmetic=FLOAT64,
    stored=FLOAT64,
    gain=FLOAT64,
    gained_row=FLOAT64,
    silu=FLOAT64,
    normed_rows=FLOAT64,
    fold_multiplier=False,
    running_sum=False,
)
_VLLM = Profile(
    name="vllm",
    arithmetic=FLOAT32,
    stored=BFLOAT16,
    gain=FLOAT32,
    gained_row=FLOAT32,
    silu=BFLOAT16,
    normed_rows=FLOAT32,
    fold_multiplier=True,
    running_sum=False,
)
_HF = Profile(
    name="hf",
    arithmetic=FLOAT32,
    stored=BFLOAT16,
    gain=BFLOAT16,
    gained_row=BFLOAT16,
    silu=BFLOAT16,
    normed_rows=BFLOAT16,
    fold_multiplier=False,
    running_sum=False,
)
_HF_EAGER = Profile(
    name="hf_eager",
    arithmetic=FLOAT32,
    stored=BFLOAT16,
    gain=BFLOAT16,
    gained_row=BFLOAT16,
    silu=BFLOAT16,
    normed_rows=BFLOAT16,
    fold_multiplier=False,
    running_sum=True,
)

# exact: nothing rounded. vllm: vLLM 0.33.0 on AMD. hf, hf_eager: transformers 5.24.0 with its default experts
# (grouped_mm) and with its eager ones.
PROFILES = {profile.name: profile for profile in (_EXACT, _VLLM, _HF, _HF_EAGER)}


def find_profile(profile: str | Profile) -> Profile:
    """The profile of that name, or the Profile itself. Raises ValueError for an unknown name."""
    if isinstance(profile, Profile):
        return profile
    if profile not in PROFILES:
        raise ValueError(f"profile is {profile!r}; expected one of {', '.join(PROFILES)}")
    return PROFILES[profile]
