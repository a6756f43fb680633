"""Expert rows: what each chosen expert makes of its token, one unweighted row per route.

    activation[t, k]  = swiglu(expert_input[t] @ gate_e.T, expert_input[t] @ up_e.T)      e = topk_ids[t, k]
    expert_rows[t, k] = activation[t, k] @ down_e.T
A masked route (an id outside 0..E-1) has a row of exact zeros.
"""

from __future__ import annotations

from jaxtyping import Array, Float, Int32

from pallas_kernels import expert_gemm
from pallas_kernels.dispatch import Implementation, resolve
from pallas_kernels.route_map import route_map


def expert_rows(
    expert_input: Float[Array, "T H"],
    topk_ids: Int32[Array, "T K"],
    gate_up: Float[Array, "E F2 H"],
    down: Float[Array, "E H F"],
    *,
    implementation: Implementation | None = None,
) -> tuple[Float[Array, "T K F"], Float[Array, "T K H"]]:
    """(activation, expert_rows) in the dtype of expert_input. Activations of masked routes are undefined.

    Args:
      expert_input: latent of each token after pre_expert_norm, bfloat16 or float32.
      topk_ids: expert of each route.
      gate_up: gate rows 0..F-1 then up rows F..2F-1 of each expert.
      down: down projection of each expert.
      implementation: "pallas" (interpreted on a CPU), "xla", or None for the best here.
    """
    tokens, routes_per_token = topk_ids.shape
    num_experts, h, f = down.shape
    if gate_up.shape != (num_experts, 2 * f, h) or expert_input.shape != (tokens, h):
        raise ValueError(
            f"expert_input is {expert_input.shape}, topk_ids {topk_ids.shape}, gate_up {gate_up.shape}, "
            f"down {down.shape}; expected [T, H], [T, K], [E, 2F, H], [E, H, F]"
        )
    implementation = resolve(implementation)
    block_rows = expert_gemm.choose_block_rows(topk_ids.size, num_experts, implementation)
    routes = route_map(topk_ids, num_experts=num_experts, block_rows=block_rows, implementation=implementation)
    activation = expert_gemm.gate_up(
        expert_input, gate_up, routes, routes_per_token=routes_per_token, implementation=implementation
    )
    rows = expert_gemm.down(activation, down, routes, implementation=implementation)
    return activation.reshape(tokens, routes_per_token, f), rows.reshape(tokens, routes_per_token, h)
