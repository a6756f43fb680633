"""The two expert GEMMs: one *unweighted* row per route, each row block multiplied by its own expert only.

    gate_up:  activation[r] = swiglu(x[t] @ gate_e.T, x[t] @ up_e.T)        [T, H] -> [R, F],  t = r // K
    down:     expert_rows[r] = activation[r] @ down_e.T                     [R, F] -> [R, H]
e is the expert of route r, gate_e and up_e are rows 0..F-1 and F..2F-1 of gate_up[e]. Products are accumulated in
float32 and rounded once to the dtype of the input. A masked route's expert row is exactly zero; its activation is
undefined.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from pallas_kernels.dispatch import Implementation, resolve
from pallas_kernels.expert_gemm import pallas, xla
from pallas_kernels.expert_gemm.tiles import GemmConfig, Tile, choose_config
from pallas_kernels.expert_gemm.xla import block_rows as xla_block_rows
from pallas_kernels.route_map import RouteMap

__all__ = ["GemmConfig", "Tile", "choose_config", "down", "gate_up", "xla_block_rows"]


def gate_up(
    x: Float[Array, "T H"],
    weight: Float[Array, "E F2 H"],
    routes: RouteMap,
    *,
    routes_per_token: int,
    implementation: Implementation | None = None,
    tile: Tile | None = None,
    into: Float[Array, "R columns"] | None = None,
    interpret: bool | None = None,
) -> Float[Array, "R F"]:
    """SwiGLU of both halves of the first expert GEMM, one row per route, in x's dtype (bfloat16 or float32).

    Args:
      x: expert input of each token.
      weight: gate rows then up rows of every expert, [E, 2F, H], in x's dtype.
      routes: the row blocks of the routes (`route_map`).
      routes_per_token: K; route r reads token r // K.
      tile: columns, depth, warps and stages of the Pallas kernel; None takes that of `choose_config`.
      into: rows of routes that are not in `routes` are taken from here (Pallas only; its memory is reused).
      interpret: run the Pallas kernel in interpret mode; None decides by the backend.
    """
    _check("x", x, "weight", weight)
    if weight.shape[1] % 2:
        raise ValueError(f"weight has {weight.shape[1]} rows an expert; expected 2F, gate rows then up rows")
    num_routes = x.shape[0] * routes_per_token
    if num_routes == 0:
        return jnp.zeros((0, weight.shape[1] // 2), x.dtype)
    with jax.named_scope("activation"):
        if resolve(implementation) == "xla":
            return xla.gate_up(x, weight, routes, num_routes)
        experts, two_f, h = weight.shape
        tile = tile or choose_config(num_routes / experts, x.dtype, experts=experts, h=h, f=two_f // 2).gate_up
        return pallas.gate_up(x, weight, routes, num_routes, tile, into, interpret)


def down(
    activation: Float[Array, "R F"],
    weight: Float[Array, "E H F"],
    routes: RouteMap,
    *,
    implementation: Implementation | None = None,
    tile: Tile | None = None,
    into: Float[Array, "R columns"] | None = None,
    interpret: bool | None = None,
) -> Float[Array, "R H"]:
    """The second expert GEMM: expert rows without the route weight, masked routes exactly zero. Arguments as
    `gate_up`.
    """
    _check("activation", activation, "weight", weight)
    if activation.shape[0] == 0:
        return jnp.zeros((0, weight.shape[1]), activation.dtype)
    with jax.named_scope("expert_rows"):
        if resolve(implementation) == "xla":
            return xla.down(activation, weight, routes)
        (experts, h, f), num_routes = weight.shape, activation.shape[0]
        tile = tile or choose_config(num_routes / experts, activation.dtype, experts=experts, h=h, f=f).down
        return pallas.down(activation, weight, routes, tile, into, interpret)


def _check(x_name: str, x: jax.Array, weight_name: str, weight: jax.Array) -> None:
    if x.dtype not in (jnp.bfloat16, jnp.float32) or weight.dtype != x.dtype:
        raise TypeError(
            f"{x_name} is {x.dtype} and {weight_name} is {weight.dtype}; expected both bfloat16 or both float32"
        )
    if x.ndim != 2 or weight.ndim != 3 or x.shape[1] != weight.shape[2]:
        raise ValueError(
            f"{x_name} is {x.shape} and {weight_name} is {weight.shape}; expected [rows, depth] and [E, columns, depth]"
        )
