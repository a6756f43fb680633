"""Calls as one compiled program: run op by op, every op would be compiled by itself, which takes longer."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import jax


def one_program[**P, R](function: Callable[P, R]) -> Callable[P, R]:
    """`function` under jit, its keyword arguments static."""

    @functools.cache
    def compiled(**options: Any) -> Any:
        return jax.jit(functools.partial(function, **options))

    return lambda *args, **options: compiled(**options)(*args)
