"""The expert GEMMs on quantized weights: the same row blocks, products of codes, scales applied in float32.

    FP8      p[r, o] = x_scale[t] * w_scale[e, o] * sum_i xq[t, i] * wq[e, o, i]                 scales of rows, or
             p[r, o] = sum_b x_scale[t, b] * w_scale[e, o / 128, b] * sum_i xq[t, i] * wq[e, o, i]     i in block b
    MXFP4    p[r, o] = sum_i x[t, i] * e2m1(wq[e, o, i]) * 2^(w_scale[e, o, i / 32] - 127)
    gate_up: swiglu of the two halves of p in out_dtype            down: p rounded to out_dtype
MXFP4 takes x as numbers, quantized and read back where activations are quantized too: an E2M1 number times its scale is
exact in bfloat16, so the products are those of the codes. FP8 takes x as codes and scales (`pallas_kernels.quantize`).
"""

from __future__ import annotations

import dataclasses
import math
from typing import Any

import jax
import jax.numpy as jnp
from jax.typing import DTypeLike
from jaxtyping import Array, Float, Float32, Integer

from pallas_kernels.dispatch import Implementation, resolve
from pallas_kernels.expert_gemm import quantized_pallas, xla
from pallas_kernels.expert_gemm.tiles import Tile, choose_config
from pallas_kernels.formats import MX_BLOCK
from pallas_kernels.quantize import dequantize_fp8_rows, dequantize_mxfp4_rows
from pallas_kernels.route_map import RouteMap

FP8_BLOCK = 128
_LIMIT = 2**32  # bytes up to which Pallas counts offsets in 32 bits
FP8_DTYPES = (jnp.float8_e4m3fn, jnp.float8_e4m3fnuz)


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, kw_only=True)
class Codes:
    """Numbers as codes and scales: values [..., n] float8 with scales float32 [...] or in blocks of 128 columns (and,
    for a weight, 128 rows), or values uint8 [..., n / 2] (MXFP4) with scales uint8 [..., n / 32].
    """

    values: Any
    scales: Any

    @property
    def is_mxfp4(self) -> bool:
        return self.values.dtype == jnp.uint8

    @property
    def has_blocks(self) -> bool:
        """Whether scales are of blocks, not of whole rows."""
        return self.scales.ndim == self.values.ndim


def hold(values: Integer[Array, "E out columns"] | Float[Array, "E out columns"]) -> jax.Array:
    """The values as the kernels can address them: with one expert more, never read, where they need it.

    Pallas counts offsets in 32 bits unless an array has more than 2^32 bytes, and signed 32 bits reach 2^31 one-byte
    elements only. An array between the two, as Muse Spark's own are (2^32 bytes), is made longer.
    """
    if _wraps(values):
        spare = (_LIMIT - values.size) // math.prod(values.shape[1:]) + 1
        return jnp.concatenate([values, jnp.zeros((spare, *values.shape[1:]), values.dtype)])
    return values


def _wraps(values: jax.Array) -> bool:
    return values.dtype.itemsize == 1 and _LIMIT // 2 < values.size <= _LIMIT


def gate_up(
    x: Codes | Float[Array, "T H"],
    weight: Codes,
    routes: RouteMap,
    *,
    routes_per_token: int,
    out_dtype: DTypeLike,
    implementation: Implementation | None = None,
    tile: Tile | None = None,
    into: Float[Array, "R columns"] | None = None,
    interpret: bool | None = None,
) -> Float[Array, "R F"]:
    """SwiGLU of both halves of the first expert GEMM, one row per route, in out_dtype (bfloat16 or float32).

    Args:
      x: of each token: `Codes` for an FP8 weight, numbers (bfloat16 or float32) for an MXFP4 one.
      weight: gate rows then up rows of every expert, [E, 2F, H]; values held as `hold` gives them.
      routes, routes_per_token, implementation, tile, into, interpret: as for `pallas_kernels.expert_gemm.gate_up`.
    """
    tokens = (x.values if isinstance(x, Codes) else x).shape[0]
    num_routes, f = tokens * routes_per_token, weight.values.shape[1] // 2
    _check(x, weight)
    if num_routes == 0:
        return jnp.zeros((0, f), out_dtype)
    with jax.named_scope("activation"):
        if resolve(implementation) == "xla":
            return xla.gate_up_decoded(
                _numbers(x), _decoder(weight), (weight.scales.shape[0], 2 * f), routes, num_routes, out_dtype
            )
        tile = tile or _config(weight, num_routes).gate_up
        return quantized_pallas.gate_up(x, weight, routes, num_routes, out_dtype, tile, into, interpret)


