"""Finalize against float64: norm each row, then weight, then sum; masked and NaN rows stay out."""

from __future__ import annotations

import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels import finalize as package
from tests.one_program import one_program
from tests.pallas_kernels.cases import CASES, Case, row_error

finalize = one_program(package.finalize)

# float32: a few roundings of 2^-24 on each of K terms; bfloat16: one rounding of the sum, at most 2^-8 of each element.
TOLERANCE = {"float32": 1e-6, "bfloat16": 2**-8}
EPS = 1e-8


def problem(case: Case, dtype: str):
    """(rows, topk_weights, topk_ids, gain): rows of very unequal size, gains that matter, weights that sum to one."""
    rng = np.random.default_rng(11)
    ids = case.ids()
    ids = np.where(ids >= case.experts, -1, ids)
    rows = rng.standard_normal((*ids.shape, case.h)) * 10.0 ** rng.integers(-3, 4, (*ids.shape, 1))
    weights = rng.random(ids.shape)
    gain = 0.5 * rng.standard_normal(case.h)
    return (
        jnp.asarray(rows, dtype),
        jnp.asarray(weights / weights.sum(1, keepdims=True), jnp.float32),
        jnp.asarray(ids),
        jnp.asarray(gain, dtype),
    )


def truth(rows, topk_weights, topk_ids, gain, broken: str | None = None) -> np.ndarray:
    """[T, H] in float64; `broken` names a deliberate mistake."""
    rows, topk_weights, gain = (np.asarray(a, np.float64) for a in (rows, topk_weights, gain))
    ids = np.asarray(topk_ids)
    if broken == "no_centre":
        gain = gain - 1
    z = np.where(ids[..., None] >= 0, rows, 0)
    if broken == "weight_before_norm":
        z = np.sum(z * topk_weights[..., None], axis=1, keepdims=True)
        topk_weights = np.ones((rows.shape[0], 1))
        ids = np.zeros((rows.shape[0], 1))
    gained = z * (1 + gain)
    n = gained / np.sqrt(np.mean(gained**2, axis=-1, keepdims=True) + EPS)
    if broken == "gain_after_variance":
        n = z / np.sqrt(np.mean(z**2, axis=-1, keepdims=True) + EPS) * (1 + gain)
    if broken == "eps_forgotten":
        n = gained / np.sqrt(np.mean(gained**2, axis=-1, keepdims=True) + 1e-300)
    if broken == "row_dropped":
        n[-1, -1] = 0
    return np.sum(n * np.where(ids >= 0, topk_weights, 0)[..., None], axis=1)


@pytest.mark.parametrize("case", CASES, ids=lambda c: c.name)
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("implementation", ["xla", "pallas"])
def test_finalize(case: Case, dtype: str, implementation) -> None:
    rows, topk_weights, ids, gain = problem(case, dtype)
    poisoned = jnp.where(ids[..., None] >= 0, rows, jnp.nan)
    out = finalize(poisoned, topk_weights, ids, gain, eps=EPS, implementation=implementation)
    assert out.dtype == rows.dtype
    assert row_error(out, truth(rows, topk_weights, ids, gain)) < TOLERANCE[dtype]


@pytest.mark.parametrize("broken", ["no_centre", "weight_before_norm", "gain_after_variance", "row_dropped"])
def test_tolerance_catches_mistakes(broken: str) -> None:
    rows, topk_weights, ids, gain = problem(CASES[3], "bfloat16")
    out = finalize(rows, topk_weights, ids, gain, eps=EPS, implementation="xla")
    assert row_error(out, truth(rows, topk_weights, ids, gain, broken)) > 10 * TOLERANCE["bfloat16"]


@pytest.mark.parametrize("implementation", ["xla", "pallas"])
def test_eps_counts_for_small_rows_and_zero_rows_give_zero(implementation) -> None:
    rows = jnp.stack([jnp.zeros((2, 40)), jnp.full((2, 40), 1e-4)])
    weights, ids, gain = jnp.full((2, 2), 0.5), jnp.zeros((2, 2), jnp.int32), jnp.zeros(40)
    out = np.asarray(finalize(rows, weights, ids, gain, eps=EPS, implementation=implementation))
    assert not out[0].any()
    np.testing.assert_allclose(out[1], 1e-4 / np.sqrt(2e-8), rtol=1e-6)


@pytest.mark.parametrize("implementation", ["xla", "pallas"])
def test_live_nan_row_touches_its_own_token_only(implementation) -> None:
    rows, topk_weights, ids, gain = problem(CASES[3], "float32")
    clean = finalize(rows, topk_weights, ids, gain, eps=EPS, implementation=implementation)
    out = finalize(rows.at[4, 1, 3].set(jnp.nan), topk_weights, ids, gain, eps=EPS, implementation=implementation)
    others = np.arange(rows.shape[0]) != 4
    np.testing.assert_array_equal(np.asarray(out)[others], np.asarray(clean)[others])
    assert np.isnan(np.asarray(out)[4]).all()


@pytest.mark.parametrize("implementation", ["xla", "pallas"])
def test_float32_rows_to_bfloat16(implementation) -> None:
    """Rows that were summed over ranks arrive in float32 and are rounded once, at the end."""
    rows, topk_weights, ids, gain = problem(CASES[5], "float32")
    out = finalize(rows, topk_weights, ids, gain, eps=EPS, out_dtype=jnp.bfloat16, implementation=implementation)
    assert out.dtype == jnp.bfloat16
    assert row_error(out, truth(rows, topk_weights, ids, gain)) < TOLERANCE["bfloat16"]


@pytest.mark.parametrize("implementation", ["xla", "pallas"])
def test_no_tokens(implementation) -> None:
    out = finalize(
        jnp.zeros((0, 2, 24), jnp.bfloat16),
        jnp.zeros((0, 2)),
        jnp.zeros((0, 2), jnp.int32),
        jnp.zeros(24),
        eps=EPS,
        implementation=implementation,
    )
    assert out.shape == (0, 24)
    assert out.dtype == jnp.bfloat16


def test_shapes_are_checked() -> None:
    rows, topk_weights, ids, gain = problem(CASES[3], "float32")
    with pytest.raises(ValueError, match=r"expected \[T, K, H\], \[T, K\], \[T, K\]"):
        finalize(rows, topk_weights[:, :1], ids, gain, eps=EPS)
    with pytest.raises(ValueError, match="expected one gain a column"):
        finalize(rows, topk_weights, ids, gain[1:], eps=EPS)
