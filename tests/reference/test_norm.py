"""The RMSNorm family against vLLM's own classes on awkward rows: zero, 1e-20, huge, infinite; odd widths."""

import json

import numpy as np
import pytest
from safetensors.numpy import load_file

from muse_jax.reference import gain_center, rms_norm, rms_norm_residual
from muse_jax.reference.rounding import BFLOAT16, FLOAT32, FLOAT64, widen
from tests.golden import DATA
from tests.reference.checks import ulps

META = json.loads((DATA / "vllm-tiny/vllm_norms.json").read_text())
TENSORS = load_file(DATA / "vllm-tiny/vllm_norms.safetensors")
DTYPES = {"bf16": BFLOAT16, "f32": FLOAT32, None: None}


def run_case(name, **changed):
    """(ours, golden) of a case: its output, and its new residual where it has one."""
    case, x = META["cases"][name], TENSORS[f"{name}.x"]
    options = {
        "eps": case["eps"],
        "gain_center": case["fused_gain_center"],
        "gain_first": case["applies_weight_before_norm"],
        "variance_width": case["variance_size_override"],
        "out_dtype": DTYPES[case["out_dtype_argument"]],
    } | changed
    weight = TENSORS[f"{name}.weight"] if case["has_weight"] else None
    if not case["residual"]:
        return [(rms_norm(x, weight, **options), TENSORS[f"{name}.out"])]
    out, residual = rms_norm_residual(x, TENSORS[f"{name}.residual"], weight, **options)
    return [(out, TENSORS[f"{name}.out"]), (residual, TENSORS[f"{name}.residual_out"])]


def is_golden(pairs):
    """float32 within 4 ulp: a rounding each for the mean, the root, and two products. bfloat16 equal at 99.9 %."""
    return all(
        ours.dtype == golden.dtype
        and np.array_equal(np.isnan(widen(ours)), np.isnan(widen(golden)))
        and (ulps(ours, golden).max() <= 4 if golden.dtype == FLOAT32 else np.mean(ulps(ours, golden) == 0) >= 0.999)
        for ours, golden in pairs
    )


@pytest.mark.parametrize("name", META["cases"])
def test_cases(name):
    assert is_golden(run_case(name))


BROKEN = {
    "gain on the wrong side": (lambda case: {"gain_first": not case["applies_weight_before_norm"]}, "h96.bf16_f32"),
    "centre off": (lambda case: {"gain_center": case["fused_gain_center"] + 1e-6}, "h96.f32_f32"),
    "eps off": (lambda case: {"eps": case["eps"] * 2}, "h96.bf16_f32"),
    "variance over all columns": (lambda case: {"variance_width": None}, "variance_override"),
    "no overflow": (lambda case: {"arithmetic": FLOAT64}, "overflow"),
}


@pytest.mark.parametrize("name", BROKEN)
def test_broken_norms_fail(name):
    change, cases = BROKEN[name]
    names = [c for c in META["cases"] if cases in c and "weightless" not in c]
    assert names
    assert not any(is_golden(run_case(c, **change(META["cases"][c]))) for c in names)


def test_centre_is_rounded_to_float32_before_it_is_added():
    weight = np.full(4, -1 / np.sqrt(12), np.float32)
    out = rms_norm(np.ones((1, 4), np.float32), weight, eps=1e-5, gain_center=1 / np.sqrt(12))
    np.testing.assert_array_equal(out, np.zeros((1, 4), np.float32))


@pytest.mark.parametrize("key, centre", META["gain_centers_n_layers_62"].items())
def test_gain_centers(key, centre):
    kind, residual_id = key.split(":")
    assert gain_center(kind, residual_id=int(residual_id), num_layers=62) == centre


ERRORS = {
    "plain_wrong_width": (
        lambda x, w: rms_norm(x[:, :95], w, eps=1e-5),
        r"weight is \(96,\) and x has 95 columns; expected one gain a column, \(95,\)",
    ),
    "plain_override_too_wide": (
        lambda x, w: rms_norm(x, w, eps=1e-5, variance_width=97),
        "variance_width is 97; expected 1 to the width of x, 96",
    ),
    "input_scaled_wrong_width": (
        lambda x, w: rms_norm(x[:, :95], w, eps=1e-5, gain_first=True),
        "x has 95 columns",
    ),
    "unknown_type": (lambda x, w: gain_center("x", residual_id=1), "gain centre is 'x'; expected one of one, zero"),
    "inverse_sqrt_layers_without_n": (
        lambda x, w: gain_center("inverse_sqrt_layers", residual_id=1),
        "num_layers is None; gain centre 'inverse_sqrt_layers' needs the number of decoder layers",
    ),
    "output_type_inverse_residual_index": (
        lambda x, w: gain_center("inverse_residual_index", residual_id=-1),
        "residual_id is -1; gain centre 'inverse_residual_index' counts residual branches from 1",
    ),
    "output_type_v2": (
        lambda x, w: gain_center("inverse_residual_index_v2", residual_id=-1),
        "residual_id is -1; gain centre 'inverse_residual_index_v2'",
    ),
}


@pytest.mark.parametrize("name", META["errors"])
def test_what_vllm_refuses_is_refused(name):
    call, message = ERRORS[name]
    with pytest.raises(ValueError, match=message):
        call(np.ones((2, 96), np.float32), np.zeros(96, np.float32))


def test_residual_of_another_shape():
    with pytest.raises(ValueError, match=r"residual is \(1, 4\); expected the shape of x, \(2, 4\)"):
        rms_norm_residual(np.ones((2, 4)), np.ones((1, 4)), eps=1e-5)


def test_zero_tokens_and_zero_rows():
    assert rms_norm(np.zeros((0, 5), np.float32), np.zeros(5), eps=1e-8).shape == (0, 5)
    np.testing.assert_array_equal(rms_norm(np.zeros((2, 5)), np.ones(5), eps=1e-8, gain_first=True), np.zeros((2, 5)))
