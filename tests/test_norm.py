"""The JAX norm family on the golden cases of vLLM's classes, by the check that the numpy truth passes too."""

import jax.numpy as jnp
import numpy as np
import pytest

from muse_jax.norm import gain_center, rms_norm, rms_norm_residual
from tests.reference.test_norm import META, TENSORS, is_golden

DTYPES = {"bf16": jnp.bfloat16, "f32": jnp.float32, None: None}


def run_case(name, **changed):
    """(ours, golden) of a case: its output, and its new residual where it has one."""
    case, x = META["cases"][name], jnp.asarray(TENSORS[f"{name}.x"])
    options = {
        "eps": case["eps"],
        "gain_center": case["fused_gain_center"],
        "gain_first": case["applies_weight_before_norm"],
        "variance_width": case["variance_size_override"],
        "out_dtype": DTYPES[case["out_dtype_argument"]],
    } | changed
    weight = jnp.asarray(TENSORS[f"{name}.weight"]) if case["has_weight"] else None
    if not case["residual"]:
        return [(np.asarray(rms_norm(x, weight, **options)), TENSORS[f"{name}.out"])]
    out, residual = rms_norm_residual(x, jnp.asarray(TENSORS[f"{name}.residual"]), weight, **options)
    return [(np.asarray(out), TENSORS[f"{name}.out"]), (np.asarray(residual), TENSORS[f"{name}.residual_out"])]


@pytest.mark.parametrize("name", META["cases"])
def test_cases(name):
    assert is_golden(run_case(name))


@pytest.mark.parametrize(
    "cases, change",
    [
        ("h96.bf16_f32", {"eps": 1e-4}),
        ("input_scaled.h200", {"gain_first": False}),
        ("h64.f32_f32", {"gain_center": 0.5}),
    ],
)
def test_broken_norms_fail(cases, change):
    names = [name for name in META["cases"] if cases in name and META["cases"][name]["has_weight"]]
    assert names
    assert not any(is_golden(run_case(name, **change)) for name in names)


@pytest.mark.parametrize("key, centre", META["gain_centers_n_layers_62"].items())
def test_gain_centers(key, centre):
    kind, residual_id = key.split(":")
    assert gain_center(kind, residual_id=int(residual_id), num_layers=62) == centre


def test_what_vllm_refuses_is_refused():
    x, w = jnp.ones((2, 96)), jnp.zeros(96)
    calls = {
        "plain_wrong_width": lambda: rms_norm(x[:, :95], w, eps=1e-5),
        "plain_override_too_wide": lambda: rms_norm(x, w, eps=1e-5, variance_width=97),
        "input_scaled_wrong_width": lambda: rms_norm(x[:, :95], w, eps=1e-5, gain_first=True),
        "unknown_type": lambda: gain_center("x", residual_id=1),
        "inverse_sqrt_layers_without_n": lambda: gain_center("inverse_sqrt_layers", residual_id=1),
        "output_type_inverse_residual_index": lambda: gain_center("inverse_residual_index", residual_id=-1),
        "output_type_v2": lambda: gain_center("inverse_residual_index_v2", residual_id=-1),
    }
    assert set(calls) == set(META["errors"])
    for call in calls.values():
        with pytest.raises(ValueError, match=r"expected|needs|divides"):
            call()


def test_no_rows():
    assert rms_norm(jnp.zeros((0, 8)), jnp.zeros(8), eps=1e-5).shape == (0, 8)
