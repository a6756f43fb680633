"""The expert GEMMs against float64: every route its own expert's product, unweighted; masked rows exactly zero."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest

from muse_jax import experts
from pallas_kernels import expert_gemm
from pallas_kernels.route_map import UNUSED, Counts, route_map
from tests.one_program import one_program
from tests.pallas_kernels.cases import CASES, Case, row_error

# Largest relative error of a row. float32: sums of up to 130 products in any order, 2^-24 each, with a wide margin.
# bfloat16: the truth has the same roundings; what differs is a value that lay between two bfloat16 numbers (2^-8 of
# it).
TOLERANCE = {"float32": 2e-6, "bfloat16": 4e-3}


expert_rows = one_program(experts.expert_rows)


def problem(case: Case, dtype: str) -> tuple[jax.Array, jax.Array, jax.Array, jax.Array]:
    """(x, ids, gate_up, down) of a case with unit-variance inputs."""
    rng = np.random.default_rng(7)
    x = rng.standard_normal((case.tokens, case.h))
    gate_up = rng.standard_normal((case.experts, 2 * case.f, case.h)) / np.sqrt(case.h)
    down = rng.standard_normal((case.experts, case.h, case.f)) / np.sqrt(case.f)
    return jnp.asarray(x, dtype), jnp.asarray(case.ids()), jnp.asarray(gate_up, dtype), jnp.asarray(down, dtype)


def truth(x, ids, gate_up, down, broken: str | None = None) -> np.ndarray:
    """[T, K, H] rows in float64, rounded where the dtype of x rounds; `broken` names a deliberate mistake."""
    rounded = lambda a: a.astype(x_dtype).astype(np.float64)
    x_dtype = np.asarray(x).dtype
    x, gate_up, down = (np.asarray(a, np.float64) for a in (x, gate_up, down))
    ids, f = np.asarray(ids), down.shape[2]
    if broken == "experts_swapped":
        gate_up = gate_up[::-1]
    if broken == "gate_up_swapped":
        gate_up = np.concatenate([gate_up[:, f:], gate_up[:, :f]], axis=1)
    rows = np.zeros((*ids.shape, x.shape[1]))
    for (t, k), e in np.ndenumerate(ids):
        if 0 <= e < gate_up.shape[0]:
            h = rounded(gate_up[e] @ x[t])
            rows[t, k] = rounded(down[e] @ rounded(rounded(h[:f] / (1 + np.exp(-h[:f]))) * h[f:]))
    if broken == "row_dropped":
        rows[-1, -1] = 0
    return rows


@pytest.mark.parametrize("case", CASES, ids=lambda c: c.name)
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("implementation", ["xla", "pallas"])
def test_rows(case: Case, dtype: str, implementation) -> None:
    x, ids, gate_up, down = problem(case, dtype)
    activation, rows = expert_rows(x, ids, gate_up, down, implementation=implementation)
    assert rows.dtype == activation.dtype == x.dtype
    assert activation.shape == (*ids.shape, case.f)
    masked = (ids < 0) | (ids >= case.experts)
    assert not np.asarray(rows)[np.asarray(masked)].any(), "a masked route's row must be exactly zero"
    assert row_error(rows, truth(x, ids, gate_up, down)) < TOLERANCE[dtype]


@pytest.mark.parametrize("broken", ["experts_swapped", "gate_up_swapped", "row_dropped"])
def test_tolerance_catches_mistakes(broken: str) -> None:
    case = CASES[4]
    x, ids, gate_up, down = problem(case, "bfloat16")
    _, rows = expert_rows(x, ids, gate_up, down, implementation="xla")
    assert row_error(rows, truth(x, ids, gate_up, down, broken)) > 10 * TOLERANCE["bfloat16"]


@pytest.mark.parametrize("implementation", ["xla", "pallas"])
def test_no_tokens(implementation) -> None:
    activation, rows = expert_rows(
        jnp.zeros((0, 24)),
        jnp.zeros((0, 2), jnp.int32),
        jnp.zeros((3, 20, 24)),
        jnp.zeros((3, 24, 10)),
        implementation=implementation,
    )
    assert activation.shape == (0, 2, 10)
    assert rows.shape == (0, 2, 24)


@pytest.mark.parametrize("implementation", ["xla", "pallas"])
def test_nan_row_touches_no_other(implementation) -> None:
    case = Case("nan", 18, 2, 4, 24, 40)
    x, ids, gate_up, down = problem(case, "float32")
    _, clean = expert_rows(x, ids, gate_up, down, implementation=implementation)
    _, rows = expert_rows(x.at[5].set(jnp.nan), ids, gate_up, down, implementation=implementation)
    others = np.arange(18) != 5
    np.testing.assert_array_equal(np.asarray(rows)[others], np.asarray(clean)[others])
    assert np.isnan(np.asarray(rows)[5]).all()


@pytest.mark.parametrize("implementation", ["xla", "pallas"])
def test_masked_activation_may_be_poison(implementation) -> None:
    case = CASES[5]
    x, ids, gate_up, down = problem(case, "float32")
    routes = route_map(ids, num_experts=case.experts, block_rows=16, implementation=implementation)
    activation = expert_gemm.gate_up(
        x, gate_up, routes, routes_per_token=case.routes_per_token, implementation=implementation
    )
    masked = ((ids < 0) | (ids >= case.experts)).reshape(-1, 1)
    rows = expert_gemm.down(jnp.where(masked, jnp.nan, activation), down, routes, implementation=implementation)
    assert row_error(rows.reshape(*ids.shape, -1), truth(x, ids, gate_up, down)) < TOLERANCE["float32"]


@pytest.mark.parametrize(("block_rows", "tails"), [(64, (16,)), (128, (16, 32, 64)), (192, (64, 128))])
def test_block_sizes(block_rows: int, tails: tuple[int, ...]) -> None:
    """Blocks of several powers of two, and blocks whose live rows need a part of them: experts from 0 rows upwards."""
    counts = (0, 1, 16, 17, 50, 65, 128, 150, block_rows, block_rows + 1)
    ids = np.random.default_rng(1).permutation(np.repeat(np.arange(len(counts), dtype=np.int32), counts))
    case = Case("sizes", len(ids), 1, len(counts), 72, 40)
    x, _, gate_up, down = problem(case, "bfloat16")
    ids = jnp.asarray(ids[:, None])
    tile = expert_gemm.Tile(cols=64, depth=64, num_warps=4, num_stages=2, group=4, tails=tails)
    routes = route_map(ids, num_experts=case.experts, block_rows=block_rows, implementation="pallas")
    activation = expert_gemm.gate_up(x, gate_up, routes, routes_per_token=1, implementation="pallas", tile=tile)
    rows = expert_gemm.down(activation, down, routes, implementation="pallas", tile=tile).reshape(*ids.shape, -1)
    assert row_error(rows, truth(x, ids, gate_up, down)) < TOLERANCE["bfloat16"]


def test_crowded_experts_have_launches_of_their_own() -> None:
    """Two hot experts among many: the same rows as in one launch, masked routes included."""
    case = Case("crowded", 40, 2, 12, 40, 24, masked=0.1)
    x, ids, gate_up, down = problem(case, "float32")
    ids = ids.at[:30, 0].set(3).at[5:36, 1].set(7)
    tile = expert_gemm.Tile(cols=32, depth=32, num_warps=4, num_stages=2)
    few, many = (
        route_map(ids, num_experts=12, block_rows=16, counts=counts, implementation="pallas")
        for counts in (Counts(most=16), Counts(least=17))
    )
    assert {3, 7} == set(np.asarray(many.group).tolist()) - {UNUSED}
    assert not {3, 7} & set(np.asarray(few.group).tolist())
    activation = rows = None
    for routes in (few, many):
        activation = expert_gemm.gate_up(
            x, gate_up, routes, routes_per_token=2, implementation="pallas", tile=tile, into=activation
        )
    for routes in (few, many):
        rows = expert_gemm.down(activation, down, routes, implementation="pallas", tile=tile, into=rows)
    masked = np.asarray((ids < 0) | (ids >= 12))
    rows = np.asarray(rows).reshape(*ids.shape, -1)
    assert not rows[masked].any()
    assert row_error(rows, truth(x, ids, gate_up, down)) < TOLERANCE["float32"]


def xla_flops(experts: int) -> float:
    """What XLA counts for 16 tokens with 2 routes each; it counts a loop's body once."""
    shapes = (
        jax.ShapeDtypeStruct((16, 64), jnp.float32),
        jax.ShapeDtypeStruct((16, 2), jnp.int32),
        jax.ShapeDtypeStruct((experts, 96, 64), jnp.float32),
        jax.ShapeDtypeStruct((experts, 64, 48), jnp.float32),
    )
    compiled = jax.jit(lambda *a: expert_rows(*a, implementation="xla")[1]).lower(*shapes).compile()
    analysis = compiled.cost_analysis()
    assert analysis is not None
    return analysis["flops"]


