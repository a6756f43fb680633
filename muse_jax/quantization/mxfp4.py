"""MXFP4 weights: E2M1 codes, two a byte, and one power of two a block of 32 columns.

    values, scales = the rows of `pallas_kernels.quantize.quantize_mxfp4_rows`, under its rule "even" unless told

Experts are quantized a chunk at a time into arrays that are allocated once, so the peak is the packed result, one
chunk in bfloat16 and what its float32 copy takes: 8 bytes a weight of the chunk.
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
from jax.typing import ArrayLike
from jaxtyping import Float

from muse_jax.config import MuseConfig
from muse_jax.quantization.array import QuantizedArray
from pallas_kernels.formats import MX_BLOCK, Rule
from pallas_kernels.quantize import quantize_mxfp4_rows

CHUNK = 32


def online_layers(config: MuseConfig) -> tuple[int, ...]:
    """The layers of a bfloat16 checkpoint that are quantized when it is loaded: all but the model's first and last."""
    return tuple(layer for layer in config.moe_layers if 0 < layer < config.num_layers - 1)


def quantize_mxfp4(weight: Float[ArrayLike, "*rows n"], rule: Rule = "even") -> QuantizedArray:
    """The weight [..., out, in] of any float dtype, all at once.

    Raises ValueError for an unknown rule, or columns that are no multiple of 32.
    """
    values, scales = _quantize(jnp.asarray(weight), rule)
    return QuantizedArray(values=values, scales=scales, format="mxfp4").check()


def quantize_experts_mxfp4(weight: Any, rule: Rule = "even", *, chunk: int = CHUNK) -> QuantizedArray:
    """A weight [E, out, in] of any float dtype, `chunk` experts at a time: the same bytes as `quantize_mxfp4`.

    weight: a jax or numpy array, or whatever has a shape and gives an array for [start:stop], such as a file's mapping;
    of it, one chunk at a time is on the device. Raises ValueError as `quantize_mxfp4`, and for a chunk below 1.
    """
    if chunk < 1:
        raise ValueError(f"chunk is {chunk}; expected a number of experts, 1 or more")
    if len(weight.shape) != 3:
        raise ValueError(f"weight is {tuple(weight.shape)}; expected [E, out, in]")
    experts, rows, columns = weight.shape
    if columns % MX_BLOCK:
        raise ValueError(f"the weight has {columns} columns; MXFP4 needs a multiple of {MX_BLOCK}")
    values = jnp.zeros((experts, rows, columns // 2), jnp.uint8)
    scales = jnp.zeros((experts, rows, columns // MX_BLOCK), jnp.uint8)
    for start in range(0, experts, chunk):
        part = jnp.asarray(weight[start : start + chunk])
        values, scales = _write(values, scales, part, start, rule)
        jax.block_until_ready(values)  # the part is free before the next one is made
    return QuantizedArray(values=values, scales=scales, format="mxfp4").check()


_quantize = jax.jit(quantize_mxfp4_rows, static_argnums=1)


@jax.jit(donate_argnums=(0, 1), static_argnums=4)
def _write(
    values: jax.Array, scales: jax.Array, part: jax.Array, start: Any, rule: Rule
) -> tuple[jax.Array, jax.Array]:
    packed, exponents = quantize_mxfp4_rows(part, rule)
    at = (start, 0, 0)
    return jax.lax.dynamic_update_slice(values, packed, at), jax.lax.dynamic_update_slice(scales, exponents, at)
