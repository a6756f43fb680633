"""FP8 for gfx942: other bytes and scales, the same numbers, products with activations included."""

import dataclasses

import ml_dtypes
import numpy as np
import pytest

from muse_jax.checkpoint import QuantizedWeight, to_fnuz
from muse_jax.quantization import QuantizedArray
from muse_jax.reference import PROFILES, block, quantized, run_block
from tests.quark import EXPERTS, quark_file, quark_run, quark_settings, quark_weights

VECTORS = quark_file("fp8_vectors.safetensors")
FNUZ = ml_dtypes.float8_e4m3fnuz


def every_byte():
    values = np.arange(256, dtype=np.uint8).view(ml_dtypes.float8_e4m3fn).reshape(2, 2, 64)
    scales = np.float32([[1, 0.125], [3.7, 1e30]])
    return QuantizedWeight(values=values, scales=scales, format="fp8")


def test_the_table_of_bytes():
    ours = to_fnuz(every_byte()).values.reshape(-1).view(np.uint8)
    np.testing.assert_array_equal(ours, VECTORS["convert.exact_byte"])
    assert [(byte, ours[byte]) for byte in np.nonzero(ours != VECTORS["convert.fn_byte"])[0]] == [
        (0x7F, 0x80),
        (0x80, 0),
        (0xFF, 0x80),
    ]


def test_every_byte_stands_for_the_same_number():
    weight = every_byte()
    other = to_fnuz(weight)
    assert other.values.dtype == FNUZ
    for expert in range(2):
        np.testing.assert_array_equal(quantized.expert_of(other, expert), quantized.expert_of(weight, expert))
    fn, fnuz = (QuantizedArray.from_host(w).dequantize() for w in (weight, other))
    np.testing.assert_array_equal(fn, fnuz)


@pytest.mark.parametrize("name", ["gate_up", "down"])
def test_quarks_weights(name):
    weight = quark_weights("fp8")[name]
    other = to_fnuz(weight)
    for expert in range(EXPERTS):
        np.testing.assert_array_equal(quantized.expert_of(other, expert), quantized.expert_of(weight, expert))
    assert to_fnuz(other) is other


@pytest.mark.parametrize("profile", ["exact", "vllm"])
def test_the_whole_block_is_the_same_on_both_chips(profile):
    """Inputs quantized with limit 448 in e4m3fn here, 224 in e4m3fnuz there."""
    weights = quark_weights("fp8")
    other = weights | {name: to_fnuz(weights[name]) for name in ("gate_up", "down")}
    x = quark_run("fp8")["x"]
    ours, theirs = (run_block(w, x, quark_settings(), profile) for w in (weights, other))
    for name in ours:
        np.testing.assert_array_equal(ours[name], theirs[name], err_msg=name)


def test_static_inputs_and_block_scales_are_the_same_on_both_chips():
    random = np.random.default_rng(0)
    values = random.standard_normal((2, 256, 128)).astype(ml_dtypes.float8_e4m3fn)
    x, ids = random.standard_normal((5, 128)).astype(np.float32), random.integers(0, 2, (5, 1))
    for scales, input_scale in (((2, 256), 0.01), ((2, 2, 1), None)):
        scales = random.uniform(0.1, 1, scales).astype(np.float32)
        weight = QuantizedWeight(values=values, scales=scales, format="fp8", input_scale=input_scale)
        ours, theirs = (block.activation(x, ids, w, PROFILES["exact"]) for w in (weight, to_fnuz(weight)))
        np.testing.assert_array_equal(ours, theirs)
        assert np.any(ours != 0)


def test_a_plain_reading_of_the_bytes_would_be_seen():
    weight = every_byte()
    wrong = dataclasses.replace(weight, values=weight.values.view(FNUZ), scales=weight.scales * 2)
    with pytest.raises(AssertionError):
        np.testing.assert_array_equal(quantized.expert_of(wrong, 1), quantized.expert_of(weight, 1))


def test_what_is_no_fp8_stays_and_what_overflows_is_refused():
    weight = quark_weights("mxfp4")["down"]
    assert to_fnuz(weight) is weight
    with pytest.raises(ValueError, match=r"a scale is 3e\+38; doubled for fnuz it is beyond float32"):
        to_fnuz(dataclasses.replace(every_byte(), scales=np.full((2, 2), 3e38, np.float32)))