def down(
    activation: Codes | Float[Array, "R F"],
    weight: Codes,
    routes: RouteMap,
    *,
    out_dtype: DTypeLike,
    implementation: Implementation | None = None,
    tile: Tile | None = None,
    into: Float[Array, "R columns"] | None = None,
    interpret: bool | None = None,
) -> Float[Array, "R H"]:
    """The second expert GEMM: rows without the route weight, masked routes exactly zero. Arguments as `gate_up`."""
    num_routes, h = (
        (activation.values if isinstance(activation, Codes) else activation).shape[0],
        weight.values.shape[1],
    )
    _check(activation, weight)
    if num_routes == 0:
        return jnp.zeros((0, h), out_dtype)
    with jax.named_scope("expert_rows"):
        if resolve(implementation) == "xla":
            return xla.down_decoded(
                _numbers(activation), _decoder(weight), (weight.scales.shape[0], h), routes, out_dtype
            )
        tile = tile or _config(weight, num_routes).down
        return quantized_pallas.down(activation, weight, routes, out_dtype, tile, into, interpret)


def format_name(weight: Codes) -> str:
    """The weight's name in the tables of tiles: "fp8" or "mxfp4"."""
    return "mxfp4" if weight.is_mxfp4 else "fp8"


def _config(weight: Codes, num_routes: int):
    experts = weight.scales.shape[0]
    rows, columns = weight.values.shape[1:]
    return choose_config(num_routes / experts, format_name(weight), experts=experts, h=rows, f=columns)


def _numbers(x: Codes | jax.Array) -> Float32[Array, "rows n"]:
    return dequantize_fp8_rows(x.values, x.scales) if isinstance(x, Codes) else x.astype(jnp.float32)


def _decoder(weight: Codes):
    """expert -> its weight [out, in] in float32."""

    def decode(expert: jax.Array) -> jax.Array:
        values, scales = weight.values[expert], weight.scales[expert]
        if weight.is_mxfp4:
            return dequantize_mxfp4_rows(values, scales)
        numbers = dequantize_fp8_rows(values, jnp.ones(values.shape[:1], jnp.float32))
        if not weight.has_blocks:
            return numbers * scales[:, None]
        rows, columns = values.shape
        spread = jnp.repeat(jnp.repeat(scales, FP8_BLOCK, axis=0)[:rows], FP8_BLOCK, axis=1)[:, :columns]
        return numbers * spread

    return decode


def _check(x: Codes | jax.Array, weight: Codes) -> None:
    if weight.is_mxfp4 == isinstance(x, Codes):
        raise TypeError("x goes as Codes with an FP8 weight and as numbers with an MXFP4 weight")
    if isinstance(x, Codes) and x.values.dtype != weight.values.dtype:
        raise TypeError(f"x holds {x.values.dtype} and weight {weight.values.dtype}; expected one float8 flavour")
    depth = weight.values.shape[2] * (2 if weight.is_mxfp4 else 1)
    given = x.values.shape[1] if isinstance(x, Codes) else x.shape[1]
    if given != depth:
        raise ValueError(f"x has {given} columns and the weight {depth}; expected as many")
    if weight.is_mxfp4 and depth % MX_BLOCK:
        raise ValueError(f"the weight has {depth} columns; MXFP4 needs a multiple of {MX_BLOCK}")
    if isinstance(x, Codes) and x.has_blocks != weight.has_blocks:
        raise ValueError("x and weight must both have scales of blocks or both of rows")
    if _wraps(weight.values):
        raise ValueError(
            f"values {weight.values.shape} have {weight.values.size} elements of one byte, which 32-bit offsets cannot "
            "reach; hold them through `pallas_kernels.expert_gemm.quantized.hold`"
        )
