"""The two expert GEMMs: one *unweighted* row per route, each row block multiplied by its own expert only.

    gate_up:  activation[r] = swiglu(x[t] @ gate_e.T, x[t] @ up_e.T)        [T, H] -> [R, F],  t = r // K
    down:     expert_rows[r] = activation[r] @ down_e.T                     [R, F] -> [R, H]
e is the expert of route r, gate_e and up_e are rows 0..F-1 and F..2F-1 of gate_up[e]. Products are accumulated in
float32 and rounded once to the output's dtype. A masked route's expert row is exactly zero; its activation is
undefined.

A weight is an array, or `Codes` in FP8 or MXFP4. FP8 takes x as codes too. MXFP4 takes x as numbers, quantized and read
back where activations are quantized: an E2M1 number times its scale is exact in bfloat16, so the products are those of
the codes.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jax.typing import DTypeLike
from jaxtyping import Array, Float

from pallas_kernels.dispatch import Implementation, resolve
from pallas_kernels.expert_gemm import pallas, xla
from pallas_kernels.expert_gemm.codes import Codes, Input, Planes, Weight, hold, shape_of, stored, wraps
from pallas_kernels.expert_gemm.tiles import GemmConfig, Tile, choose_config
from pallas_kernels.expert_gemm.xla import block_rows as xla_block_rows
from pallas_kernels.formats import MX_BLOCK
from pallas_kernels.route_map import RouteMap

__all__ = [
    "Codes",
    "GemmConfig",
    "Planes",
    "Tile",
    "choose_config",
    "down",
    "gate_up",
    "hold",
    "stored",
    "wraps",
    "xla_block_rows",
]


def gate_up(
    x: Input,
    weight: Weight,
    routes: RouteMap,
    *,
    routes_per_token: int,
    out_dtype: DTypeLike | None = None,
    implementation: Implementation | None = None,
    tile: Tile | None = None,
    into: Float[Array, "R columns"] | None = None,
    interpret: bool | None = None,
) -> Float[Array, "R F"]:
    """SwiGLU of both halves of the first expert GEMM, one row per route.

    Args:
      x: expert input of each token [T, H], bfloat16 or float32; `Codes` for an FP8 weight.
      weight: gate rows then up rows of every expert, [E, 2F, H], in x's dtype or `Codes`, best as `hold` gives them.
      routes: the row blocks of the routes (`route_map`).
      routes_per_token: K; route r reads token r // K.
      out_dtype: bfloat16 or float32; None is x's. FP8 needs one.
      tile: columns, depth, warps and stages of the Pallas kernel; None takes that of `choose_config`.
      into: rows of routes that are not in `routes` are taken from here (Pallas only; its memory is reused).
      interpret: run the Pallas kernel in interpret mode; None decides by the backend.

    Raises TypeError or ValueError where x and weight do not fit each other.
    """
    rows, (experts, two_f, h), dtype = _check("x", x, weight, out_dtype)
    if two_f % 2:
        raise ValueError(f"weight has {two_f} rows an expert; expected 2F, gate rows then up rows")
    num_routes = rows * routes_per_token
    if num_routes == 0:
        return jnp.zeros((0, two_f // 2), dtype)
    with jax.named_scope("activation"):
        if resolve(implementation) == "xla":
            return xla.gate_up(x, weight, routes, num_routes, dtype)
        tile = tile or choose_config(num_routes / experts, _kind(weight), experts=experts, h=h, f=two_f // 2).gate_up
        return pallas.gate_up(x, weight, routes, num_routes, dtype, tile, into, interpret)


def down(
    activation: Input,
    weight: Weight,
    routes: RouteMap,
    *,
    out_dtype: DTypeLike | None = None,
    implementation: Implementation | None = None,
    tile: Tile | None = None,
    into: Float[Array, "R columns"] | None = None,
    interpret: bool | None = None,
) -> Float[Array, "R H"]:
    """The second expert GEMM: expert rows without the route weight, masked routes exactly zero. Arguments as
    `gate_up`.
    """
    num_routes, (experts, h, f), dtype = _check("activation", activation, weight, out_dtype)
    if num_routes == 0:
        return jnp.zeros((0, h), dtype)
    with jax.named_scope("expert_rows"):
        if resolve(implementation) == "xla":
            return xla.down(activation, weight, routes, dtype)
        tile = tile or choose_config(num_routes / experts, _kind(weight), experts=experts, h=h, f=f).down
        return pallas.down(activation, weight, routes, dtype, tile, into, interpret)


def _kind(weight: Weight) -> DTypeLike | str:
    """The weight's name in the tables of tiles."""
    return weight.format if isinstance(weight, Codes) else weight.dtype


def _check(
    name: str, x: Input, weight: Weight, out_dtype: DTypeLike | None
) -> tuple[int, tuple[int, int, int], jnp.dtype]:
    """(rows of x, the weight's [E, out, in], dtype of the output)."""
    if isinstance(weight, Codes):
        shape = (weight.scales.shape[0], weight.values.shape[1], weight.columns)
        _check_codes(name, x, weight)
    else:
        shape = weight.shape
        given = type(x).__name__ if isinstance(x, Codes | Planes) else x.dtype
        if given not in (jnp.bfloat16, jnp.float32) or given != weight.dtype:
            raise TypeError(f"{name} is {given} and weight is {weight.dtype}; expected both bfloat16 or both float32")
    own = shape_of(x)
    if len(own) != 2 or len(shape) != 3 or own[1] != shape[2]:
        raise ValueError(f"{name} is {own} and weight is {shape}; expected [rows, depth] and [E, columns, depth]")
    if out_dtype is None:
        if isinstance(x, Codes):
            raise TypeError(f"{name} is codes, which have no dtype to give the output; name out_dtype")
        out_dtype = (x.columns if isinstance(x, Planes) else x).dtype
    return own[0], shape, jnp.dtype(out_dtype)


def _check_codes(name: str, x: Input, weight: Codes) -> None:
    if weight.is_mxfp4 == isinstance(x, Codes):
        raise TypeError(f"{name} goes as Codes with an FP8 weight and as numbers or Planes with an MXFP4 weight")
    if weight.is_mxfp4 and weight.columns % MX_BLOCK:
        raise ValueError(f"the weight has {weight.columns} columns; MXFP4 needs a multiple of {MX_BLOCK}")
    if isinstance(x, Codes):
        if x.values.dtype not in (weight.values.dtype, jnp.float16):
            raise TypeError(
                f"{name} holds {x.values.dtype} and weight {weight.values.dtype}; expected one float8 flavour"
            )
        if x.has_blocks != weight.has_blocks:
            raise ValueError(f"{name} and weight must both have scales of blocks or both of rows")
        if wraps(weight.values):
            raise ValueError(
                f"values {weight.values.shape} have {weight.values.size} elements of one byte, which 32-bit offsets "
                "cannot reach; hold them through `pallas_kernels.expert_gemm.hold`"
            )
