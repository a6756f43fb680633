"""What is timed: one layer's experts at given sizes, on several sets of routes, and the least time it can take.

floor = max(bytes of the experts that have a route / memory rate,  6 R H F operations / matrix rate)
"""

from __future__ import annotations

import dataclasses
import statistics
import time
from collections.abc import Callable, Sequence
from typing import Any, Literal

import jax
import jax.numpy as jnp
import numpy as np
from jax.typing import DTypeLike

from muse_jax.checkpoint import QuantizedWeight
from muse_jax.checkpoint.sharded import local_flavour
from muse_jax.quantization import QuantizedArray, quantize_fp8, quantize_mxfp4
from muse_jax.quantization.array import Format
from muse_jax.quantization.inputs import ActivationRule
from muse_jax.reference import PROFILES
from muse_jax.reference import block as reference
from pallas_kernels.target import current_target

Routing = Literal["uniform", "zipf", "hot", "few"]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Sizes:
    """E experts, K routes a token, latent width H, expert width F, model width D."""

    experts: int
    routes_per_token: int
    h: int
    f: int
    d: int


@dataclasses.dataclass(frozen=True, kw_only=True)
class Rates:
    """What the device can do: bytes and operations a second, and where the figures come from."""

    bytes_per_second: float
    flops: float
    source: str


