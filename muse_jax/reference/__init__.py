"""The numpy truth of the block: float64, step by step, rounded only where a profile says. Imports nothing but numpy."""

from muse_jax.reference.norm import gain_center, rms_norm, rms_norm_residual
from muse_jax.reference.profiles import PROFILES, Profile
from muse_jax.reference.run import replay_block, run_block
from muse_jax.reference.settings import BlockSettings

__all__ = [
    "PROFILES",
    "BlockSettings",
    "Profile",
    "gain_center",
    "replay_block",
    "rms_norm",
    "rms_norm_residual",
    "run_block",
]
