"""QuantizedArray: what it stands for, that it is a pytree, shards, saves and restores, and what it refuses."""

import dataclasses

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import orbax.checkpoint as ocp
import pytest
from jax.sharding import PartitionSpec

from muse_jax.checkpoint import QuantizedWeight
from muse_jax.quantization import QuantizedArray, inputs, quantize_experts_mxfp4, quantize_fp8, quantize_mxfp4
from muse_jax.quantization import mxfp4 as mxfp4_module
from muse_jax.quantization.inputs import check_scales
from muse_jax.reference import quantized as truth
from tests.quark import EXPERTS, quark_file, quark_weights

FP8 = quark_file("fp8_vectors.safetensors")
CASES = ["log_uniform", "normal", "outlier", "rows_wide", "ties", "zero_rows"]
FLAVOURS = {"e4m3fn": "float8_e4m3fn", "e4m3fnuz": "float8_e4m3fnuz"}


def weight(shape=(5, 24, 64), seed=0):
    random = np.random.default_rng(seed)
    values = random.standard_normal(shape) * np.exp2(random.integers(-20, 20, (*shape[:-1], 1)))
    return values.astype(ml_dtypes.bfloat16)


def block_weight(seed=0):
    random = np.random.default_rng(seed)
    values = random.standard_normal((2, 256, 384)).astype(ml_dtypes.float8_e4m3fn)
    scales = random.uniform(0.5, 2, (2, 2, 3)).astype(np.float32)
    return QuantizedWeight(values=values, scales=scales, format="fp8")


def assert_same(ours, expected):
    assert (ours.format, ours.values.dtype) == (expected.format, expected.values.dtype)
    for name in ("values", "scales"):
        a, b = np.asarray(getattr(ours, name)), np.asarray(getattr(expected, name))
        np.testing.assert_array_equal(a.view(np.uint8), b.view(np.uint8), err_msg=name)


@pytest.mark.parametrize("form", ["fp8", "mxfp4"])
@pytest.mark.parametrize("name", ["gate_up", "down"])
def test_quarks_weights_stand_for_the_same_numbers(form, name):
    host = quark_weights(form)[name]
    array = QuantizedArray.from_host(host)
    assert array.shape == host.shape
    dense = array.dequantize()
    for expert in range(EXPERTS):
        np.testing.assert_array_equal(dense[expert], truth.expert_of(host, expert).astype(np.float32))
    assert_same(array.to_host(), host)


def test_block_scales():
    host = block_weight()
    array = QuantizedArray.from_host(host)
    assert array.has_block_scales
    np.testing.assert_array_equal(array.dequantize()[1], truth.expert_of(host, 1).astype(np.float32))


@pytest.mark.parametrize("case", CASES)
def test_fp8_is_quarks_for_float32_weights(case):
    prefix = f"weight.f32.{case}."
    ours = quantize_fp8(FP8[prefix + "input"])
    np.testing.assert_array_equal(ours.scales, FP8[prefix + "scale"])
    np.testing.assert_array_equal(np.asarray(ours.values).view(np.uint8), FP8[prefix + "codes"])


@pytest.mark.parametrize("case", CASES)
def test_fp8_of_bfloat16_weights_is_nearer_than_quarks(case):
    """Quark divides them in bfloat16; the scales it stores are the same."""
    prefix = f"weight.bf16.{case}."
    rows, codes, scales = (FP8[prefix + part] for part in ("input", "codes", "scale"))
    ours = quantize_fp8(rows.astype(ml_dtypes.bfloat16))
    np.testing.assert_array_equal(ours.scales, scales)
    assert np.mean(np.asarray(ours.values).view(np.uint8) != codes) < 0.05
    ours_lost = np.abs(np.asarray(ours.dequantize(), np.float64) - rows)
    assert np.all(ours_lost <= np.abs(truth.dequantize_fp8(codes, scales) - rows) + 1e-6 * np.abs(rows))


def test_both_flavours_of_fp8_have_the_same_bytes_and_numbers():
    fn, fnuz = (quantize_fp8(np.abs(weight()), flavour) for flavour in FLAVOURS)
    np.testing.assert_array_equal(np.asarray(fn.values).view(np.uint8), np.asarray(fnuz.values).view(np.uint8))
    np.testing.assert_array_equal(fnuz.scales, 2 * fn.scales)
    np.testing.assert_array_equal(fn.dequantize(), fnuz.dequantize())


@pytest.mark.parametrize("chunk", [1, 2, 3, 5, 99])
@pytest.mark.parametrize("rule", ["even", "floor", "rceil"])
def test_chunks_of_experts_give_the_same_bytes(chunk, rule):
    codes, scales = truth.quantize_mxfp4(weight(), rule)
    ours = quantize_experts_mxfp4(weight(), rule, chunk=chunk)
    assert_same(ours, quantize_mxfp4(weight(), rule))
    np.testing.assert_array_equal(ours.values, truth.pack(codes))
    np.testing.assert_array_equal(ours.scales, scales)


def test_a_lost_chunk_would_be_seen(monkeypatch):
    right = mxfp4_module._write
    monkeypatch.setattr(
        mxfp4_module, "_write", lambda v, s, part, start, rule: right(v, s, part, max(start - 1, 0), rule)
    )
    with pytest.raises(AssertionError):
        assert_same(quantize_experts_mxfp4(weight(), chunk=2), quantize_mxfp4(weight()))


def test_no_more_than_a_chunk_is_asked_for():
    class Mapping:
        def __init__(self):
            self.shape, self.asked = (7, 8, 32), []

        def __getitem__(self, cut):
            part = weight(self.shape)[cut]
            self.asked.append(len(part))
            return part

    mapping = Mapping()
    assert_same(quantize_experts_mxfp4(mapping, chunk=3), quantize_mxfp4(weight((7, 8, 32))))
    assert mapping.asked == [3, 3, 1]


