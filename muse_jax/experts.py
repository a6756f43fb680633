"""Expert rows: what each chosen expert makes of its token, one unweighted row per route.

    activation[t, k]  = swiglu(expert_input[t] @ gate_e.T, expert_input[t] @ up_e.T)      e = topk_ids[t, k]
    expert_rows[t, k] = activation[t, k] @ down_e.T
A masked route (an id outside 0..E-1) has a row of exact zeros.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import NamedTuple

from jax.typing import DTypeLike
from jaxtyping import Array, Float, Int32

from pallas_kernels import expert_gemm
from pallas_kernels.dispatch import Implementation, resolve
from pallas_kernels.expert_gemm import Tile, choose_config, xla_block_rows
from pallas_kernels.route_map import Counts, RouteMap, route_map


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


class _Launch(NamedTuple):
    """Row blocks that both GEMMs walk, and how."""

    routes: RouteMap
    gate_up: Tile | None
    down: Tile | None


class _Plan(NamedTuple):
    """One launch for all experts, or one for those with few rows and one for the crowded."""

    implementation: Implementation
    launches: tuple[_Launch, ...]


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
    make_map = functools.partial(route_map, topk_ids, num_experts=num_experts, implementation=implementation)
    if implementation == "xla":
        return _Plan("xla", (_Launch(make_map(block_rows=xla_block_rows(rows_per_expert)), None, None),))
    config = choose_config(rows_per_expert, dtype, experts=num_experts, h=h, f=f)
    crowded = config.crowded
    # No expert has more rows than there are tokens.
    if crowded is None or config.crowded_from is None or topk_ids.shape[0] < config.crowded_from:
        return _Plan("pallas", (_Launch(make_map(block_rows=config.block_rows), config.gate_up, config.down),))
    few, many = Counts(most=config.crowded_from - 1), Counts(least=config.crowded_from)
    return _Plan(
        "pallas",
        (
            _Launch(make_map(block_rows=config.block_rows, counts=few), config.gate_up, config.down),
            _Launch(make_map(block_rows=crowded.block_rows, counts=many), crowded.gate_up, crowded.down),
        ),
    )


def _activation(expert_input: Array, topk_ids: Array, gate_up: Array, plan: _Plan) -> Array:
    tokens, routes_per_token = topk_ids.shape

    def run(launch: _Launch, into: Array | None) -> Array:
        return expert_gemm.gate_up(
            expert_input,
            gate_up,
            launch.routes,
            routes_per_token=routes_per_token,
            implementation=plan.implementation,
            tile=launch.gate_up,
            into=into,
        )

    flat = _run_all(run, plan)
    return flat.reshape(tokens, routes_per_token, flat.shape[1])


def _rows(activation: Array, down: Array, plan: _Plan) -> Array:
    tokens, routes_per_token, f = activation.shape
    rows = activation.reshape(tokens * routes_per_token, f)

    def run(launch: _Launch, into: Array | None) -> Array:
        return expert_gemm.down(
            rows, down, launch.routes, implementation=plan.implementation, tile=launch.down, into=into
        )

    flat = _run_all(run, plan)
    return flat.reshape(tokens, routes_per_token, flat.shape[1])


def _run_all(run: Callable[[_Launch, Array | None], Array], plan: _Plan) -> Array:
    """Every launch, each into the rows that the one before has left."""
    first, *others = plan.launches
    flat = run(first, None)
    for launch in others:
        flat = run(launch, flat)
    return flat
