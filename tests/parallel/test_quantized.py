"""Quantized experts over a mesh: the codes of one device, and rows that differ from the truth by float32 sums alone."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from jax.sharding import AxisType

from muse_jax import parallel
from muse_jax.checkpoint import load_layer
from muse_jax.config import MuseConfig
from muse_jax.dump import block_settings
from muse_jax.moe import MuseMoE
from muse_jax.parallel import ShardedMoE
from muse_jax.quantization import QuantizedArray
from muse_jax.reference import run_block
from muse_jax.sharding import BlockMesh, place_weights
from tests.checkpoint.build import QUARK_FP8, QUARK_MXFP4
from tests.parallel import hlo
from tests.parallel.cases import BFLOAT16, FLOAT32, MESHES, make_mesh, relative_error, rounding_bound, tokens
from tests.parallel.quantized_cases import (
    compile_run,
    compiled,
    config_of,
    one_device,
    schedule_of,
    sharded,
    truth,
    weights,
)
from tests.parallel.test_communication import predicted
from tests.quark import LAYER, quark_run
from tests.reference.checks import row_errors

FP8 = config_of("fp8", 1)
# Row by row; sums over tp and ep, and those of each product, are float32.
F32 = 2e-6
# A part of `tests.parallel.quantized_grid`: every mesh, those with tp by FP8 at one count and MXFP4 at the other; every
# count; every format.
GRID = [
    *((("fp8", "even")[n % 2], shape, 7) for n, shape in enumerate(MESHES)),
    *((("even", "fp8")[n % 2], shape, 256) for n, shape in enumerate(MESHES) if shape[2] > 1),
    *((form, (2, 2, 2), 0) for form in ("fp8", "even")),
    *(("fp8", (1, 2, 4), 1100), ("fp8_block", (2, 2, 2), 255)),
    *(("fp8_static", (1, 4, 2), 1), ("rceil", (1, 2, 4), 255), ("w4a16", (2, 2, 2), 1)),
]


@pytest.mark.parametrize("form, shape, count", GRID)
def test_float32_is_the_truth(form, shape, count):
    config = config_of(form, shape[2])
    x, expected = truth(form, count, config)
    out = compiled(form, shape, count)(sharded(form, shape).weights(), jnp.asarray(x))["out"]
    assert out.shape == (count, config.model_width)
    assert np.max(row_errors(np.asarray(out), expected), initial=0) < F32
    for part in out.addressable_shards:
        np.testing.assert_array_equal(part.data, np.asarray(out)[part.index])


@pytest.mark.parametrize("shape", [(1, 1, 8), (1, 8, 1), (2, 2, 2)])
@pytest.mark.parametrize("form", ["fp8", "even", "w4a16"])
def test_bfloat16_adds_the_roundings_of_ranks(form, shape):
    config = config_of(form, shape[2])
    block, x = sharded(form, shape, BFLOAT16), tokens(255, BFLOAT16, config)
    ours = compile_run(block, x, ("combined",))(block.weights(), jnp.asarray(x))["combined"]
    one = nnx.jit(lambda block, x: block.boundaries(x))(one_device(form, config, BFLOAT16), x)["combined"]
    assert relative_error(ours, one) < rounding_bound(shape, ours.size)


# --- what must not pass for the block


def scales_of_each_rank(monkeypatch):
    """An FP8 row quantized on each rank by the largest of the rank's own columns, as vLLM does."""
    monkeypatch.setattr(parallel, "_largest_over_tp", lambda *args: None)


def scales_along_the_wrong_axis(monkeypatch):
    """tp=2 with the scales of gate on one rank and those of up on the other: of the right shape on both."""
    scale_axes = parallel.scale_axes

    def broken(name, has_block_scales):
        axes = scale_axes(name, has_block_scales)
        return ("ep", "tp", None, *axes[3:]) if name == "gate_up" else axes

    monkeypatch.setattr(parallel, "scale_axes", broken)


@pytest.mark.parametrize(
    "form, variant, least",
    [
        ("fp8", scales_of_each_rank, 1e-2),
        ("fp8", scales_along_the_wrong_axis, 0.1),
        ("even", scales_along_the_wrong_axis, 0.1),
    ],
)
def test_other_scales_are_far_from_it(form, variant, least, monkeypatch):
    block = sharded(form, (1, 2, 2), kind=AxisType.Auto)  # which lets a program ask for other slices than there are
    x, expected = truth(form, 7, block.config)
    variant(monkeypatch)
    out = compile_run(block, x)(block.weights(), jnp.asarray(x))["out"]
    assert np.median(row_errors(np.asarray(out), expected)) > least


# --- how it is used


@pytest.mark.parametrize(
    "form, shape, count", [("fp8", (1, 1, 8), 7), ("fp8", (1, 2, 4), 1100), ("even", (1, 2, 4), 7)]
)
def test_collectives_are_the_predicted_ones(form, shape, count):
    """FP8 adds the maxima of all routes, once; MXFP4 nothing."""
    ours = hlo.collectives(compiled(form, shape, count).as_text())
    config = config_of(form, shape[2])
    assert ours == predicted(shape, count, config, FLOAT32, schedule_of(config), fp8_row_scales=form == "fp8")
    maxima = ("all-reduce", shape[2], (count, config.routes_per_token), "float32")
    assert ours[maxima] == (form == "fp8")


