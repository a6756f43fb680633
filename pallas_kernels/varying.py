"""Which mesh axes a value varies over inside `jax.shard_map`: types must agree where JAX cannot cast by itself.

Outside a mesh nothing varies, and both functions leave their arrays as they are.
"""

from __future__ import annotations

import jax
from jax import lax


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
