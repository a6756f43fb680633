"""Router logits: the exact three-plane product of many bfloat16 tokens against the float32 one and float64."""

import jax.numpy as jnp
import numpy as np
import pytest

from muse_jax.router import MANY_TOKENS, _planes, router_logits


def weights() -> jnp.ndarray:
    rng = np.random.default_rng(0)
    spread = np.exp2(rng.integers(-30, 10, (12, 96)))
    return jnp.asarray(rng.standard_normal((12, 96)) * spread, jnp.float32)


def test_planes_are_the_weight() -> None:
    weight = weights().at[0, :4].set(jnp.asarray([0.0, -0.0, 1.0, -3.14159274]))
    planes = np.asarray(_planes(weight), np.float64)
    np.testing.assert_array_equal(planes.sum(0), np.asarray(weight, np.float64))


@pytest.mark.parametrize("tokens", [1, MANY_TOKENS - 1, MANY_TOKENS])
def test_planes_are_as_good_as_float32(tokens: int) -> None:
    """Products are exact both ways, so both are within float32 sums of the truth; two planes would not be."""
    x = jnp.asarray(np.random.default_rng(tokens).standard_normal((tokens, 96)), jnp.bfloat16)
    truth = np.asarray(x, np.float64) @ np.asarray(weights(), np.float64).T * 0.25
    size = np.abs(np.asarray(x, np.float64)) @ np.abs(np.asarray(weights(), np.float64)).T * 0.25
    for implementation in ("pallas", "xla"):
        logits = router_logits(x, weights(), 0.25, implementation=implementation)
        assert logits.dtype == jnp.float32
        assert np.max(np.abs(np.asarray(logits, np.float64) - truth) / size) < 1e-6
    two = np.asarray(_planes(weights())[:2], np.float64).sum(0)
    assert np.max(np.abs(np.asarray(x, np.float64) @ two.T * 0.25 - truth) / size) > 1e-6
