"""The expert GEMMs in plain XLA: row blocks, each multiplied by its own expert's weights and no other.

Where experts have a row or more on average, the first block of every expert is multiplied in one batched product that
reads the stacked weights in place, and a loop over blocks takes what is left of the crowded experts. Where most experts
have no row, the loop takes one route at a time. Either way the work is a small multiple of R rows times one expert,
whatever E is; `jax.lax.ragged_dot` would multiply every row by every expert on CPU, CUDA and ROCm. The loop comes
second because XLA copies an expert's weights before each of its products.

The gradient walks the same blocks: with p = x @ w.T the product of a block and dp its gradient,
    dx = dp @ w        dw[expert] += dp.T @ x
p is computed again, dp is rounded to the input's dtype, and both products accumulate in float32.
"""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.typing import DTypeLike
from jaxtyping import Array, Float

from pallas_kernels.expert_gemm.codes import Codes, Input, Planes, Weight, decode_expert, numbers, shape_of
from pallas_kernels.formats import round_to, swiglu, swiglu_gradient
from pallas_kernels.route_map import RouteMap
from pallas_kernels.varying import vary_together, zeros_like_all

_FULL_PRECISION = {"precision": lax.Precision.HIGHEST, "preferred_element_type": jnp.float32}
_CACHED_BYTES = 2**18  # of one expert's weights that a CPU copies at a time


def block_rows(rows_per_expert: float) -> int:
    """Rows of a block for this path: the mean and two standard deviations of evenly random routing, so that most
    experts need one block, or one row where experts have less than one on average.
    """
    return 1 if rows_per_expert < 1 else math.ceil(rows_per_expert + 2 * math.sqrt(rows_per_expert))


def gate_up(x: Input, weight: Weight, routes: RouteMap, num_routes: int, dtype: DTypeLike) -> Float[Array, "R F"]:
    """See `pallas_kernels.expert_gemm.gate_up`."""
    routes_per_row = num_routes // shape_of(x)[0]
    return _multiply(_Gemm(routes_per_row=routes_per_row, swiglu=True, dtype=jnp.dtype(dtype)), x, weight, routes)


def down(activation: Input, weight: Weight, routes: RouteMap, dtype: DTypeLike) -> Float[Array, "R H"]:
    """See `pallas_kernels.expert_gemm.down`."""
    return _multiply(_Gemm(routes_per_row=1, swiglu=False, dtype=jnp.dtype(dtype)), activation, weight, routes)


def _multiply(gemm: _Gemm, x: Input, weight: Weight, routes: RouteMap) -> jax.Array:
    if isinstance(weight, Codes) or isinstance(x, Codes | Planes):
        return _multiply_codes(gemm, numbers(x), weight, routes)
    return _multiply_blocks(gemm, *vary_together(x, weight, *routes))