@pytest.mark.parametrize("experts", [2, 8, 32, 128, 1024])
def test_xla_flops_do_not_grow_with_experts(experts: int) -> None:
    """A dense product over all experts would cost E times what the 32 routes need; blocks cost a small multiple of
    it.
    """
    needed = 32 * 2 * (96 * 64 + 64 * 48)
    one_block_each = 3.2 * needed  # mean + 2 sqrt(mean) rows an expert, at its worst with one route an expert
    assert xla_flops(experts) < one_block_each


def test_swiglu_rounds_twice() -> None:
    """Rounding silu before the product, as the source framework does, is not rounding the product once."""
    rng = np.random.default_rng(3)
    x = jnp.asarray(rng.standard_normal((64, 32)), jnp.bfloat16)
    weight = jnp.asarray(rng.standard_normal((1, 64, 32)) / 4, jnp.bfloat16)
    routes = route_map(jnp.zeros((64, 1), jnp.int32), num_experts=1, block_rows=16, implementation="xla")
    r16 = lambda a: a.astype(ml_dtypes.bfloat16).astype(np.float32)
    product = r16(np.asarray(x, np.float32) @ np.asarray(weight[0], np.float32).T)
    gate, up = product[:, :32], product[:, 32:]
    silu = gate / (1 + np.exp(-gate))
    for implementation in ("xla", "pallas"):
        got = np.asarray(
            expert_gemm.gate_up(x, weight, routes, routes_per_token=1, implementation=implementation), np.float32
        )
        assert np.mean(got == r16(r16(silu) * up)) > 0.995
        assert np.mean(got == r16(silu * up)) < 0.9


def test_dtypes_and_shapes_are_checked() -> None:
    x, ids, gate_up, down = problem(CASES[2], "float32")
    with pytest.raises(TypeError, match="expected both bfloat16 or both float32"):
        expert_rows(x.astype(jnp.bfloat16), ids, gate_up, down)
    with pytest.raises(ValueError, match=r"expected \[T, H\], \[T, K\], \[E, 2F, H\], \[E, H, F\]"):
        expert_rows(x, ids, gate_up[:, 1:], down)
    with pytest.raises(ValueError, match="implementation is 'cuda'"):
        expert_rows(x, ids, gate_up, down, implementation="cuda")
