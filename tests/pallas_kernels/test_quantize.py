"""Quantization of rows in JAX against the numpy truth, code by code and scale by scale."""

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from muse_jax.reference import quantized as truth
from pallas_kernels.formats import MX_RULES
from pallas_kernels.quantize import (
    dequantize_fp8_rows,
    dequantize_mxfp4_rows,
    mxfp4_planes,
    pack_e2m1,
    quantize_fp8_input,
    quantize_fp8_rows,
    quantize_mxfp4_rows,
    unpack_e2m1,
)
from tests.quark import quark_file

FLAVOURS = {"e4m3fn": "float8_e4m3fn", "e4m3fnuz": "float8_e4m3fnuz"}
MXFP4 = quark_file("mxfp4_vectors.safetensors")
CASES = sorted(name.removesuffix(".input") for name in MXFP4 if name.endswith(".input"))
FP8 = quark_file("fp8_vectors.safetensors")

mxfp4 = jax.jit(quantize_mxfp4_rows, static_argnums=1)
fp8 = jax.jit(quantize_fp8_rows, static_argnums=1, static_argnames="group")


def awkward_rows(seed=0):
    """Magnitudes from subnormal to huge, zeros of both signs, and rows with NaN and infinity among their neighbours."""
    random = np.random.default_rng(seed)
    rows = random.standard_normal((64, 128)) * np.exp2(random.integers(-140, 120, (64, 1)))
    rows[:16] = random.standard_normal((16, 128)) * np.exp2(random.integers(-6, 6, (16, 128)))
    rows[16], rows[17] = 0.0, -0.0
    rows[18, ::3] = -0.0
    rows[19, 5], rows[20, 70], rows[21, 127] = np.nan, np.inf, -np.inf
    with np.errstate(over="ignore"):
        return rows.astype(np.float32)


def assert_mxfp4(rows, rule):
    codes, scales = truth.quantize_mxfp4(rows, rule)
    packed, ours = mxfp4(jnp.asarray(rows), rule)
    np.testing.assert_array_equal(ours, scales)
    np.testing.assert_array_equal(packed, truth.pack(codes))


@pytest.mark.parametrize("case", CASES)
def test_quarks_mxfp4_vectors(case):
    packed, scales = mxfp4(MXFP4[f"{case}.input"], "even")
    np.testing.assert_array_equal(packed, MXFP4[f"{case}.codes"])
    np.testing.assert_array_equal(scales, MXFP4[f"{case}.scales"])


@pytest.mark.parametrize("dtype", ["f32", "bf16"])
@pytest.mark.parametrize("flavour", FLAVOURS)
def test_fp8_vectors(flavour, dtype):
    name = f"act.{flavour.removeprefix('e4m3')}.{dtype}."
    codes, scales = fp8(FP8[name + "input"], flavour)
    assert codes.dtype == FLAVOURS[flavour]
    np.testing.assert_array_equal(np.asarray(codes).view(np.uint8), FP8[name + "codes"])
    np.testing.assert_array_equal(scales, FP8[name + "scale"])


@pytest.mark.parametrize("rule", MX_RULES)
@pytest.mark.parametrize("dtype", [np.float32, ml_dtypes.bfloat16])
def test_awkward_rows_in_mxfp4(rule, dtype):
    assert_mxfp4(awkward_rows().astype(dtype), rule)


@pytest.mark.parametrize("rule", MX_RULES)
@settings(max_examples=25, deadline=None)
@given(bits=st.lists(st.integers(0, 2**32 - 1), min_size=32, max_size=32))
def test_any_block_in_mxfp4(rule, bits):
    assert_mxfp4(np.array([bits], np.uint32).view(np.float32), rule)


@pytest.mark.parametrize("rule", MX_RULES)
def test_every_exponent_and_mantissa_step_of_the_maximum(rule):
    """Maxima around 1, 1.5, 1.75 and 2 times every power of two, and one element of each octave below."""
    steps = np.float32([1, 1.5, 1.75, np.nextafter(np.float32(2), np.float32(1))])
    steps = np.concatenate([np.nextafter(steps, np.float32(0)), steps, np.nextafter(steps, np.float32(4))])
    with np.errstate(over="ignore"):
        largest = np.ldexp(steps[None], np.arange(-150, 128)[:, None]).astype(np.float32).reshape(-1)
    rows = np.zeros((len(largest), 32), np.float32)
    rows[:, :28] = largest[:, None] * np.exp2(-np.arange(28) / 4).astype(np.float32)
    assert_mxfp4(rows, rule)


