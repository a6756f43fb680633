"""What quantization costs: rows of random experts against the same experts in bfloat16, at the level that was measured.

FP8 6.5e-2; MXFP4 with activations even 0.287, floor 0.291, rceil 0.295, and weights alone 0.194 (relative RMS). A
smaller error is as much a fault as a larger one: it says that something was not quantized.
"""

import ml_dtypes
import numpy as np
import pytest

from muse_jax.quantization import quantize_fp8, quantize_mxfp4
from muse_jax.reference import PROFILES, block

T, H, F, E, K = 64, 512, 384, 4, 2
LEVELS = [
    ("fp8", None, 0.065),
    ("mxfp4", "even", 0.287),
    ("mxfp4", "floor", 0.291),
    ("mxfp4", "rceil", 0.295),
    ("mxfp4", "w4a16", 0.194),
]


@pytest.fixture(scope="module")
def case():
    random = np.random.default_rng(0)
    normal = lambda *shape: random.standard_normal(shape).astype(np.float32)
    gate_up, down = (normal(E, 2 * F, H) / np.sqrt(H)), (normal(E, H, F) / np.sqrt(F))
    x, ids = normal(T, H), np.argsort(random.random((T, E)), axis=1)[:, :K].astype(np.int32)
    return tuple(array.astype(ml_dtypes.bfloat16) for array in (gate_up, down, x)), ids


def rows(gate_up, down, x, ids, rule=None):
    profile = PROFILES["vllm"]
    activation = block.activation(x, ids, gate_up, profile, rule)
    return block.expert_rows(activation, ids, down, profile, rule).astype(np.float64)


@pytest.mark.parametrize("form, rule, level", LEVELS)
def test_error_level(case, form, rule, level):
    (gate_up, down, x), ids = case
    plain = rows(gate_up, down, x, ids)
    quantize = quantize_fp8 if form == "fp8" else quantize_mxfp4
    lost = rows(quantize(gate_up).to_host(), quantize(down).to_host(), x, ids, rule) - plain
    assert np.linalg.norm(lost) / np.linalg.norm(plain) == pytest.approx(level, rel=0.03)
