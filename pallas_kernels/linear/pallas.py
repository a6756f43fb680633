"""The linear layer of a few tokens as a Pallas kernel: a program streams `cols` rows of the weight past all tokens."""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as plt
from jaxtyping import Array, Float

from pallas_kernels._pallas import pallas_call
from pallas_kernels._tile import dot_rows, load_tile
from pallas_kernels.dispatch import interpreted
from pallas_kernels.formats import round_to

_COLS = 32  # outputs of a program: as many programs as there are multiprocessors, or a few times that
_DEPTH_BYTES = 512  # of a weight's row in one step
_STAGES = 3  # steps in flight: with 48 rows of 512 bytes a step they fit the local memory of every target


def _linear(x_ref, weight_ref, out_ref, *, height: int, cols: int, depth: int):
    tokens, inputs = x_ref.shape
    outputs = weight_ref.shape[0]
    token = jnp.arange(height)
    column = pl.program_id(0) * cols + jnp.arange(cols)

    depth_limit = None if inputs % depth == 0 else inputs
    row_mask = None if outputs % cols == 0 else column < outputs

    def step(i, total):
        d = i * depth + jnp.arange(depth)
        x = load_tile(x_ref, token, d, column_limit=depth_limit, row_mask=token < tokens)
        return total + dot_rows(x, load_tile(weight_ref, column, d, column_limit=depth_limit, row_mask=row_mask))

    # A number only known in the run: of a short loop whose length it knows, LLVM makes straight code that spills.
    steps = jnp.minimum(pl.program_id(0) + pl.cdiv(inputs, depth), pl.cdiv(inputs, depth))
    total = lax.fori_loop(0, steps, step, jnp.zeros((height, cols), jnp.float32))
    mask = (token < tokens)[:, None] & (column < outputs)[None, :]
    values = round_to(total, out_ref.dtype).astype(out_ref.dtype)
    plt.store(out_ref.at[token[:, None], column[None, :]], values, mask=mask)


def linear(x: Float[Array, "T I"], weight: Float[Array, "O I"], interpret: bool | None = None) -> Float[Array, "T O"]:
    """See `pallas_kernels.linear.linear`."""
    (tokens, inputs), outputs = x.shape, weight.shape[0]
    depth = max(16, min(pl.next_power_of_2(inputs), _DEPTH_BYTES // x.dtype.itemsize))
    return pallas_call(
        functools.partial(_linear, height=max(16, pl.next_power_of_2(tokens)), cols=_COLS, depth=depth),
        grid=(pl.cdiv(outputs, _COLS),),
        out_shape=jax.ShapeDtypeStruct((tokens, outputs), x.dtype),
        num_warps=4,
        num_stages=_STAGES,
        interpret=interpreted() if interpret is None else interpret,
        name="muse_linear",
    )(x, weight)
