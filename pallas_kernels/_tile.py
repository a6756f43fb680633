"""What kernels share inside: a gathered tile and the product of two."""

from __future__ import annotations

import jax.numpy as jnp
from jax import lax
from jax.experimental.pallas import triton as plt


def load_tile(ref, row, column, *, column_limit: int | None, row_mask=None, lead=()):
    """ref[*lead, row[:, None], column[None, :]], zero past the limit and outside row_mask; no mask where None."""
    mask = None
    if column_limit is not None:
        mask = (column < column_limit)[None, :]
    if row_mask is not None:
        mask = row_mask[:, None] if mask is None else mask & row_mask[:, None]
    where = ref.at[(*lead, row[:, None], column[None, :])]
    if mask is None:
        return plt.load(where)
    mask = jnp.broadcast_to(mask, (row.shape[0], column.shape[0]))
    return plt.load(where, mask=mask, other=0 if jnp.issubdtype(ref.dtype, jnp.integer) else 0.0)


def dot_rows(a, b):
    """a @ b.T accumulated in float32 (float32 operands multiply in full precision)."""
    return lax.dot_general(
        a, b, (((1,), (1,)), ((), ())), precision=lax.Precision.HIGHEST, preferred_element_type=jnp.float32
    )
