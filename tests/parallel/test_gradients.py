"""Gradients of the block on a mesh are those of one device: of x and of every parameter, through every collective."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from muse_jax.moe import MuseMoE
from muse_jax.parallel import ShardedMoE
from muse_jax.schedule import Schedule
from muse_jax.sharding import whole_weight
from tests.parallel.cases import CONFIG, FLOAT32, K_H, make_mesh, tokens, weights

TOKENS = 21
# Two chunks of 8 whose rows are scattered and a rest that is all-reduced, on the 21 tokens of dp=1 or the 11 of dp=2.
SCHEDULE = Schedule(chunk_elements=8 * K_H, scatter_min_tokens=8)
# float32 sums of at most TOKENS * K * F products in another order, against the size of the whole gradient.
LIMIT = 2e-6


def gradients(block, x):
    """The function of (parameters by name, x) that gives both gradients of a weighted sum over block(parameters)(x)."""
    weights_of_sum = np.random.default_rng(1).normal(size=x.shape).astype(np.float32)

    def loss(parameters, x):
        return jnp.sum(block(parameters)(x) * weights_of_sum)

    return jax.jit(jax.grad(loss, (0, 1)))


@pytest.mark.parametrize("shape", [(2, 2, 2), (1, 2, 4)])
def test_gradients_equal_one_device(shape):
    x = jnp.asarray(tokens(TOKENS))
    block = ShardedMoE.from_weights(CONFIG, weights(), make_mesh(shape), dtype=FLOAT32, schedule=SCHEDULE)

    def on_mesh(held):
        return ShardedMoE(CONFIG, held, block.mesh, schedule=SCHEDULE)

    def on_one(whole):
        return MuseMoE.from_weights(CONFIG, whole, dtype=FLOAT32)

    ours, d_x = gradients(on_mesh, x)(block.weights(), x)
    want, want_d_x = gradients(on_one, x)({name: jnp.asarray(value) for name, value in weights().items()}, x)
    close("x", d_x, want_d_x)
    for name, value in want.items():
        assert ours[name].sharding.is_equivalent_to(block.weights()[name].sharding, value.ndim)
        close(name, whole_weight(name, ours[name], CONFIG, block.mesh), value)


def close(name, ours, want):
    ours, want = np.asarray(ours, np.float64), np.asarray(want, np.float64)
    if name == "router_bias":  # it only chooses
        assert not ours.any()
        assert not want.any()
        return
    assert np.linalg.norm(ours - want) < LIMIT * np.linalg.norm(want), name
