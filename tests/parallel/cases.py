"""A small block, the meshes of eight devices, and one compiled run that several tests look at."""

from __future__ import annotations

import dataclasses
from functools import cache, partial

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
from jax.sharding import AxisType, Mesh

from muse_jax import parallel
from muse_jax.checkpoint import small_config
from muse_jax.checkpoint.synthetic import random_layer
from muse_jax.moe import MuseMoE
from muse_jax.parallel import ShardedMoE
from muse_jax.schedule import Schedule

AXES = ("dp", "ep", "tp")
MESHES = [(dp, ep, 8 // dp // ep) for dp in (1, 2, 4, 8) for ep in (1, 2, 4, 8) if dp * ep <= 8]
TOKENS = (0, 1, 7, 255, 256, 1100)
CONFIG = small_config(model_width=20, latent_width=12, expert_width=16, num_experts=9, routes_per_token=3)
EVEN = dataclasses.replace(CONFIG, num_experts=8)
WIDE = small_config(model_width=96, latent_width=128, expert_width=64, num_experts=16, routes_per_token=8)
K_H = CONFIG.routes_per_token * CONFIG.latent_width
# Of 1100 tokens a rank gets 4, 2, 1 or no whole chunks and a rest; up to 256 tokens are one chunk.
CHUNKED = Schedule(chunk_elements=260 * K_H)
FLOAT32, BFLOAT16 = np.dtype(np.float32), np.dtype(ml_dtypes.bfloat16)


def make_mesh(shape, axes=AXES, kind=AxisType.Explicit) -> Mesh:
    devices = jax.devices()[: int(np.prod(shape))]
    return jax.make_mesh(shape, axes, axis_types=(kind,) * len(axes), devices=devices)


@cache
def weights(config=CONFIG):
    """Random weights whose magnitudes differ between experts and between the shares of the expert width."""
    layer = random_layer(config, 0, seed=3, dtype="float32")
    layer["down"] *= np.linspace(0.2, 3, config.expert_width, dtype=np.float32)
    layer["gate_up"] *= np.linspace(0.5, 2, config.num_experts, dtype=np.float32)[:, None, None]
    return layer


@cache
def tokens(count, dtype=FLOAT32, config=CONFIG):
    x = np.random.default_rng([5, count]).normal(size=(count, config.model_width))
    return (x * np.exp2(np.arange(count) % 5 - 2)[:, None]).astype(dtype)


@cache
def one_device(dtype=FLOAT32, config=CONFIG):
    return MuseMoE.from_weights(config, weights(config), dtype=dtype)


@cache
def expected(count, dtype=FLOAT32, config=CONFIG):
    """The one device's output."""
    x, block = tokens(count, dtype, config), one_device(dtype, config)
    return np.asarray(jax.jit(lambda x: block(x))(x))


@cache
def sharded(shape, dtype=FLOAT32, schedule=CHUNKED, config=CONFIG, kind=AxisType.Explicit, implementation=None):
    mesh = make_mesh(shape, kind=kind)
    return ShardedMoE.from_weights(
        config, weights(config), mesh, dtype=dtype, schedule=schedule, implementation=implementation
    )


@cache
def compiled(shape, count, dtype=FLOAT32, schedule=CHUNKED, config=CONFIG, names=("out",)):
    """(lowered, compiled) program of a block on a mesh."""
    block = sharded(shape, dtype, schedule, config)
    # The function below jit, newly wrapped: a test may have replaced a part of it.
    run = partial(parallel._run.__wrapped__, settings=block._settings(), names=names)
    lowered = jax.jit(run).lower(block.weights(), jnp.asarray(tokens(count, dtype, config)))
    return lowered, lowered.compile()


def run(shape, count, dtype=FLOAT32, schedule=CHUNKED, config=CONFIG):
    """The output of `compiled`."""
    return found(shape, count, dtype, schedule, config)["out"]


def found(shape, count, dtype=FLOAT32, schedule=CHUNKED, config=CONFIG, names=("out",)):
    """The boundaries `names` of `compiled`."""
    _, program = compiled(shape, count, dtype, schedule, config, names)
    out = program(sharded(shape, dtype, schedule, config).weights(), jnp.asarray(tokens(count, dtype, config)))
    return {name: np.asarray(value) for name, value in out.items()}


def relative_error(a, b):
    """Of the whole array, root of mean squares."""
    a, b = np.asarray(a, np.float64), np.asarray(b, np.float64)
    return np.linalg.norm(a - b) / np.linalg.norm(b)


def rounding_bound(shape, size):
    """How far `size` elements of bfloat16 `combined` on that mesh may be from one device's (float32 sums).

    One rounding moves an array by 1.66e-3 of it. Roundings of different values are independent, so n of them move it by
    sqrt(n) as much: `combined` on either side; over ep the partial outputs; over tp the rows of one device and the
    partial rows. That is 2.9e-3 over ep, 3.3e-3 over tp and 3.7e-3 over both; vLLM's own ranks are 2.7e-3 to 3.0e-3 and
    3.1e-3 to 3.3e-3 from its one device (test_golden.py). A few elements scatter about it.
    """
    _, ep, tp = shape
    roundings = 0 if ep == tp == 1 else 2 + (ep > 1) + 2 * (tp > 1)
    return 1.66e-3 * np.sqrt(roundings) * (1.03 + 3 / np.sqrt(size))
