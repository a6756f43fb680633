"""A quantized block in each format, tokens whose codes no order of sums changes, and the truth about them.

A value on the boundary between two codes goes either way with the last bit of a float32 sum, and a code makes 1e-4 to
1e-2 of a row. So tokens are chosen, by the truth, that have no value within NEAR of a boundary: for those the codes of
every mesh are the same, and rows differ by float32 sums alone.
"""

from __future__ import annotations

import dataclasses
from functools import cache, partial

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import AxisType

from muse_jax import parallel
from muse_jax.checkpoint import QuantizedWeight, small_config
from muse_jax.checkpoint.synthetic import random_layer
from muse_jax.config import MuseConfig
from muse_jax.dump import block_settings
from muse_jax.moe import MuseMoE
from muse_jax.parallel import ShardedMoE
from muse_jax.quantization import quantize_fp8, quantize_mxfp4
from muse_jax.reference import run_block
from muse_jax.reference.quantized import FP8_BLOCK, MXFP4_BLOCK, quantize_fp8_static
from muse_jax.reference.quantized import quantize_fp8 as fp8_rows
from muse_jax.reference.quantized import quantize_mxfp4 as mxfp4_rows
from muse_jax.schedule import Schedule
from tests.parallel.cases import FLOAT32, make_mesh

CONFIG = small_config(model_width=32, latent_width=64, expert_width=64, num_experts=9, routes_per_token=3)
FORMS = ("fp8", "fp8_static", "fp8_block", "even", "floor", "rceil", "w4a16")
# Of a value, and a 32nd of that of the largest in the row: sums of some 100 products are within a fraction of both.
NEAR = 4e-6


def rule_of(form: str) -> str | None:
    """The activation rule of a form, which is named after it where it is MXFP4."""
    return None if form.startswith("fp8") else form


def config_of(form: str, tp: int) -> MuseConfig:
    """Widths that hold whole blocks of the form on each rank of tp."""
    if form == "fp8_block":
        return dataclasses.replace(CONFIG, latent_width=128, expert_width=128 * max(tp, 2))
    return CONFIG if form.startswith("fp8") else dataclasses.replace(CONFIG, expert_width=256)


def schedule_of(config: MuseConfig) -> Schedule:
    """Of 1100 tokens a rank gets 4, 2, 1 or no whole chunks and a rest; up to 256 tokens are one chunk."""
    return Schedule(chunk_elements=260 * config.routes_per_token * config.latent_width)


@cache
def weights(form: str, config: MuseConfig) -> dict:
    """Random weights whose magnitudes differ between experts and between the shares of the expert width."""
    layer = random_layer(config, 0, seed=3, dtype="float32")
    layer["down"] *= np.linspace(0.2, 3, config.expert_width, dtype=np.float32)
    layer["gate_up"] *= np.linspace(0.5, 2, config.num_experts, dtype=np.float32)[:, None, None]
    return layer | {name: _quantized(layer[name], form, name) for name in ("gate_up", "down")}


def _quantized(weight: np.ndarray, form: str, name: str) -> QuantizedWeight:
    if not form.startswith("fp8"):
        return quantize_mxfp4(weight).to_host()
    found = quantize_fp8(weight).to_host()
    if form == "fp8_static":
        return dataclasses.replace(found, input_scale=0.01 if name == "gate_up" else 0.002)
    if form == "fp8_block":  # of other numbers than weight, and as good
        experts, rows, columns = found.values.shape
        scales = np.random.default_rng(len(name)).uniform(1, 2, (experts, rows // 128, columns // 128)) * 2.0**-12
        return dataclasses.replace(found, scales=scales.astype(np.float32))
    return found


@cache
def _truth(form: str, config: MuseConfig, most: int) -> tuple[np.ndarray, np.ndarray]:
    random, layer, rule = np.random.default_rng(5), weights(form, config), rule_of(form)
    inputs, outputs = [], []
    while sum(map(len, inputs)) < most:
        x = random.normal(size=(256, config.model_width)) * np.exp2(np.arange(256) % 5 - 2)[:, None]
        x = x.astype(np.float32)
        found = run_block(layer, x, block_settings(config), activation_rule=rule)
        is_far = np.ones(len(x), bool)
        for name, read in (("gate_up", "expert_input"), ("down", "activation")):
            is_far &= _is_far(found[read], layer[name], rule).reshape(len(x), -1).all(axis=1)
        inputs.append(x[is_far])
        outputs.append(found["out"][is_far])
    return np.concatenate(inputs), np.concatenate(outputs)


def _is_far(rows: np.ndarray, weight: QuantizedWeight, rule: str | None) -> np.ndarray:
    """Which values of rows [..., n] have the code of every value within NEAR of them."""
    if rule == "w4a16":
        return np.ones(rows.shape, bool)
    apart = NEAR * (np.abs(rows) + np.abs(rows).max(axis=-1, keepdims=True) / 32)
    if weight.format == "mxfp4":
        (low, low_scales), (high, high_scales) = (mxfp4_rows(side, rule) for side in (rows - apart, rows + apart))
        return (low == high) & np.repeat(low_scales == high_scales, MXFP4_BLOCK, axis=-1)
    scales = weight.input_scale
    if scales is None:
        group = FP8_BLOCK if weight.has_block_scales else rows.shape[-1]
        scales = np.repeat(fp8_rows(rows, group=group)[1], group, axis=-1)
    low, high = (quantize_fp8_static(side / scales, 1.0)[0] for side in (rows - apart, rows + apart))
    return low == high


def truth(form: str, count: int, config: MuseConfig) -> tuple[np.ndarray, np.ndarray]:
    """(x, out) of the first `count` tokens that are far from every boundary of a code; out in float64."""
    x, out = _truth(form, config, 256 if count <= 256 else 1100)
    return x[:count], out[:count]


@cache
def sharded(
    form: str, shape: tuple[int, ...], dtype: np.dtype = FLOAT32, kind: AxisType = AxisType.Explicit
) -> ShardedMoE:
    config = config_of(form, shape[2])
    return ShardedMoE.from_weights(
        config,
        weights(form, config),
        make_mesh(shape, kind=kind),
        dtype=dtype,
        schedule=schedule_of(config),
        activation_rule=rule_of(form),
        implementation="xla",
    )


@cache
def one_device(form: str, config: MuseConfig, dtype: np.dtype = FLOAT32) -> MuseMoE:
    return MuseMoE.from_weights(
        config, weights(form, config), dtype=dtype, activation_rule=rule_of(form), implementation="xla"
    )


def compile_run(block: ShardedMoE, x: np.ndarray, names: tuple[str, ...] = ("out",)) -> jax.stages.Compiled:
    """The program of a block's boundaries, traced anew: a test may have replaced a part of it."""
    run = partial(parallel._run.__wrapped__, settings=block._settings(), names=names)
    return jax.jit(run).lower(block.weights(), jnp.asarray(x)).compile()


@cache
def compiled(form: str, shape: tuple[int, ...], count: int) -> jax.stages.Compiled:
    return compile_run(sharded(form, shape), truth(form, count, config_of(form, shape[2]))[0])
