"""Buckets: few programs, the block's own answer, and padding that reads no expert and touches no token."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from muse_jax.buckets import Bucketed, bucket
from muse_jax.checkpoint import small_config
from muse_jax.moe import MuseMoE

CONFIG = small_config(model_width=24, latent_width=16, expert_width=8, num_experts=6, routes_per_token=2)


def make_block(implementation=None) -> MuseMoE:
    return nnx.jit(lambda: MuseMoE(CONFIG, rngs=nnx.Rngs(0), dtype=jnp.float32, implementation=implementation))()


@nnx.jit
def run(block, x, num_tokens=None):
    return block(x, num_tokens=num_tokens)


def test_sizes() -> None:
    sizes = [bucket(tokens) for tokens in range(1, 301)]
    assert sorted(set(sizes)) == [1, 2, 4, 8, 16, 24, 32, 48, 64, 96, 128, 192, 256, 384]
    assert all(tokens <= size <= 2 * tokens for tokens, size in enumerate(sizes, start=1))
    assert bucket(0) == 0
    with pytest.raises(ValueError, match="tokens is -1; expected 0 or more"):
        bucket(-1)


def test_one_program_a_bucket() -> None:
    """Every count from 1 to 300 through one block: as many programs as there are sizes, of any kind."""
    compiled = []
    jax.monitoring.register_event_duration_secs_listener(
        lambda name, *_, **__: compiled.append(name) if name.endswith("backend_compile_duration") else None
    )
    block = Bucketed(make_block())
    rng = np.random.default_rng(0)
    compiled.clear()
    for tokens in rng.permutation(np.arange(1, 301)):
        assert block(rng.standard_normal((tokens, 24), np.float32)).shape == (tokens, 24)
    assert block.compiled == len({bucket(tokens) for tokens in range(1, 301)}) == 14
    assert len(compiled) == 14


@pytest.mark.parametrize("implementation", ["xla", "pallas"])
@pytest.mark.parametrize("tokens", [0, 17])
def test_same_answer(tokens: int, implementation) -> None:
    block = make_block(implementation)
    x = np.random.default_rng(tokens).standard_normal((tokens, 24)).astype(np.float32)
    want = np.asarray(run(block, jnp.asarray(x)))
    bucketed = Bucketed(block)
    for out in (bucketed(x), bucketed(jnp.asarray(x))):
        np.testing.assert_allclose(np.asarray(out), want, rtol=2e-6, atol=2e-6 * np.abs(want).max(initial=0))


@pytest.mark.parametrize("implementation", ["xla", "pallas"])
def test_padding_is_never_routed(implementation) -> None:
    """Poisoned padding changes no token, and its output is zero."""
    block = make_block(implementation)
    x = jnp.asarray(np.random.default_rng(1).standard_normal((8, 24)), jnp.float32)
    out = run(block, x.at[5:].set(jnp.nan), 5)
    np.testing.assert_array_equal(out[:5], run(block, x, 5)[:5])
    np.testing.assert_array_equal(out[5:], 0)