def test_kernels():
    """Interpreted, over Auto axes."""
    x, expected = truth("fp8", 7, FP8)
    mesh = make_mesh((1, 2, 2), kind=AxisType.Auto)
    block = ShardedMoE.from_weights(FP8, weights("fp8", FP8), mesh, dtype=FLOAT32, implementation="pallas")
    out = jax.jit(lambda block, x: block(x))(block, jnp.asarray(x))
    assert np.max(row_errors(np.asarray(out), expected)) < F32


def test_quarks_layer_from_its_files():
    """Each device's slices read by themselves: every boundary of Quark's MXFP4 layer, as on one device."""
    golden = quark_run("mxfp4_even")
    block = ShardedMoE.from_checkpoint(QUARK_MXFP4, LAYER, make_mesh((1, 2, 3)), dtype=FLOAT32)
    ours = jax.jit(lambda block, x: block.boundaries(x))(block, jnp.asarray(golden["x"], FLOAT32))
    for name, value in golden.items():
        if name == "topk_ids":
            np.testing.assert_array_equal(ours[name], value)
        else:
            assert np.max(row_errors(np.asarray(ours[name]), value)) <= F32, name


def test_bfloat16_of_quarks_layer():
    """A code that differed would show: vLLM's ranks, whose FP8 rows have scales of their own, are ten times as far."""
    shape = (1, 2, 4)
    config, layer = MuseConfig.from_checkpoint(QUARK_FP8), load_layer(QUARK_FP8, LAYER)
    x = tokens(24, BFLOAT16, config)
    block = ShardedMoE.from_weights(config, layer, make_mesh(shape))
    ours = nnx.jit(lambda block, x: block.boundaries(x))(block, jnp.asarray(x))["combined"]
    one, ranks = (
        run_block(layer, x, block_settings(config), "vllm", tp=tp, ep=ep)["combined"] for ep, tp in ((1, 1), shape[1:])
    )
    assert relative_error(ours, one) < rounding_bound(shape, one.size)
    assert relative_error(ranks, one) > 2e-2


def test_what_does_not_fit_is_refused():
    mesh, fp8, mxfp4 = make_mesh((2,), ("ep",)), weights("fp8", FP8), weights("even", FP8)
    with pytest.raises(ValueError, match="gate_up and down are mxfp4 and fp8; expected one format"):
        ShardedMoE.from_weights(FP8, mxfp4 | {"down": fp8["down"]}, mesh)
    with pytest.raises(ValueError, match="activation_rule is 'even' and the experts are fp8; only MXFP4 experts"):
        ShardedMoE.from_weights(FP8, fp8, mesh, activation_rule="even")
    refusal = r"tp is 4 .* F=64, in quantization blocks of 32; tp can be 1, 2$"
    with pytest.raises(ValueError, match=refusal):
        ShardedMoE.from_weights(FP8, mxfp4, make_mesh((1, 1, 4)))
    held = place_weights(mxfp4, FP8, BlockMesh(mesh=mesh), FLOAT32)
    with pytest.raises(ValueError, match=refusal):
        ShardedMoE(FP8, held, BlockMesh(mesh=make_mesh((1, 1, 4))))
    blocks = config_of("fp8_block", 2)
    with pytest.raises(ValueError, match=r"tp is 4 .* F=256, in quantization blocks of 128; tp can be 1, 2$"):
        ShardedMoE.from_weights(blocks, weights("fp8_block", blocks), make_mesh((1, 1, 4)))


def test_weights_of_other_blocks_are_taken():
    """Those of a block of one device or of a mesh, which hold them as their kernels read them."""
    block = sharded("even", (2, 1, 2))
    config, mesh = block.config, block.mesh
    one = MuseMoE.from_weights(config, weights("even", config), dtype=FLOAT32).weights()
    for other in (ShardedMoE.from_weights(config, one, mesh, dtype=FLOAT32), ShardedMoE(config, block.weights(), mesh)):
        jax.tree.map(np.testing.assert_array_equal, other.weights(), block.weights())


def test_a_spare_expert_of_codes_is_left_out():
    """An FP8 block of one device holds one where 32-bit offsets need it."""
    layer = weights("fp8", FP8)
    spare = {}
    for name in ("gate_up", "down"):
        array = QuantizedArray.from_host(layer[name])
        spare[name] = dataclasses.replace(array, values=jnp.concatenate([array.values, array.values[:1]]))
    mesh = BlockMesh(mesh=make_mesh((1, 2, 2)))
    ours, expected = (place_weights(layer | added, FP8, mesh, FLOAT32) for added in (spare, {}))
    jax.tree.map(np.testing.assert_array_equal, ours, expected)
