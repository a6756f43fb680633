"""The block's modules, by each implementation, against other frameworks' tensors and the numpy truth."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from muse_jax.checkpoint import load_layer, small_config
from muse_jax.config import MuseConfig
from muse_jax.moe import MuseMoE, MuseRouter
from muse_jax.reference import run_block
from tests.golden import HF_F32, LAYERS, VLLM_BF16, golden_checkpoint, golden_settings, golden_tensors
from tests.reference.checks import Limits, faults, row_errors

CONFIG = MuseConfig.from_checkpoint(golden_checkpoint())
# float32: the bound of the numpy truth's own comparison (tests/reference/test_golden.py).
F32 = Limits(row_error=2e-6)
# bfloat16: a float32 sum in another order falls on the other side of a tie in under 0.1 % of a boundary's elements, and
# each moves its token's later boundaries a little.
BF16 = Limits(row_error=4e-3, equal=0.97)


def block(layer, dtype, implementation, changed=None):
    weights = load_layer(golden_checkpoint(), layer)
    if changed is not None:
        changed(weights)
    return MuseMoE.from_weights(CONFIG, weights, dtype=dtype, implementation=implementation)


@nnx.jit
def run(moe, x):
    return moe(x)


def boundaries(moe, x):
    found = nnx.jit(lambda module, x: module.boundaries(x))(moe, jnp.asarray(x))
    return {name: np.asarray(value) for name, value in found.items()}


@pytest.mark.parametrize("layer", LAYERS)
@pytest.mark.parametrize("implementation", ["xla", "pallas"])
def test_float32_is_transformers(layer, implementation):
    golden = golden_tensors(HF_F32, layer)
    ours = boundaries(block(layer, jnp.float32, implementation), golden["x"])
    assert faults(ours, golden, F32, our_ids=ours["topk_ids"]) == {}


@pytest.mark.parametrize("layer", LAYERS)
@pytest.mark.parametrize("implementation", ["xla", "pallas"])
def test_bfloat16_is_vllm(layer, implementation):
    golden = {name: value for name, value in golden_tensors(VLLM_BF16, layer).items() if "." not in name}
    ours = boundaries(block(layer, jnp.bfloat16, implementation), golden["x"])
    assert faults(ours, golden, BF16, our_ids=ours["topk_ids"], as_bfloat16=("normed_rows",)) == {}
    truth = run_block(load_layer(golden_checkpoint(), layer), golden["x"], golden_settings("hf-tiny"), "vllm")
    for name in ("latent", "expert_input", "activation", "expert_rows", "combined", "out"):
        assert row_errors(ours[name], truth[name]).max() < 4e-3, name


def swap_experts(weights):
    weights["gate_up"][[3, 4]] = weights["gate_up"][[4, 3]]


def swap_gate_and_up(weights):
    half = weights["down"].shape[2]
    weights["gate_up"] = np.concatenate([weights["gate_up"][:, half:], weights["gate_up"][:, :half]], axis=1)


def drop_bias(weights):
    weights["router_bias"][:] = 0


def drop_post_gain(weights):
    weights["post_expert_norm"][:] = 0


@pytest.mark.parametrize(
    "changed, first",
    [
        (swap_experts, "activation"),
        (swap_gate_and_up, "activation"),
        (drop_bias, "topk_ids"),
        (drop_post_gain, "normed_rows"),
    ],
)
def test_broken_blocks_fail(changed, first):
    golden = golden_tensors(HF_F32, 0)
    ours = boundaries(block(0, jnp.float32, "xla", changed), golden["x"])
    assert next(iter(faults(ours, golden, F32, our_ids=ours["topk_ids"]))) == first


def test_call_is_the_last_boundary_and_keeps_leading_axes():
    golden = golden_tensors(HF_F32, 1)
    moe = block(1, jnp.float32, None)
    out = np.asarray(run(moe, jnp.asarray(golden["x"][:12]).reshape(3, 4, -1)))
    assert row_errors(out.reshape(12, -1), boundaries(moe, golden["x"][:12])["out"]).max() < F32.row_error


@pytest.mark.parametrize("implementation", ["xla", "pallas"])
def test_no_tokens(implementation):
    moe = block(0, jnp.bfloat16, implementation)
    found = boundaries(moe, jnp.zeros((0, 128), jnp.bfloat16))
    assert found["expert_rows"].shape == (0, 4, 64)
    assert found["out"].shape == run(moe, jnp.zeros((0, 128), jnp.bfloat16)).shape == (0, 128)


@pytest.mark.parametrize("implementation", ["xla", "pallas"])
def test_nan_token_touches_no_other(implementation):
    golden = golden_tensors(VLLM_BF16, 2)
    moe = block(2, jnp.bfloat16, implementation)
    x = jnp.asarray(golden["x"])
    clean = np.asarray(run(moe, x), np.float32)
    got = np.asarray(run(moe, x.at[4].set(jnp.nan)), np.float32)
    others = np.arange(33) != 4
    np.testing.assert_array_equal(got[others], clean[others])
    assert np.isnan(got[4]).all()


def test_jit_plain_and_split():
    """`jax.jit` with the module as an argument, and with its state split from its graph."""
    golden = golden_tensors(HF_F32, 0)
    moe, x = block(0, jnp.float32, None), jnp.asarray(golden["x"])
    graph, state = nnx.split(moe)
    split = jax.jit(lambda state, x: nnx.merge(graph, state)(x))(state, x)
    np.testing.assert_array_equal(split, nnx.jit(lambda module, x: module(x))(moe, x))


def test_random_init_runs():
    config = small_config()
    moe = nnx.jit(lambda: MuseMoE(config, rngs=nnx.Rngs(0), dtype=jnp.float32))()
    out = run(moe, jnp.ones((3, config.model_width)))
    assert out.shape == (3, config.model_width)
    assert np.isfinite(out).all()


def test_errors_name_the_argument():
    moe = block(0, jnp.bfloat16, None)
    with pytest.raises(TypeError, match="x is float32 and the parameters are bfloat16; cast x or load the block as"):
        moe(jnp.zeros((2, 128)))
    with pytest.raises(ValueError, match=r"x is \(2, 64\); expected \[T, 128\]"):
        moe(jnp.zeros((2, 64), jnp.bfloat16))
    weights = load_layer(golden_checkpoint(), 0)
    with pytest.raises(ValueError, match="weights has no 'down'; expected router_weight"):
        MuseMoE.from_weights(CONFIG, {name: value for name, value in weights.items() if name != "down"})
    with pytest.raises(ValueError, match=r"weights\['gate_up'\] is \(15, 192, 64\); expected \(16, 192, 64\)"):
        MuseMoE.from_weights(CONFIG, weights | {"gate_up": weights["gate_up"][1:]})
    with pytest.raises(ValueError, match="implementation is 'cuda'; expected 'pallas' or 'xla'"):
        MuseMoE.from_weights(CONFIG, weights, implementation="cuda")


def test_unknown_scoring_is_refused_at_construction():
    with pytest.raises(ValueError, match="scoring is 'relu'"):
        MuseRouter(dataclasses.replace(CONFIG, scoring="relu"), rngs=nnx.Rngs(0))
