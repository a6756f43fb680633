"""The golden suite must fail for a block that is wrong, and name the boundary that is."""

import dataclasses
from functools import partial

import numpy as np
import pytest

from muse_jax.reference import PROFILES, block, replay_block, rms_norm, router, run, run_block
from muse_jax.reference.rounding import FLOAT32, round_to, widen
from tests.golden import HF_BF16, HF_EAGER_BF16, HF_F32, VLLM_BF16, golden_settings, golden_tensors, golden_weights
from tests.reference.checks import Limits, faults
from tests.reference.test_golden import F32, REPLAY

LAYER = 1


def exact_chained(weights, settings, change):
    golden = golden_tensors(HF_F32, LAYER)
    ours = run_block(weights, golden["x"], settings, change(PROFILES["exact"]))
    return faults(ours, golden, Limits(row_error=F32), our_ids=ours["topk_ids"])


def replayed(profile, files, weights, settings, change):
    golden = {name: value for file in files for name, value in golden_tensors(file, LAYER).items()}
    ours = replay_block(weights, golden, settings, change(PROFILES[profile]))
    return faults(ours, golden, REPLAY, our_ids=golden["topk_ids"])


SUITES = {
    "exact": exact_chained,
    "hf": partial(replayed, "hf", [HF_BF16]),
    "hf_eager": partial(replayed, "hf_eager", [HF_BF16, HF_EAGER_BF16]),
    "vllm": partial(replayed, "vllm", [VLLM_BF16]),
}


def experts_swapped(weights, monkeypatch):
    order = np.arange(len(weights["down"]))
    a, b = np.unique(golden_tensors(HF_BF16, LAYER)["topk_ids"])[:2]  # some experts have no route in the golden files
    order[[a, b]] = b, a
    return weights | {"gate_up": weights["gate_up"][order], "down": weights["down"][order]}


def down_of_another_expert(weights, monkeypatch):
    return weights | {"down": np.roll(weights["down"], 1, axis=0)}


def gate_and_up_swapped(weights, monkeypatch):
    return weights | {"gate_up": np.roll(weights["gate_up"], weights["gate_up"].shape[1] // 2, axis=1)}


def row_dropped(weights, monkeypatch):
    def step(w, b, s, p):
        rows = block.expert_rows(b["activation"], b["topk_ids"], w["down"], p)
        rows[7, 2] = 0
        return rows

    monkeypatch.setitem(run.STEPS, "expert_rows", step)
    return weights


def gain_after_variance(weights, monkeypatch):
    def step(w, b, s, p):
        return rms_norm(b["expert_rows"], w["post_expert_norm"], eps=s.post_norm_eps, out_dtype=p.normed_rows)

    monkeypatch.setitem(run.STEPS, "normed_rows", step)
    return weights


def gain_without_centre(weights, monkeypatch):
    return weights | {"pre_expert_norm": round_to(widen(weights["pre_expert_norm"]) - 1.0, FLOAT32)}


def weight_before_norm(weights, monkeypatch):
    def normed(w, b, s, p):
        rows = widen(b["expert_rows"]) * widen(b["topk_weights"])[..., None]
        return block.normed_rows(rows, b["topk_ids"], w["post_expert_norm"], s, p)

    def combined(w, b, s, p):
        return block.combined(b["normed_rows"], b["topk_ids"], np.ones_like(b["topk_weights"]), p)

    monkeypatch.setitem(run.STEPS, "normed_rows", normed)
    monkeypatch.setitem(run.STEPS, "combined", combined)
    return weights


def bias_in_weights(weights, monkeypatch):
    scores = router._scores
    monkeypatch.setattr(
        router, "_scores", lambda logits, s, p: round_to(widen(scores(logits, s, p)) + weights["router_bias"], FLOAT32)
    )
    return weights | {"router_bias": np.zeros_like(weights["router_bias"])}


def bias_ignored(weights, monkeypatch):
    return weights | {"router_bias": np.zeros_like(weights["router_bias"])}


def router_reads_swapped_experts(weights, monkeypatch):
    return weights | {"router_weight": np.roll(weights["router_weight"], 1, axis=0)}


# variant -> the boundaries at which a suite must name it
WRONG_WEIGHTS = {
    experts_swapped: {"activation"},
    down_of_another_expert: {"expert_rows"},
    gate_and_up_swapped: {"activation"},
    row_dropped: {"expert_rows"},
    gain_after_variance: {"normed_rows"},
    gain_without_centre: {"expert_input"},
    weight_before_norm: {"combined"},
    bias_in_weights: {"topk_weights"},
    bias_ignored: {"topk_ids"},
    router_reads_swapped_experts: {"router_logits"},
}


@pytest.mark.parametrize("suite", SUITES)
@pytest.mark.parametrize("variant", WRONG_WEIGHTS)
def test_wrong_blocks_fail(variant, suite, monkeypatch):
    weights = variant(golden_weights("hf-tiny", LAYER), monkeypatch)
    found = SUITES[suite](weights, golden_settings("hf-tiny"), lambda profile: profile)
    assert found.keys() >= WRONG_WEIGHTS[variant]


WRONG_SETTINGS = {
    "multiplier missing": ({"output_multiplier": 1.0}, "router_logits"),
    "route scale": ({"route_scale": 2.5}, "topk_weights"),
    "softmax scores": ({"scoring": "softmax"}, "topk_weights"),
}


@pytest.mark.parametrize("suite", SUITES)
@pytest.mark.parametrize("name", WRONG_SETTINGS)
def test_wrong_settings_fail(name, suite):
    changed, boundary = WRONG_SETTINGS[name]
    settings = dataclasses.replace(golden_settings("hf-tiny"), **changed)
    found = SUITES[suite](golden_weights("hf-tiny", LAYER), settings, lambda profile: profile)
    assert boundary in found


WRONG_ROUNDINGS = {
    "single rounding in SwiGLU": (("hf", "hf_eager", "vllm"), {"silu": FLOAT32}, "activation"),
    "gain rounded to bf16": (("vllm",), {"gain": PROFILES["hf"].gain}, "expert_input"),
    "gain kept in f32": (("hf", "hf_eager"), {"gain": FLOAT32}, "expert_input"),
    "gained row kept in f32": (("hf", "hf_eager"), {"gained_row": FLOAT32}, "normed_rows"),
    "running sum": (("hf", "vllm"), {"running_sum": True}, "combined"),
    "one rounding of the sum": (("hf_eager",), {"running_sum": False}, "combined"),
}


@pytest.mark.parametrize(
    "name, suite", [(name, suite) for name, (suites, _, _) in WRONG_ROUNDINGS.items() for suite in suites]
)
def test_wrong_roundings_fail(name, suite):
    _, changed, boundary = WRONG_ROUNDINGS[name]
    found = SUITES[suite](
        golden_weights("hf-tiny", LAYER),
        golden_settings("hf-tiny"),
        lambda profile: dataclasses.replace(profile, **changed),
    )
    assert boundary in found


@pytest.mark.parametrize("suite", SUITES)
def test_the_unbroken_block_passes(suite):
    found = SUITES[suite](golden_weights("hf-tiny", LAYER), golden_settings("hf-tiny"), lambda profile: profile)
    assert found == {}
