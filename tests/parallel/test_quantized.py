"""Quantized experts over a mesh: the codes and products of one device, or of the truth with as many ranks."""

from functools import cache

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from jax.sharding import AxisType

from muse_jax.checkpoint import QuantizedWeight, load_layer, small_config
from muse_jax.checkpoint.convert import convert_checkpoint
from muse_jax.checkpoint.restore import restore_layer
from muse_jax.checkpoint.synthetic import random_layer
from muse_jax.config import MuseConfig
from muse_jax.dump import block_settings
from muse_jax.moe import MuseMoE
from muse_jax.parallel import ShardedMoE
from muse_jax.quantization import quantize_fp8, quantize_mxfp4
from muse_jax.reference import run_block
from muse_jax.schedule import Schedule
from muse_jax.sharding import BlockMesh
from tests.checkpoint.build import QUARK_FP8, QUARK_MXFP4
from tests.parallel.cases import FLOAT32, make_mesh, tokens
from tests.reference.checks import row_errors

CONFIG = small_config(model_width=32, latent_width=128, expert_width=256, num_experts=9, routes_per_token=3)
CHUNKED = Schedule(chunk_elements=16 * 3 * 128, scatter_min_tokens=8)
COUNT = 38  # two chunks whose rows are scattered and one whose rows are all-reduced
# Row by row; the sums over tp and ep are float32 and in another order.
F32 = 2e-6
MESHES = {
    "mxfp4": [(1, 1, 8), (2, 2, 2)],
    "fp8": [(2, 4, 1)],
    "fp8_block": [(2, 2, 2)],
}
CASES = [(form, shape) for form, shapes in MESHES.items() for shape in shapes]


def blocks_fp8(weight: np.ndarray) -> QuantizedWeight:
    """Codes with scales of blocks that differ from each other: of other numbers than weight, and as good."""
    values = quantize_fp8(weight).to_host().values
    experts, rows, columns = values.shape
    scales = np.random.default_rng(0).uniform(1, 2, (experts, rows // 128, columns // 128)) * 2.0**-12
    return QuantizedWeight(values=values, scales=scales.astype(np.float32), format="fp8")


QUANTIZE = {
    "mxfp4": lambda weight: quantize_mxfp4(weight).to_host(),
    "fp8": lambda weight: quantize_fp8(weight).to_host(),
    "fp8_block": blocks_fp8,
}


@cache
def weights(form):
    layer = random_layer(CONFIG, 0, seed=3, dtype="float32")
    return layer | {name: QUANTIZE[form](layer[name]) for name in ("gate_up", "down")}


@cache
def expected(form, rule=None):
    block = MuseMoE.from_weights(CONFIG, weights(form), dtype=FLOAT32, activation_rule=rule, implementation="xla")
    return np.asarray(nnx.jit(lambda block, x: block(x))(block, tokens(COUNT, FLOAT32, CONFIG)))


def over(form, shape, rule=None, implementation="xla", kind=AxisType.Explicit):
    block = ShardedMoE.from_weights(
        CONFIG,
        weights(form),
        make_mesh(shape, kind=kind),
        dtype=FLOAT32,
        schedule=CHUNKED,
        activation_rule=rule,
        implementation=implementation,
    )
    return np.asarray(nnx.jit(lambda block, x: block(x))(block, jnp.asarray(tokens(COUNT, FLOAT32, CONFIG))))


@pytest.mark.parametrize("form, shape", CASES)
def test_float32_equals_one_device(form, shape):
    assert np.max(row_errors(over(form, shape), expected(form))) < F32


@pytest.mark.parametrize("form, rule", [("mxfp4", "w4a16"), ("fp8", None)])
def test_kernels_and_other_rules(form, rule):
    """Interpreted, over Auto axes, against XLA on one device; weights alone quantized where there is a choice."""
    ours = over(form, (1, 2, 2 if form == "mxfp4" else 1), rule, "pallas", AxisType.Auto)
    assert np.max(row_errors(ours, expected(form, rule))) < F32


def relative_error(a, b):
    a, b = np.asarray(a, np.float64), np.asarray(b, np.float64)
    return np.linalg.norm(a - b) / np.linalg.norm(b)


@pytest.mark.parametrize("folder, shape", [(QUARK_FP8, (1, 2, 4)), (QUARK_MXFP4, (1, 2, 3))])
def test_bfloat16_rounds_as_ranks_do(folder, shape):
    """Quark's layers straight from their files: FP8 rows are quantized on each rank of tp, as the truth's ranks do.

    A sum in another order moves a value over a rounding boundary now and then, and a code with it.
    """
    config = MuseConfig.from_checkpoint(folder)
    x = tokens(24, np.dtype(jnp.bfloat16), config)
    block = ShardedMoE.from_checkpoint(folder, 1, make_mesh(shape), implementation="xla")
    ours = nnx.jit(lambda block, x: block.boundaries(x))(block, jnp.asarray(x))
    truth = {
        ranks: run_block(load_layer(folder, 1), x, block_settings(config), "vllm", ep=shape[1], tp=ranks)
        for ranks in (1, shape[2])
    }
    error = {ranks: relative_error(ours["combined"], found["combined"]) for ranks, found in truth.items()}
    assert error[shape[2]] < 3e-3
    assert error[1] > 2e-2 if folder == QUARK_FP8 else error[1] < 6e-3


def test_a_converted_layer_runs_on_a_mesh(tmp_path):
    convert_checkpoint(QUARK_MXFP4, tmp_path / "out", layers=[2])
    config, mesh = MuseConfig.from_checkpoint(tmp_path / "out"), BlockMesh(mesh=make_mesh((1, 2, 3)))
    x = jnp.asarray(tokens(5, np.dtype(jnp.bfloat16), config))
    restored = ShardedMoE(config, restore_layer(tmp_path / "out", 2, mesh), mesh)
    loaded = ShardedMoE.from_checkpoint(QUARK_MXFP4, 2, mesh)
    np.testing.assert_array_equal(*(nnx.jit(lambda block, x: block(x))(block, x) for block in (restored, loaded)))
    assert jax.tree.structure(restored.weights()) == jax.tree.structure(loaded.weights())


def test_what_does_not_fit_is_refused():
    mesh, layer = make_mesh((2,), ("ep",)), weights("mxfp4")
    with pytest.raises(ValueError, match="gate_up and down are mxfp4 and fp8; expected one format"):
        ShardedMoE.from_weights(CONFIG, layer | {"down": weights("fp8")["down"]}, mesh)
    with pytest.raises(ValueError, match="activation_rule is 'even' and the experts are fp8; only MXFP4 experts"):
        ShardedMoE.from_weights(CONFIG, weights("fp8"), mesh, activation_rule="even")