def test_it_is_a_pytree():
    array = quantize_mxfp4(weight())
    assert [leaf.shape for leaf in jax.tree.leaves(array)] == [(5, 24, 32), (5, 24, 2)]
    assert_same(jax.jit(lambda a: a)(array), array)
    assert jax.jit(lambda a: a.dequantize(jnp.bfloat16))(array).dtype == jnp.bfloat16
    first = jax.tree.map(lambda leaf: leaf[0], array)
    np.testing.assert_array_equal(first.dequantize(), array.dequantize()[0])
    stacked = jax.vmap(lambda a: a.dequantize())(array)
    np.testing.assert_array_equal(stacked, array.dequantize())


@pytest.mark.parametrize("make", [quantize_mxfp4, quantize_fp8, lambda _: QuantizedArray.from_host(block_weight())])
def test_it_shards(make):
    array = make(weight((4, 64, 256)))
    mesh = jax.make_mesh((2, 2), ("ep", "tp"))
    for spec in (PartitionSpec("ep", "tp", None), PartitionSpec("ep")):
        shardings = array.shardings(mesh, spec)
        placed = jax.device_put(array, shardings)
        assert placed.values.sharding == shardings.values
        assert len({shard.index for shard in placed.scales.addressable_shards}) > 1
        np.testing.assert_array_equal(placed.dequantize(), array.dequantize())


def test_columns_shard_by_blocks():
    mesh = jax.make_mesh((4,), ("tp",))
    spec = PartitionSpec(None, None, "tp")
    placed = jax.device_put(
        quantize_mxfp4(weight((2, 8, 128))), quantize_mxfp4(weight((2, 8, 128))).shardings(mesh, spec)
    )
    assert placed.scales.addressable_shards[0].data.shape == (2, 8, 1)
    with pytest.raises(ValueError, match=r"96 columns, which 4 devices cannot share in blocks of 32; 1, 3 devices can"):
        quantize_mxfp4(weight((2, 8, 96))).shardings(mesh, spec)
    with pytest.raises(
        ValueError, match=r"384 columns, which 4 devices cannot share in blocks of 128; 1, 3 devices can"
    ):
        QuantizedArray.from_host(block_weight()).shardings(mesh, spec)
    quantize_fp8(weight((2, 8, 96))).shardings(mesh, spec)  # row scales do not care


@pytest.mark.parametrize("make", [quantize_mxfp4, quantize_fp8])
def test_it_saves_and_restores(make, tmp_path):
    array = make(weight())
    with ocp.StandardCheckpointer() as checkpointer:
        checkpointer.save(tmp_path / "array", array)
        checkpointer.wait_until_finished()
        restored = checkpointer.restore(tmp_path / "array", jax.eval_shape(lambda: array))
    assert isinstance(restored, QuantizedArray)
    assert_same(restored, array)


ARRAY = quantize_mxfp4(weight())


@pytest.mark.parametrize(
    "call, message",
    [
        (lambda: dataclasses.replace(ARRAY, format="int4").check(), "format is 'int4'"),
        (lambda: dataclasses.replace(ARRAY, scales=ARRAY.scales[:, 1:]).check(), r"uint8 \(5, 23, 2\); mxfp4 values"),
        (lambda: dataclasses.replace(ARRAY, format="fp8").check(), "values are uint8"),
        (lambda: quantize_mxfp4(weight((2, 3, 40))), "40 columns; MXFP4 needs a multiple of 32"),
        (lambda: quantize_experts_mxfp4(weight((2, 3, 40))), "40 columns; MXFP4 needs a multiple of 32"),
        (lambda: quantize_experts_mxfp4(weight(), chunk=0), "chunk is 0"),
        (lambda: quantize_experts_mxfp4(weight()[0]), r"weight is \(24, 64\); expected \[E, out, in\]"),
        (lambda: quantize_fp8(weight(), "e5m2"), "flavour is 'e5m2'"),
        (
            lambda: QuantizedWeight(
                values=np.zeros((1, 2, 8), np.uint8), scales=np.zeros((1, 2, 1), np.uint8), format="mxfp4"
            ),
            "scales are uint8",
        ),
        (
            lambda: QuantizedWeight(values=np.zeros((1, 2, 8)), scales=np.zeros((1, 2), np.float32), format="fp8"),
            "values are float64",
        ),
    ],
)
def test_refusals(call, message):
    with pytest.raises(ValueError, match=message):
        call()


@pytest.mark.parametrize("byte, fits", [(128, True), (129, False), (254, False), (255, True)])
@pytest.mark.parametrize("is_held", [False, True])
def test_scales_that_nvidias_kernels_overflow_with_are_refused(byte, fits, is_held, monkeypatch):
    scales = jnp.full((1, 2, 1), byte, jnp.uint8)
    weight = QuantizedArray(values=jnp.zeros((1, 2, 16), jnp.uint8), scales=scales, format="mxfp4")
    weight = weight.held() if is_held else weight
    check_scales("down", weight, jnp.bfloat16, "pallas")  # no NVIDIA GPU here
    monkeypatch.setattr(inputs, "on_nvidia", lambda: True)
    check_scales("down", weight, jnp.float32, "pallas")
    check_scales("down", weight, jnp.bfloat16, "xla")
    if fits:
        check_scales("down", weight, jnp.bfloat16, "pallas")
    else:
        with pytest.raises(ValueError, match="down has MXFP4 block scales of 4 or more, which overflow"):
            check_scales("down", weight, jnp.bfloat16, "pallas")
