"""Quantized layers against what AMD Quark's files give: whole blocks, and rows that no rounding of a sum can excuse."""

import dataclasses
import itertools

import numpy as np
import pytest

from muse_jax.reference import PROFILES, block, quantized, replay_block, run_block
from tests.quark import RUNS, quark_file, quark_run, quark_settings, quark_weights
from tests.reference.checks import Limits, faults, row_errors

SETTINGS = quark_settings()
RULES = quantized.ACTIVATION_RULES
# The files hold float64 results as float32: half a unit of 2^-23 an element, and one more through a replayed input.
STORED = Limits(row_error=2e-7)
FLOWS = [("fp8", "fn", None), ("mxfp4", "even", "even"), ("mxfp4", "rceil", "rceil")]


@pytest.mark.parametrize("run", RUNS)
def test_exact_is_the_golden_block(run):
    form, rule = RUNS[run]
    golden = quark_run(run)
    ours = run_block(quark_weights(form), golden["x"], SETTINGS, "exact", activation_rule=rule)
    assert faults(ours, golden, STORED, our_ids=ours["topk_ids"]) == {}


@pytest.mark.parametrize("run", RUNS)
def test_exact_replays_the_golden_block(run):
    form, rule = RUNS[run]
    golden = quark_run(run)
    ours = replay_block(quark_weights(form), golden, SETTINGS, "exact", activation_rule=rule)
    assert faults(ours, golden, STORED, our_ids=golden["topk_ids"]) == {}


@pytest.mark.parametrize(
    "run, other",
    [(run, other) for run, (form, rule) in RUNS.items() if form == "mxfp4" for other in RULES if other != rule],
)
def test_another_activation_rule_fails(run, other):
    form, _ = RUNS[run]
    golden = quark_run(run)
    ours = replay_block(quark_weights(form), golden, SETTINGS, "exact", activation_rule=other)
    assert list(faults(ours, golden, STORED, our_ids=golden["topk_ids"])) == ["activation", "expert_rows"]


def swapped_nibbles(weight):
    return dataclasses.replace(weight, values=weight.values >> 4 | weight.values << 4)


def scales_of_another_expert(weight):
    return dataclasses.replace(weight, scales=np.roll(weight.scales, 1, axis=0))


def up_before_gate(weight):
    half = weight.values.shape[1] // 2
    return dataclasses.replace(
        weight, values=np.roll(weight.values, half, axis=1), scales=np.roll(weight.scales, half, axis=1)
    )


@pytest.mark.parametrize(
    "run, broken",
    [
        ("mxfp4_even", swapped_nibbles),
        *itertools.product(["fp8", "mxfp4_even"], [scales_of_another_expert, up_before_gate]),
    ],
)
def test_a_broken_weight_fails(run, broken):
    form, rule = RUNS[run]
    weights = dict(quark_weights(form))
    weights["gate_up"] = broken(weights["gate_up"])
    golden = quark_run(run)
    ours = replay_block(weights, golden, SETTINGS, "exact", activation_rule=rule)
    assert list(faults(ours, golden, STORED, our_ids=golden["topk_ids"])) == ["activation"]


def quantize(form, rows, rule):
    return quantized.quantize_fp8(rows) if form == "fp8" else quantized.quantize_mxfp4(rows, rule)


def assert_same_blocks(form, codes, scales, golden_codes, golden_scales):
    """Codes equal, and scales too, but for MXFP4 blocks of zeros: the file gives those byte 0, Quark and we 1."""
    np.testing.assert_array_equal(codes, golden_codes)
    if form == "mxfp4":
        zeros = ~golden_codes.reshape(*golden_scales.shape, 32).any(axis=-1)
        scales, golden_scales = (np.where(zeros, 1, scale) for scale in (scales, golden_scales))
    np.testing.assert_array_equal(scales, golden_scales)


@pytest.mark.parametrize("flow, profile", [("exact", "exact"), ("r16", "vllm")])
@pytest.mark.parametrize("form, name, rule", FLOWS)
def test_bit_exact_rows(form, name, rule, flow, profile):
    golden = quark_file(f"bit_exact_{form}.safetensors")
    weights, ids, prefix = quark_weights(form), golden["topk_ids"], f"{name}.{flow}."
    profile = PROFILES[profile]
    assert_same_blocks(form, *quantize(form, golden["x_e"], rule), golden[name + ".x_codes"], golden[name + ".x_scale"])
    act = block.activation(golden["x_e"], ids, weights["gate_up"], profile, rule)
    np.testing.assert_array_equal(act.astype(np.float32), golden[prefix + "act"])
    assert_same_blocks(form, *quantize(form, act, rule), golden[prefix + "act_codes"], golden[prefix + "act_scale"])
    # The file's rows are float32 sums before any rounding to bfloat16.
    unrounded = dataclasses.replace(profile, stored=np.dtype(np.float32))
    rows = block.expert_rows(act, ids, weights["down"], unrounded, rule)
    assert row_errors(rows, golden[prefix + "expert_rows"]).max() <= (0 if form == "mxfp4" else 1e-7)
    stored = block.expert_rows(act, ids, weights["down"], profile, rule)
    combined = block.finalize(stored, ids, golden["topk_weights"], golden["post_expert_gain"], SETTINGS, unrounded)
    assert row_errors(combined, golden[prefix + "combined"]).max() <= 2e-7


@pytest.mark.parametrize("run", RUNS)
def test_vllm_profile_stays_near_the_golden_block(run):
    """bfloat16 steps of 2^-9 in two GEMMs and a SwiGLU, and codes that fall on the other side of a boundary for it."""
    form, rule = RUNS[run]
    golden = quark_run(run)
    ours = replay_block(quark_weights(form), golden, SETTINGS, "vllm", activation_rule=rule)
    for name in ("activation", "expert_rows", "combined", "out"):
        assert row_errors(ours[name], golden[name]).max() < 1e-2, name


@pytest.mark.parametrize("form", ["fp8", "mxfp4"])
def test_ranks_of_tp_cut_at_blocks(form):
    weights, x = quark_weights(form), quark_run("fp8")["x"]
    alone = run_block(weights, x, SETTINGS, "vllm")
    ranks = run_block(weights, x, SETTINGS, "vllm", tp=3)  # F = 96: a block of 32 each
    assert row_errors(ranks["expert_rows"], alone["expert_rows"]).max() < (6e-2 if form == "fp8" else 1e-2)
    if form == "mxfp4":
        with pytest.raises(ValueError, match="split a block of 32"):
            run_block(weights, x, SETTINGS, "vllm", tp=2)


@pytest.mark.parametrize(
    "form, settings, message",
    [
        ("mxfp4", dict(profile="hf"), "profile is 'hf' and the weights are quantized; expected 'exact' or 'vllm'"),
        ("mxfp4", dict(activation_rule="up"), "activation_rule is 'up'; expected one of even, floor, rceil, w4a16"),
        ("fp8", dict(activation_rule="even"), "activation_rule is 'even' and the weights are fp8; only mxfp4"),
    ],
)
def test_refusals(form, settings, message):
    with pytest.raises(ValueError, match=message):
        run_block(quark_weights(form), quark_run("fp8")["x"], SETTINGS, **settings)
