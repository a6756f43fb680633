"""Any number of tokens with a few compiled programs: a batch is padded to the next size of a short list.

    sizes = 1, 2, 4, 8, 16 and then 1.5 and 2 times each power of two: 24, 32, 48, 64, 96, 128, ...
A program is compiled for a size, not for a token count. Padding is never routed, so it reads no expert: it costs its
rows of the projections and no more.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from muse_jax.moe import MuseMoE


def bucket(tokens: int) -> int:
    """The smallest size that holds `tokens`; 0 for none. Raises ValueError for a negative count."""
    if tokens < 0:
        raise ValueError(f"tokens is {tokens}; expected 0 or more")
    if tokens == 0:
        return 0
    power = 1 << (tokens - 1).bit_length()
    return 3 * power // 4 if power >= 32 and tokens <= 3 * power // 4 else power


class Bucketed:
    """A block that takes any number of tokens: `Bucketed(block)(x)` is `block(x)`, with one program a bucket.

    A numpy array is padded, and its result cut, on the host: nothing else is compiled. A JAX array is padded and cut on
    its device, which compiles two small copies for each new token count. `compiled` counts the block's own programs.
    """

    def __init__(self, block: MuseMoE):
        graph, self._state = nnx.split(block)
        self.compiled = 0

        def run(state: nnx.State, x: jax.Array, num_tokens: jax.Array) -> jax.Array:
            self.compiled += 1  # runs when traced, once a program
            return nnx.merge(graph, state)(x, num_tokens=num_tokens)

        self._run = jax.jit(run)

    def __call__(self, x: np.ndarray | jax.Array) -> np.ndarray | jax.Array:
        """[T, D] in, [T, D] out, both of the kind that x is."""
        tokens = x.shape[0]
        rows = ((0, bucket(tokens) - tokens), (0, 0))
        num_tokens = np.int32(tokens)
        if isinstance(x, np.ndarray):
            return np.asarray(self._run(self._state, np.pad(x, rows), num_tokens))[:tokens]
        return self._run(self._state, jnp.pad(x, rows), num_tokens)[:tokens]
