"""What else computes the same unweighted rows on this machine: each maker returns a callable, or says why it cannot.

torch        torch._grouped_mm over tokens sorted by expert, two GEMMs with SwiGLU between, rows put back by route
ragged_dot   the same in JAX with jax.lax.ragged_dot (dense in disguise on CPU, CUDA and ROCm: slow, and it copies)
tokamax      tokamax.ragged_dot with its Triton implementation, if the package is installed
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from muse_jax.bench.work import train_us

Measure = Callable[[Sequence[np.ndarray], int], float]


def make_peer(name: str, gate_up: jax.Array, down: jax.Array) -> Measure:
    """A function (route sets [T, K], repeats) -> microseconds. Raises NotImplementedError where the peer cannot run."""
    if name == "torch":
        return _torch(gate_up.shape, down.shape)
    if name == "ragged_dot":
        return _ragged(gate_up, down, jax.lax.ragged_dot)
    if name == "tokamax":
        try:
            import tokamax
        except ImportError:
            raise NotImplementedError("tokamax is not installed") from None
        return _ragged(gate_up, down, lambda x, w, groups: tokamax.ragged_dot(x, w, groups, implementation="triton"))
    raise ValueError(f"peer is {name!r}; expected torch, ragged_dot or tokamax")


def _ragged(gate_up: jax.Array, down: jax.Array, ragged_dot: Callable[..., jax.Array]) -> Measure:
    experts, two_f, _ = gate_up.shape
    # Stored as this product wants them, [E, in, out], so that no call turns them round.
    turned = [jax.jit(lambda w: w.swapaxes(1, 2))(weight) for weight in (gate_up, down)]

    @jax.jit
    def rows(x: jax.Array, ids: jax.Array, gate_up: jax.Array, down: jax.Array) -> jax.Array:
        order = jnp.argsort(ids.reshape(-1), stable=True)
        groups = jnp.bincount(ids.reshape(-1), length=experts).astype(jnp.int32)
        product = ragged_dot(x[order // ids.shape[1]], gate_up, groups)
        activation = jax.nn.silu(product[:, : two_f // 2]) * product[:, two_f // 2 :]
        out = ragged_dot(activation, down, groups)
        return jnp.zeros_like(out).at[order].set(out)

    def measure(sets: Sequence[np.ndarray], repeats: int) -> float:
        x = jax.random.normal(jax.random.key(0), (sets[0].shape[0], down.shape[1]), down.dtype)
        return train_us(rows, [(x, jnp.asarray(ids), *turned) for ids in sets], repeats)

    return measure


def _torch(gate_up_shape: tuple[int, ...], down_shape: tuple[int, ...]) -> Measure:
    try:
        import torch
    except ImportError:
        raise NotImplementedError("torch is not installed") from None
    if not torch.cuda.is_available():
        raise NotImplementedError("this torch has no GPU; torch._grouped_mm is timed on one")
    # Its own weights: the two frameworks' allocators do not share arrays.
    gate_up, down = (
        torch.empty(shape, dtype=torch.bfloat16, device="cuda").normal_(std=shape[2] ** -0.5)
        for shape in (gate_up_shape, down_shape)
    )

    def rows(x: Any, ids: Any) -> Any:
        flat = ids.reshape(-1)
        order = torch.argsort(flat, stable=True)
        ends = torch.cumsum(torch.bincount(flat, minlength=gate_up_shape[0]), 0).to(torch.int32)
        product = torch._grouped_mm(x[order // ids.shape[1]], gate_up.transpose(1, 2), offs=ends)
        gate, up = product.chunk(2, dim=-1)
        out = torch._grouped_mm(torch.nn.functional.silu(gate) * up, down.transpose(1, 2), offs=ends)
        return torch.empty_like(out).index_copy_(0, order, out)

    def measure(sets: Sequence[np.ndarray], repeats: int) -> float:
        x = torch.randn(sets[0].shape[0], down_shape[1], dtype=torch.bfloat16, device="cuda")
        ids = [torch.from_numpy(one.astype(np.int64)).cuda() for one in sets]
        for one in ids:
            rows(x, one)
        laps = []
        for _ in range(5):
            torch.cuda.synchronize()
            start = time.perf_counter()
            for i in range(repeats):
                rows(x, ids[i % len(ids)])
            torch.cuda.synchronize()
            laps.append((time.perf_counter() - start) / repeats)
        return 1e6 * sorted(laps)[2]

    return measure
