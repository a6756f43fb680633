"""A linear layer: out[t] = round(x[t] @ weight.T), products accumulated in float32 and rounded once.

For a few tokens the weights are all that is read, and one Pallas kernel streams them and rounds on the way out. For one
token XLA's row reduction is as fast, and for many it is an ordinary matrix product, which XLA hands to the vendor's
library.
"""

from __future__ import annotations

import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float

from pallas_kernels.dispatch import Implementation, resolve
from pallas_kernels.formats import round_to
from pallas_kernels.linear import pallas

FEW_TOKENS = 16  # rows of the narrowest matrix unit


def linear(
    x: Float[Array, "T I"],
    weight: Float[Array, "O I"],
    *,
    implementation: Implementation | None = None,
    interpret: bool | None = None,
) -> Float[Array, "T O"]:
    """x @ weight.T in x's dtype (bfloat16 or float32), which must be the weight's.

    The kernel serves 2 to FEW_TOKENS tokens; "pallas" with others takes XLA's product as well.
    """
    if x.dtype != weight.dtype or x.shape[-1] != weight.shape[1]:
        raise ValueError(
            f"x is {x.dtype} {x.shape} and weight is {weight.dtype} {weight.shape}; "
            "expected one dtype and [T, inputs], [outputs, inputs]"
        )
    if 2 <= x.shape[0] <= FEW_TOKENS and resolve(implementation) == "pallas":
        return pallas.linear(x, weight, interpret)
    product = lax.dot_general(
        x, weight, (((1,), (1,)), ((), ())), precision=lax.Precision.HIGHEST, preferred_element_type=jnp.float32
    )
    return round_to(product, x.dtype).astype(x.dtype)
