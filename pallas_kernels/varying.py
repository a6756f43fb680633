"""Which mesh axes a value varies over inside `jax.shard_map`: types must agree where JAX cannot cast by itself.

Outside a mesh nothing varies, and arrays are left as they are.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jax import lax
from jax.typing import DTypeLike


def varying_axes(*arrays: jax.Array) -> frozenset[str]:
    """The mesh axes that at least one of the arrays varies over."""
    return frozenset[str]().union(*(jax.typeof(array).mat.varying for array in arrays))


def vary_together(*arrays: jax.Array) -> tuple[jax.Array, ...]:
    """The arrays, all varying over every axis that one of them varies over.

    The transpose of the cast is a sum over the added axes, so a gradient that differs between devices is summed where
    the array itself was the same on them.
    """
    axes = varying_axes(*arrays)
    return tuple(vary_over(array, axes) for array in arrays)


def vary_over(array: jax.Array, axes: frozenset[str]) -> jax.Array:
    """The array, varying over `axes` too."""
    return lax.pcast(array, tuple(axes - varying_axes(array)), to="varying")


def zeros_like_all(shape: tuple[int, ...], dtype: DTypeLike, *arrays: jax.Array) -> jax.Array:
    """Zeros that vary over every axis that one of the arrays varies over: where a loop starts from."""
    return vary_over(jnp.zeros(shape, dtype), varying_axes(*arrays))