@dataclasses.dataclass(frozen=True, kw_only=True)
class _Gemm:
    """What the two GEMMs differ in: the input row of a route, route // routes_per_row, and what follows the product."""

    routes_per_row: int
    swiglu: bool
    dtype: Any

    def columns(self, rows: int) -> int:
        """Output columns of a weight with so many rows an expert."""
        return rows // 2 if self.swiglu else rows

    def finish(self, product: jax.Array) -> jax.Array:
        """The output rows of float32 products."""
        if self.swiglu:
            gate, up = jnp.split(product, 2, axis=-1)
            return swiglu(gate, up, self.dtype)
        return round_to(product, self.dtype).astype(self.dtype)

    def gradient(self, product: jax.Array, gradient: jax.Array) -> jax.Array:
        """The gradient of the products, rounded to the output's dtype, from that of the output rows."""
        gradient = gradient.astype(jnp.float32)
        if self.swiglu:
            gate, up = jnp.split(product, 2, axis=-1)
            gradient = jnp.concatenate(swiglu_gradient(gate, up, gradient, self.dtype), axis=-1)
        return round_to(gradient, self.dtype).astype(self.dtype)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _multiply_blocks(gemm: _Gemm, x: jax.Array, weight: jax.Array, rows: jax.Array, group: jax.Array) -> jax.Array:
    """finish(x[rows] @ weight[group].T) of every block at the rows of its routes; rows of no expert are zero."""
    x, weight, rows, group = map(
        jnp.asarray, (x, weight, rows, group)
    )  # differentiation hands over numpy arrays as such
    num_routes = x.shape[0] * gemm.routes_per_row
    first, left = _split(rows, group, num_experts=weight.shape[0], num_routes=num_routes)

    def gather(own: jax.Array) -> jax.Array:
        return x[jnp.minimum(own // gemm.routes_per_row, x.shape[0] - 1)]

    out = zeros_like_all((num_routes, gemm.columns(weight.shape[1])), gemm.dtype, x, weight)
    if first is not None:
        out = out.at[first].set(gemm.finish(_every_expert(gather(first), weight)), mode="drop")

    def step(own: jax.Array, expert: jax.Array, out: jax.Array) -> jax.Array:
        return out.at[own].set(gemm.finish(_one_expert(gather(own), weight, expert)), mode="drop")

    return left.walk(step, out)


def _multiply_codes(gemm: _Gemm, x: jax.Array, weight: Any, routes: RouteMap) -> jax.Array:
    """As `_multiply_blocks`, an expert's weights decoded when its block comes."""
    num_routes, num_experts = x.shape[0] * gemm.routes_per_row, weight.scales.shape[0]
    rows, group = routes
    used = (group >= 0) & (group < num_experts)
    order = jnp.argsort(~used, stable=True)

    def visit(i: jax.Array, out: jax.Array) -> jax.Array:
        own, expert = rows[order[i]], group[order[i]]
        inputs = x[jnp.minimum(own // gemm.routes_per_row, x.shape[0] - 1)]
        product = lax.dot_general(inputs, decode_expert(weight, expert), (((1,), (1,)), ((), ())), **_FULL_PRECISION)
        return out.at[own].set(gemm.finish(product), mode="drop")

    shape = (num_routes, gemm.columns(weight.values.shape[1]))
    start = zeros_like_all(shape, gemm.dtype, x, rows, group, weight.values, weight.scales)
    return lax.fori_loop(0, jnp.sum(used), visit, start)


def _forward(gemm: _Gemm, *args: jax.Array) -> tuple[jax.Array, tuple[jax.Array, ...]]:
    return _multiply_blocks(gemm, *args), args


def _backward(gemm: _Gemm, saved: tuple[jax.Array, ...], gradient: jax.Array) -> tuple[Any, ...]:
    x, weight, rows, group = map(jnp.asarray, saved)
    num_routes = gradient.shape[0]
    first, left = _split(rows, group, num_experts=weight.shape[0], num_routes=num_routes)

    def gather(own: jax.Array) -> tuple[jax.Array, jax.Array]:
        # An empty row of a block is filled with zeros: it must add nothing, and another row may hold a NaN.
        inputs = x.at[jnp.where(own < num_routes, own // gemm.routes_per_row, x.shape[0])]
        return inputs.get(mode="fill", fill_value=0), gradient.at[own].get(mode="fill", fill_value=0)

    d_rows = zeros_like_all((num_routes, x.shape[1]), jnp.float32, x, weight, gradient)
    d_weight = zeros_like_all(weight.shape, jnp.float32, x, weight, gradient)
    if first is not None:
        inputs, own_gradient = gather(first)
        d_product = gemm.gradient(_every_expert(inputs, weight), own_gradient)
        d_weight = lax.dot_general(d_product, inputs, (((1,), (1,)), ((0,), (0,))), **_FULL_PRECISION)
        own_d_rows = lax.dot_general(d_product, weight, (((2,), (1,)), ((0,), (0,))), **_FULL_PRECISION)
        d_rows = d_rows.at[first].set(own_d_rows, mode="drop")

    def step(own: jax.Array, expert: jax.Array, carry: tuple[jax.Array, jax.Array]) -> tuple[jax.Array, jax.Array]:
        d_rows, d_weight = carry
        inputs, own_gradient = gather(own)
        d_product = gemm.gradient(_one_expert(inputs, weight, expert), own_gradient)
        own_d_rows = lax.dot_general(d_product, weight[expert], (((1,), (0,)), ((), ())), **_FULL_PRECISION)
        own_d_weight = lax.dot_general(d_product, inputs, (((0,), (0,)), ((), ())), **_FULL_PRECISION)
        return d_rows.at[own].set(own_d_rows, mode="drop"), d_weight.at[expert].add(own_d_weight)

    d_rows, d_weight = left.walk(step, (d_rows, d_weight))
    d_x = jnp.sum(d_rows.reshape(x.shape[0], gemm.routes_per_row, x.shape[1]), axis=1)
    return d_x.astype(x.dtype), d_weight.astype(weight.dtype), None, None


_multiply_blocks.defvjp(_forward, _backward)


@dataclasses.dataclass(frozen=True, kw_only=True)
class _Left:
    """Blocks to be multiplied one at a time: the first `steps` of `order`."""

    rows: jax.Array
    group: jax.Array
    order: jax.Array
    steps: int | jax.Array

    def walk[Carry](self, step: Callable[[jax.Array, jax.Array, Carry], Carry], carry: Carry) -> Carry:
        """`carry` after step(rows, expert, carry) of every block."""

        def visit(i: jax.Array, carry: Carry) -> Carry:
            block = self.order[i]
            return step(self.rows[block], self.group[block], carry)

        return lax.fori_loop(0, self.steps, visit, carry)


def _split(rows: jax.Array, group: jax.Array, *, num_experts: int, num_routes: int) -> tuple[jax.Array | None, _Left]:
    """(rows of the first block of every expert [E, M], the other blocks); None where a block holds one row."""
    blocks = jnp.arange(group.shape[0])
    block_rows = rows.shape[1]
    left = (group >= 0) & (group < num_experts)
    first_rows = None
    if block_rows > 1:
        expert = jnp.where(left, group, num_experts)
        first = jnp.full((num_experts + 1,), blocks.size).at[expert].min(blocks)
        is_first = left & (first[expert] == blocks)
        first_rows = jnp.full((num_experts, block_rows), num_routes, jnp.int32)
        first_rows = first_rows.at[jnp.where(is_first, expert, num_experts)].set(rows, mode="drop")
        left = left & ~is_first
    # With one row a block only masked routes leave blocks unused, and a loop of known length never waits for the host.
    return first_rows, _Left(
        rows=jnp.where(left[:, None], rows, num_routes),
        group=group,
        order=jnp.argsort(~left, stable=True),
        steps=blocks.size if block_rows == 1 else jnp.sum(left),
    )


def _every_expert(rows: jax.Array, weight: jax.Array) -> jax.Array:
    """rows [E, M, depth] @ weight [E, columns, depth].T in float32."""
    return lax.dot_general(rows, weight, (((2,), (2,)), ((0,), (0,))), **_FULL_PRECISION)


def _one_expert(rows: jax.Array, weight: jax.Array, expert: jax.Array) -> jax.Array:
    """rows [M, depth] @ weight[expert] [columns, depth].T in float32.

    A CPU walks the columns in pieces whose copy stays in its cache; a last piece that would reach past the end starts
    earlier instead (`dynamic_slice` clamps), and writes the same columns again.
    """
    columns, depth = weight.shape[1:]
    piece = columns if jax.default_backend() == "gpu" else min(columns, max(16, _CACHED_BYTES // (depth * 4)))

    def step(i: jax.Array, product: jax.Array) -> jax.Array:
        own = lax.dynamic_slice(weight, (expert, i * piece, 0), (1, piece, depth))[0]
        part = lax.dot_general(rows, own, (((1,), (1,)), ((), ())), **_FULL_PRECISION)
        return lax.dynamic_update_slice(product, part, (0, i * piece))

    zeros = zeros_like_all((rows.shape[0], columns), jnp.float32, rows, weight, expert)
    return step(jnp.int32(0), zeros) if piece == columns else lax.fori_loop(0, -(-columns // piece), step, zeros)
