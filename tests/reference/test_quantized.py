"""Quantized rows by the numpy truth: Quark's vectors, edges, and what a broken quantizer would show."""

import ml_dtypes
import numpy as np
import pytest

from muse_jax.checkpoint import QuantizedWeight
from muse_jax.reference import quantized
from tests.quark import quark_file

MXFP4 = quark_file("mxfp4_vectors.safetensors")
FP8 = quark_file("fp8_vectors.safetensors")
CASES = sorted(name.removesuffix(".input") for name in MXFP4 if name.endswith(".input"))


@pytest.mark.parametrize("case", CASES)
def test_quarks_codes_and_scales(case):
    codes, scales = quantized.quantize_mxfp4(MXFP4[f"{case}.input"], "even")
    np.testing.assert_array_equal(quantized.pack(codes), MXFP4[f"{case}.codes"])
    np.testing.assert_array_equal(scales, MXFP4[f"{case}.scales"])
    np.testing.assert_array_equal(quantized.unpack(MXFP4[f"{case}.codes"]), codes)


@pytest.mark.parametrize("rule", ["floor", "rceil"])
def test_another_rule_is_not_quarks(rule):
    _, scales = quantized.quantize_mxfp4(MXFP4["normal-f32.input"], rule)
    assert 0.05 < np.mean(scales != MXFP4["normal-f32.scales"]) < 0.3


@pytest.mark.parametrize("dtype", ["f32", "bf16"])
@pytest.mark.parametrize("kind, flavour", [("fn", "float8_e4m3fn"), ("fnuz", "float8_e4m3fnuz")])
def test_activation_vectors(kind, flavour, dtype):
    name = f"act.{kind}.{dtype}."
    codes, scales = quantized.quantize_fp8(FP8[name + "input"], flavour)
    np.testing.assert_array_equal(codes, FP8[name + "codes"])
    np.testing.assert_array_equal(scales, FP8[name + "scale"])


def test_a_reciprocal_changes_codes():
    rows = FP8["act.fn.f32.input"]
    _, scales = quantized.quantize_fp8(rows)
    reciprocal = np.clip(rows * (np.float32(1) / scales)[:, None], -448, 448).astype(np.float64)
    assert np.any(quantized.encode_e4m3fn(reciprocal) != FP8["act.fn.f32.codes"])


@pytest.mark.parametrize("dtype", ["f32", "bf16"])
def test_both_flavours_stand_for_the_same_numbers(dtype):
    rows = FP8[f"act.fn.{dtype}.input"]
    fn = quantized.dequantize_fp8(*quantized.quantize_fp8(rows))
    fnuz = quantized.dequantize_fp8(*quantized.quantize_fp8(rows, "float8_e4m3fnuz"), "float8_e4m3fnuz")
    np.testing.assert_array_equal(fn, fnuz)
    wrong = quantized.quantize_fp8(rows, "float8_e4m3fnuz", limit=240)
    assert np.any(quantized.dequantize_fp8(*wrong, "float8_e4m3fnuz") != fn)