@pytest.mark.parametrize("group", [None, 32])
@pytest.mark.parametrize("flavour", FLAVOURS)
def test_awkward_rows_in_fp8(flavour, group):
    rows = awkward_rows()
    codes, scales = truth.quantize_fp8(rows, FLAVOURS[flavour], group=group)
    ours, our_scales = fp8(rows, flavour, group=group)
    np.testing.assert_array_equal(our_scales, scales)
    np.testing.assert_array_equal(np.asarray(ours).view(np.uint8), codes)


def test_dequantized_values():
    rows = awkward_rows()
    for flavour, name in FLAVOURS.items():
        for group in (None, 32):
            codes, scales = fp8(rows, flavour, group=group)
            expected = truth.dequantize_fp8(np.asarray(codes).view(np.uint8), np.asarray(scales), name)
            np.testing.assert_array_equal(dequantize_fp8_rows(codes, scales), expected.astype(np.float32))
    packed, scales = mxfp4(awkward_rows()[:16], "even")
    expected = truth.dequantize_mxfp4(truth.unpack(np.asarray(packed)), np.asarray(scales))
    np.testing.assert_array_equal(dequantize_mxfp4_rows(packed, scales), expected.astype(np.float32))


def test_both_flavours_stand_for_the_same_numbers():
    rows = awkward_rows()
    fn, fnuz = (dequantize_fp8_rows(*fp8(rows, flavour)) for flavour in FLAVOURS)
    np.testing.assert_array_equal(fn, fnuz)


@pytest.mark.parametrize("shape", [(0, 64), (3, 0, 32), (2, 3, 4, 64)])
def test_any_leading_axes(shape):
    rows = np.random.default_rng(0).standard_normal(shape).astype(np.float32)
    packed, scales = mxfp4(rows, "even")
    assert (packed.shape, scales.shape) == ((*shape[:-1], shape[-1] // 2), (*shape[:-1], shape[-1] // 32))
    codes, scales = fp8(rows, "e4m3fn")
    assert (codes.shape, scales.shape) == (shape, shape[:-1])


def test_packing_has_the_even_column_in_the_low_bits():
    codes = jnp.arange(16)[None]
    assert pack_e2m1(codes)[0, :3].tolist() == [0x10, 0x32, 0x54]
    np.testing.assert_array_equal(unpack_e2m1(pack_e2m1(codes)), codes)


@pytest.mark.parametrize(
    "call, message",
    [
        (lambda x: quantize_mxfp4_rows(x), "x has 48 columns; MXFP4 needs a multiple of 32"),
        (lambda x: quantize_mxfp4_rows(x[:, :32], "up"), "rule is 'up'"),
        (lambda x: quantize_fp8_rows(x, "e5m2"), "flavour is 'e5m2'; expected one of e4m3fn, e4m3fnuz"),
        (lambda x: quantize_fp8_rows(x, group=32), "x has 48 columns; groups of 32 need a multiple of 32"),
    ],
)
def test_refusals(call, message):
    with pytest.raises(ValueError, match=message):
        call(jnp.zeros((1, 48)))


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("columns", [128, 160])
def test_kernels_give_the_same_codes(dtype: str, columns: int) -> None:
    """Every code, scale and number of the kernels is that of the XLA path, NaN rows and subnormal ones included."""
    x = jnp.asarray(np.resize(awkward_rows(), (64, columns)), dtype)
    for flavour in FLAVOURS:
        for group in (None, columns // 5) if columns == 160 else (None, 64):
            for kernel, wanted in zip(
                quantize_fp8_input(x, flavour, group=group, implementation="pallas"),
                fp8(x, flavour, group=group),
                strict=True,
            ):
                np.testing.assert_array_equal(np.asarray(kernel).view(np.uint8), np.asarray(wanted).view(np.uint8))
            numbers, scales = quantize_fp8_input(x, flavour, group=group, as_numbers=True, implementation="pallas")
            assert numbers.dtype == jnp.float16
            np.testing.assert_array_equal(
                dequantize_fp8_rows(numbers, scales), dequantize_fp8_rows(*fp8(x, flavour, group=group))
            )
    for rule in MX_RULES:
        planes = np.asarray(mxfp4_planes(x, rule), np.float32)
        wanted = np.asarray(dequantize_mxfp4_rows(*mxfp4(x, rule)).astype(dtype), np.float32)
        np.testing.assert_array_equal(np.moveaxis(planes, 0, 2).reshape(x.shape), wanted)


def test_kernels_refuse_what_does_not_fit() -> None:
    with pytest.raises(ValueError, match="x has 48 columns; MXFP4 needs a multiple of 32"):
        mxfp4_planes(jnp.zeros((2, 48)), "even")
    with pytest.raises(ValueError, match="rule is 'up'"):
        mxfp4_planes(jnp.zeros((2, 64)), "up")
