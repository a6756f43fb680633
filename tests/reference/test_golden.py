"""The block against tensors that transformers 5.24.0 and vLLM 0.33.0 wrote."""

import dataclasses

import numpy as np
import pytest

from muse_jax.reference import PROFILES, replay_block, run_block
from tests.golden import (
    HF_BF16,
    HF_EAGER_BF16,
    HF_F32,
    LAYERS,
    VLLM_BF16,
    golden_settings,
    golden_tensors,
    golden_weights,
)
from tests.reference.checks import Limits, faults

SETTINGS = golden_settings("hf-tiny")

# float32 runs round every product and sum: 2e-6 is 34 units of 2^-24, about what chains of D = 128 terms through five
# GEMMs may lose. A wrong formula is off by 1e-3 or more.
F32 = 2e-6
# A float64 result rounded once differs from a float32 sum rounded once where that sum falls on the other side of a tie:
# 2^-24 * sqrt(128) / 2^-9 is 0.03 % of elements. Both factors of a SwiGLU product may do so, hence 2 ulp.
REPLAY = Limits(row_error=F32, equal=0.999, ulp=2)


def weights_of(layer):
    return golden_weights("hf-tiny", layer)


def over_layers(of_layer):
    """The dicts of all layers as one, tokens stacked."""
    layers = [of_layer(layer) for layer in LAYERS]
    return {name: np.concatenate([tensors[name] for tensors in layers]) for name in layers[0]}


def boundaries(file):
    return lambda layer: {name: value for name, value in golden_tensors(file, layer).items() if "." not in name}


def chained(file, profile, **ranks):
    return lambda layer: run_block(weights_of(layer), golden_tensors(file, layer)["x"], SETTINGS, profile, **ranks)


@pytest.mark.parametrize("layer", LAYERS)
def test_exact_is_the_float32_run(layer):
    golden = golden_tensors(HF_F32, layer)
    ours = run_block(weights_of(layer), golden["x"], SETTINGS, "exact")
    assert faults(ours, golden, Limits(row_error=F32), our_ids=ours["topk_ids"]) == {}


@pytest.mark.parametrize("layer", LAYERS)
def test_exact_replays_the_float32_run(layer):
    golden = golden_tensors(HF_F32, layer)
    ours = replay_block(weights_of(layer), golden, SETTINGS, "exact")
    assert faults(ours, golden, Limits(row_error=1e-6), our_ids=golden["topk_ids"]) == {}


@pytest.mark.parametrize("layer", LAYERS)
@pytest.mark.parametrize(
    "profile, files", [("hf", (HF_BF16,)), ("hf_eager", (HF_BF16, HF_EAGER_BF16)), ("vllm", (VLLM_BF16,))]
)
def test_profiles_replay_bit_for_bit(profile, files, layer):
    golden = {name: value for file in files for name, value in golden_tensors(file, layer).items()}
    ours = replay_block(weights_of(layer), golden, SETTINGS, profile)
    assert faults(ours, golden, REPLAY, our_ids=golden["topk_ids"]) == {}


# Chained, one element of `activation` on the other side of a tie moves its whole token a little. transformers' rows
# are rounded to it once more than vLLM's, so more of that shows.
@pytest.mark.parametrize("profile, file, equal", [("hf", HF_BF16, 0.98), ("hf_eager", HF_EAGER_BF16, 0.98)])
@pytest.mark.parametrize("layer", LAYERS)
def test_hf_profiles_chained(profile, file, equal, layer):
    golden = golden_tensors(file, layer)
    ours = chained(HF_BF16, profile)(layer)
    assert faults(ours, golden, Limits(row_error=F32, equal=equal), our_ids=ours["topk_ids"]) == {}


def test_vllm_profile_chained():
    golden, ours = over_layers(boundaries(VLLM_BF16)), over_layers(chained(VLLM_BF16, "vllm"))
    limits = Limits(row_error=F32, equal=0.995)
    assert faults(ours, golden, limits, our_ids=ours["topk_ids"], as_bfloat16=("normed_rows",)) == {}


@pytest.mark.parametrize("layer", LAYERS)
def test_vllm_orders_routes_by_score(layer):
    golden = golden_tensors(VLLM_BF16, layer)
    np.testing.assert_array_equal(
        replay_block(weights_of(layer), golden, SETTINGS, "vllm")["topk_ids"], golden["topk_ids"]
    )


@pytest.mark.parametrize(
    "profile, file, first",
    [
        ("vllm", HF_BF16, "expert_input"),
        ("hf", VLLM_BF16, "expert_input"),
        ("hf_eager", HF_BF16, "combined"),
        ("exact", HF_BF16, "latent"),
    ],
)
def test_a_profile_fails_where_another_framework_rounds_otherwise(profile, file, first):
    golden = golden_tensors(file, 1)
    ours = replay_block(weights_of(1), golden, SETTINGS, profile)
    assert next(iter(faults(ours, golden, REPLAY, our_ids=golden["topk_ids"]))) == first


@pytest.mark.parametrize("switch", ["stored", "gain", "gained_row", "silu", "normed_rows"])
def test_each_rounding_of_the_hf_profile_shows(switch):
    golden = golden_tensors(HF_BF16, 1)
    wider = dataclasses.replace(PROFILES["hf"], **{switch: np.dtype(np.float32)})
    ours = replay_block(weights_of(1), golden, SETTINGS, wider)
    assert faults(ours, golden, REPLAY, our_ids=golden["topk_ids"])