def test_groups_of_columns_have_their_own_scale():
    rows = np.random.default_rng(0).standard_normal((3, 256)) * np.repeat([1, 1e-3], 128)
    codes, scales = quantized.quantize_fp8(rows, group=128)
    assert scales.shape == (3, 2)
    for half in (slice(0, 128), slice(128, 256)):
        alone, own = quantized.quantize_fp8(rows[:, half])
        np.testing.assert_array_equal(codes[:, half], alone)
        np.testing.assert_array_equal(scales[:, half.start // 128], own)
    error = np.abs(quantized.dequantize_fp8(codes, scales) - rows)
    assert np.all(error[:, 128:] < 1e-3 * 4 / 16)  # half a unit of 3 mantissa bits


@pytest.mark.parametrize(
    "rule, largest, byte",
    [
        *[("even", 1.75 * 2.0**k, k + 126) for k in (-100, 0, 100)],
        *[("even", np.nextafter(np.float32(1.75), np.float32(0)), 125), ("even", 1.0, 125)],
        *[("floor", 1.9999999 * 2.0**k, k + 125) for k in (-100, 0, 100)],
        *[("rceil", 1.5 * 2.0**k, k + 125) for k in (-30, 0, 100)],
        *[("rceil", np.nextafter(np.float32(1.5), np.float32(2)) * 2.0**k, k + 126) for k in (-30, 0, 100)],
        *[("even", 0.0, 1), ("floor", 0.0, 1), ("rceil", 0.0, 92), ("rceil", 1e-30, 92)],
        *[("even", 2.0**-126, 1), ("floor", 2.0**-126, 1), ("floor", 2.0**-123, 2), ("floor", 2.0**-149, 1)],
        *[("even", 1.75 * 2.0**127, 254), ("floor", 1.75 * 2.0**127, 252), ("rceil", 1.75 * 2.0**127, 253)],
        *[(rule, bad, 255) for rule in quantized.RULES for bad in (np.nan, np.inf, -np.inf)],
    ],
)
def test_scale_bytes(rule, largest, byte):
    row = np.zeros((1, 64), np.float32)
    row[0, 3], row[0, 32:] = largest, 1.0
    codes, scales = quantized.quantize_mxfp4(row, rule)
    assert scales[0, 0] == byte
    alone = quantized.quantize_mxfp4(row[:, 32:], rule)
    np.testing.assert_array_equal(scales[0, 1:], alone[1][0])  # the neighbour is what it would be by itself
    np.testing.assert_array_equal(codes[0, 32:], alone[0][0])


def test_rows_that_are_not_finite_are_nan_and_touch_no_neighbour():
    rows = np.ones((4, 64), np.float32)
    rows[1, 5], rows[2, 40] = np.nan, np.inf
    fp8 = quantized.dequantize_fp8(*quantized.quantize_fp8(rows))
    assert np.isnan(fp8[1:3]).all()
    assert np.isfinite(fp8[[0, 3]]).all()
    mxfp4 = quantized.dequantize_mxfp4(*quantized.quantize_mxfp4(rows))
    assert np.isnan(mxfp4[1, :32]).all()
    assert np.isnan(mxfp4[2, 32:]).all()
    np.testing.assert_array_equal(mxfp4[[0, 1, 2, 3], [0, 32, 0, 63]], 1.0)


def test_minus_zero_is_never_written():
    codes, _ = quantized.quantize_mxfp4(MXFP4["negative-zero.input"])
    assert not np.any(codes == 8)


@pytest.mark.parametrize("rows", [np.zeros((0, 64)), np.zeros((2, 0, 32))])
def test_no_rows(rows):
    for codes, scales in (quantized.quantize_mxfp4(rows), quantized.quantize_fp8(rows)):
        assert codes.shape == rows.shape
        assert scales.shape[: rows.ndim - 1] == rows.shape[:-1]


def test_error_of_random_weights():
    """0.112, 0.115 and 0.115: what normal weights lose under each rule (relative RMS)."""
    weights = np.random.default_rng(1).standard_normal((256, 1024))
    for rule, expected in (("even", 0.112), ("floor", 0.115), ("rceil", 0.115)):
        lost = quantized.dequantize_mxfp4(*quantized.quantize_mxfp4(weights, rule)) - weights
        assert np.sqrt(np.mean(lost**2)) == pytest.approx(expected, abs=1.5e-3), rule


def test_static_inputs_are_multiplied_by_a_reciprocal():
    rows = np.array([[3.0, 1e9, -1e9, 0.1]])
    codes, scales = quantized.quantize_fp8_static(rows, 0.5)
    np.testing.assert_array_equal(quantized.dequantize_fp8(codes, scales), [[3.0, 224.0, -224.0, 0.1015625]])


@pytest.mark.parametrize(
    "call, message",
    [
        (lambda: quantized.quantize_mxfp4(np.zeros((1, 33))), "33 columns"),
        (lambda: quantized.quantize_mxfp4(np.zeros((1, 32)), "up"), "rule is 'up'; expected one of even, floor, rceil"),
    ],
)
def test_refusals(call, message):
    with pytest.raises(ValueError, match=message):
        call()


def test_block_scales_and_cuts():
    random = np.random.default_rng(2)
    values = random.standard_normal((2, 128, 384)).astype(ml_dtypes.float8_e4m3fn)
    scales = random.uniform(1, 2, (2, 1, 3)).astype(np.float32)
    weight = QuantizedWeight(values=values, scales=scales, format="fp8")
    whole = quantized.expert_of(weight, 1)
    np.testing.assert_array_equal(whole[:, 200], values[1, :, 200].astype(np.float64) * scales[1, 0, 1])
    part = quantized.columns(weight, slice(128, 384))
    np.testing.assert_array_equal(quantized.expert_of(part, 1), whole[:, 128:])
    with pytest.raises(ValueError, match="split a block of 128"):
        quantized.columns(weight, slice(0, 64))
