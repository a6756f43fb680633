"""Which implementation runs: `None` is the best one for this backend, a named one runs or fails loudly."""

from __future__ import annotations

from typing import Literal, get_args

import jax

Implementation = Literal["pallas", "xla"]


def resolve(implementation: Implementation | None) -> Implementation:
    """`implementation`, or the default of this backend: "pallas" on a GPU, "xla" elsewhere.

    Raises ValueError for a name that does not exist.
    """
    if implementation is None:
        return "pallas" if jax.default_backend() == "gpu" else "xla"
    if implementation not in get_args(Implementation):
        names = " or ".join(repr(name) for name in get_args(Implementation))
        raise ValueError(f"implementation is {implementation!r}; expected {names}, or None for the best one here")
    return implementation


def interpreted() -> bool:
    """True where a Pallas kernel can only be interpreted: every backend but a GPU."""
    return jax.default_backend() != "gpu"
