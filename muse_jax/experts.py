"""Expert rows: what each chosen expert makes of its token, one unweighted row per route.

    activation[t, k]  = swiglu(expert_input[t] @ gate_e.T, expert_input[t] @ up_e.T)      e = topk_ids[t, k]
    expert_rows[t, k] = activation[t, k] @ down_e.T
A masked route (an id outside 0..E-1) has a row of exact zeros.
"""

from __future__ import annotations

from typing import NamedTuple

from jax.typing import DTypeLike
from jaxtyping import Array, Float, Int32

from pallas_kernels import expert_gemm
from pallas_kernels.dispatch import Implementation, resolve
from pallas_kernels.expert_gemm import Tile, choose_config, xla_block_rows
from pallas_kernels.route_map import RouteMap, route_map


def expert_rows(
    expert_input: Float[Array, "T H"],
    topk_ids: Int32[Array, "T K"],
    gate_up: Float[Array, "E F2 H"],
    down: Float[Array, "E H F"],
    *,
    spread_over: int | None = None,
    implementation: Implementation | None = None,
) -> tuple[Float[Array, "T K F"], Float[Array, "T K H"]]:
    """(activation, expert_rows) in the dtype of expert_input. Activations of masked routes are undefined.

    Args:
      expert_input: latent of each token after pre_expert_norm, bfloat16 or float32.
      topk_ids: expert of each route.
      gate_up: gate rows 0..F-1 then up rows F..2F-1 of each expert.
      down: down projection of each expert.
      spread_over: experts that the routes go to, where more than these E; it only sizes the blocks.
      implementation: "pallas" (interpreted on a CPU), "xla", or None for the best here.
    """
    num_experts, h, f = down.shape
    tokens = topk_ids.shape[0]
    if gate_up.shape != (num_experts, 2 * f, h) or expert_input.shape != (tokens, h):
        raise ValueError(
            f"expert_input is {expert_input.shape}, topk_ids {topk_ids.shape}, gate_up {gate_up.shape}, "
            f"down {down.shape}; expected [T, H], [T, K], [E, 2F, H], [E, H, F]"
        )
    plan = _plan(topk_ids, expert_input.dtype, down.shape, spread_over, implementation)
    activation = _activation(expert_input, topk_ids, gate_up, plan)
    return activation, _rows(activation, down, plan)


def expert_activation(
    expert_input: Float[Array, "T H"],
    topk_ids: Int32[Array, "T K"],
    gate_up: Float[Array, "E F2 H"],
    *,
    spread_over: int | None = None,
    implementation: Implementation | None = None,
) -> Float[Array, "T K F"]:
    """The first half of `expert_rows`."""
    num_experts, two_f, h = gate_up.shape
    plan = _plan(topk_ids, expert_input.dtype, (num_experts, h, two_f // 2), spread_over, implementation)
    return _activation(expert_input, topk_ids, gate_up, plan)


def down_rows(
    activation: Float[Array, "T K F"],
    topk_ids: Int32[Array, "T K"],
    down: Float[Array, "E H F"],
    *,
    spread_over: int | None = None,
    implementation: Implementation | None = None,
) -> Float[Array, "T K H"]:
    """The second half of `expert_rows`, of as many tokens as are given."""
    plan = _plan(topk_ids, activation.dtype, down.shape, spread_over, implementation)
    return _rows(activation, down, plan)


class _Plan(NamedTuple):
    """The row blocks both GEMMs walk and how each is run."""

    routes: RouteMap
    implementation: Implementation
    gate_up: Tile | None
    down: Tile | None


def _plan(
    topk_ids: Array,
    dtype: DTypeLike,
    down_shape: tuple[int, ...],
    spread_over: int | None,
    implementation: Implementation | None,
) -> _Plan:
    num_experts, h, f = down_shape
    implementation = resolve(implementation)
    rows_per_expert = topk_ids.size / (spread_over or num_experts)
    if implementation == "xla":
        block_rows, gate_up, down = xla_block_rows(rows_per_expert), None, None
    else:
        config = choose_config(rows_per_expert, dtype, experts=num_experts, h=h, f=f)
        block_rows, gate_up, down = config.block_rows, config.gate_up, config.down
    routes = route_map(topk_ids, num_experts=num_experts, block_rows=block_rows, implementation=implementation)
    return _Plan(routes=routes, implementation=implementation, gate_up=gate_up, down=down)


def _activation(expert_input: Array, topk_ids: Array, gate_up: Array, plan: _Plan) -> Array:
    tokens, routes_per_token = topk_ids.shape
    flat = expert_gemm.gate_up(
        expert_input,
        gate_up,
        plan.routes,
        routes_per_token=routes_per_token,
        implementation=plan.implementation,
        tile=plan.gate_up,
    )
    return flat.reshape(tokens, routes_per_token, flat.shape[1])


def _rows(activation: Array, down: Array, plan: _Plan) -> Array:
    tokens, routes_per_token, f = activation.shape
    flat = expert_gemm.down(
        activation.reshape(tokens * routes_per_token, f),
        down,
        plan.routes,
        implementation=plan.implementation,
        tile=plan.down,
    )
    return flat.reshape(tokens, routes_per_token, flat.shape[1])