def route_sets(sizes: Sizes, tokens: int, routing: Routing, sets: int) -> np.ndarray:
    """[sets, T, K] distinct experts a token.

    uniform: every expert alike. zipf: expert e with probability ~ 1 / (e + 1). hot: expert 0 in every token, the rest
    uniform. few: all routes on the first K experts. The first token of each set takes experts 0, the two in the middle
    and the last one among its own where K allows, so that the ends of the arrays are always read.
    """
    rng = np.random.default_rng(tokens)
    e, k = sizes.experts, sizes.routes_per_token
    if routing == "few":
        return rng.permuted(np.broadcast_to(np.arange(k), (sets, tokens, k)), axis=-1).astype(np.int32)
    # The K largest of log p + Gumbel noise are K draws without replacement.
    log_p = -np.log(np.arange(1, e + 1)) if routing == "zipf" else np.zeros(e)
    if routing == "hot":
        log_p[0] = np.inf
    keys = log_p + rng.gumbel(size=(sets, tokens, e))
    ids = np.argsort(-keys, axis=-1)[..., :k].astype(np.int32)
    if routing == "uniform" and k >= 4:
        ends = np.array([0, e // 2 - 1, e // 2, e - 1], np.int32)
        others = np.stack([rng.permutation(np.setdiff1d(np.arange(e), ends))[: k - 4] for _ in range(sets)])
        ids[:, 0] = np.concatenate([np.broadcast_to(ends, (sets, 4)), others], axis=1)
    return ids


def local_sets(ids: np.ndarray, experts: int) -> np.ndarray:
    """The route sets as the device with the first `experts` of them sees them: other routes are masked."""
    return np.where(ids < experts, ids, -1).astype(np.int32)


def even_sets(ids: np.ndarray) -> tuple[np.ndarray, int]:
    """(as many routes over as many experts, but evenly, how many experts): what a skewed routing is compared with."""
    sets, tokens, k = ids.shape
    used = max(k, round(statistics.mean(len(np.unique(one)) for one in ids)))
    rng = np.random.default_rng(used)
    steps = rng.permuted(np.broadcast_to(np.arange(tokens), (sets, tokens)), axis=-1)
    return ((steps[:, :, None] * k + np.arange(k)) % used).astype(np.int32), used


def floor_us(sizes: Sizes, ids: np.ndarray, rates: Rates, itemsize: float) -> float:
    """The floor of one call in microseconds, averaged over the route sets."""
    weights = 3 * sizes.h * sizes.f
    used = statistics.mean(len(np.unique(one[one >= 0])) for one in ids)
    routes = np.count_nonzero(ids >= 0) / len(ids)
    return 1e6 * max(used * weights * itemsize / rates.bytes_per_second, routes * 2 * weights / rates.flops)


def block_floor_us(sizes: Sizes, ids: np.ndarray, rates: Rates, itemsize: float, dense_itemsize: int) -> float:
    """The floor of the whole block: that of its experts, and both projections' and the router's weights beside them."""
    dense, router = 2 * sizes.d * sizes.h, sizes.d * sizes.experts
    tokens = ids.shape[1]
    return floor_us(sizes, ids, rates, itemsize) + 1e6 * max(
        (dense * dense_itemsize + router * 4) / rates.bytes_per_second, tokens * 2 * dense / rates.flops
    )


def device_rates() -> Rates:
    """The rates of a GPU in `pallas_kernels.target`, or what this device does in a copy and a product right now."""
    target = current_target()
    if target is not None:
        return Rates(
            bytes_per_second=target.bytes_per_second,
            flops=target.bf16_flops,
            source=f"{target.chip}, {target.rates_are}",
        )
    block = jnp.ones((2**26,), jnp.float32)
    square = jnp.ones((1024, 1024), jnp.float32)
    copy = jax.jit(lambda x: x + 1)
    product = jax.jit(lambda x: x @ x)
    return Rates(
        bytes_per_second=2 * block.nbytes / (1e-6 * train_us(copy, [(block,)], 4)),
        flops=2 * 1024**3 / (1e-6 * train_us(product, [(square,)], 4)),
        source="a float32 copy and product measured here",
    )


def train_us(call: Callable[..., Any], arguments: Sequence[tuple[Any, ...]], repeats: int) -> float:
    """Microseconds a call takes with calls queued back to back over all arguments: the median of five such trains."""
    jax.block_until_ready([call(*one) for one in arguments])
    laps = []
    for _ in range(5):
        start = time.perf_counter()
        jax.block_until_ready([call(*arguments[i % len(arguments)]) for i in range(repeats)])
        laps.append((time.perf_counter() - start) / repeats)
    return 1e6 * statistics.median(laps)


def random_weight(keys: jax.Array, shape: tuple[int, int], dtype: DTypeLike, form: Format | None) -> Any:
    """Normal values of a weight [E, *shape] of one key an expert, or their codes, made one expert at a time: the random
    bits of all at once would not fit beside the weights.
    """

    def one(key: jax.Array) -> Any:
        weight = (jax.random.normal(key, shape) * shape[-1] ** -0.5).astype(dtype)
        if form is None:
            return weight
        return quantize_mxfp4(weight) if form == "mxfp4" else quantize_fp8(weight, local_flavour())

    weight = jax.jit(lambda: jax.lax.map(one, keys))()
    return weight if form is None else jax.jit(QuantizedArray.held)(weight)


def bytes_a_weight(dtype: DTypeLike, form: Format | None) -> float:
    """Of memory, the scale of an MXFP4 block included; scales of FP8 rows are few."""
    return {"fp8": 1, "mxfp4": 17 / 32, None: jnp.dtype(dtype).itemsize}[form]


def row_error(
    x: Any, rows: Any, ids: np.ndarray, gate_up: Any, down: Any, activation_rule: ActivationRule | None = None
) -> float:
    """The largest relative error of the first token's rows against float64; of quantized experts, against the same
    codes of weights and inputs multiplied in float32 and rounded as vLLM rounds.
    """
    f = down.shape[2]
    worst = 0.0
    if isinstance(gate_up, QuantizedArray):
        chosen = ids[0][ids[0] >= 0]
        weights = [_experts(weight, chosen) for weight in (gate_up, down)]
        local = np.arange(len(chosen), dtype=np.int32)[None]
        profile = PROFILES["vllm"]
        activation = reference.activation(np.asarray(x[:1]), local, weights[0], profile, activation_rule)
        wanted = reference.expert_rows(activation, local, weights[1], profile, activation_rule)[0]
        found = np.asarray(rows[0], np.float64)[ids[0] >= 0]
        wanted = np.asarray(wanted, np.float64)
        return float(np.max(np.linalg.norm(found - wanted, axis=-1) / np.linalg.norm(wanted, axis=-1)))
    for k, expert in enumerate(ids[0]):
        if expert < 0:
            continue
        product = np.asarray(gate_up[int(expert)], np.float64) @ np.asarray(x[0], np.float64)
        want = np.asarray(down[int(expert)], np.float64) @ (product[:f] / (1 + np.exp(-product[:f])) * product[f:])
        got = np.asarray(rows[0, k], np.float64)
        worst = max(worst, float(np.linalg.norm(got - want) / np.linalg.norm(want)))
    return worst


def _experts(weight: QuantizedArray, chosen: np.ndarray) -> QuantizedWeight:
    """Some experts of a weight in host memory."""
    part = dataclasses.replace(weight, values=weight.values[chosen], scales=weight.scales[chosen])
    return part.to_host()
