"""Routing against numpy: sets, order, ties, weights, and one rule for values that are not finite."""

from __future__ import annotations

import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pallas_kernels import router
from tests.one_program import one_program

route = one_program(router.route)
MAX = np.finfo(np.float32).max


def truth(logits, bias, k, *, scoring="sigmoid", eps=1e-15, scale=1.0, broken=None):
    """(topk_weights, topk_ids) by a stable sort in float64 on float32 scores; `broken` names a deliberate mistake."""
    finite = lambda v: np.where(np.isnan(v), -MAX, np.clip(v, -MAX, MAX)).astype(np.float32)
    logits = finite(np.asarray(logits, np.float32)).astype(np.float64)
    with np.errstate(over="ignore"):
        if scoring == "sigmoid":
            scores = 1 / (1 + np.exp(-logits))
        else:
            raised = np.exp(logits - logits.max(1, keepdims=True))
            scores = raised / raised.sum(1, keepdims=True)
        biased = finite(scores.astype(np.float32) + np.asarray(bias, np.float32))
    if broken == "no_bias":
        biased = scores
    ids = np.argsort(-biased, axis=1, kind="stable")[:, :k]
    if broken == "highest_index_on_ties":
        ids = (scores.shape[1] - 1 - np.argsort(-biased[:, ::-1], axis=1, kind="stable"))[:, :k]
    chosen = np.take_along_axis(biased if broken == "biased_weights" else scores, ids, axis=1)
    total = 1.0 if broken == "not_renormalised" else chosen.sum(1, keepdims=True) + eps
    return chosen / total * scale, ids


def agrees(got, want) -> bool:
    """Same experts in the same order, weights within 4 float32 ulp of exp, sum and division each (1e-6)."""
    return bool(
        np.array_equal(np.asarray(got[1]), want[1]) and np.allclose(np.asarray(got[0]), want[0], rtol=1e-6, atol=1e-12)
    )


def random_logits(tokens: int, experts: int):
    rng = np.random.default_rng(tokens + experts)
    return rng.standard_normal((tokens, experts)).astype(np.float32), (rng.random(experts) - 0.5).astype(np.float32)


@pytest.mark.parametrize("scoring", ["sigmoid", "softmax"])
@pytest.mark.parametrize("implementation", ["xla", "pallas"])
@pytest.mark.parametrize("tokens,experts,k", [(1, 256, 8), (33, 16, 4), (5, 7, 3), (3, 5, 5), (2, 1, 1)])
def test_route(tokens: int, experts: int, k: int, implementation, scoring) -> None:
    logits, bias = random_logits(tokens, experts)
    got = route(
        jnp.asarray(logits),
        jnp.asarray(bias),
        routes_per_token=k,
        scoring=scoring,
        route_scale=2.5,
        implementation=implementation,
    )
    assert got[0].dtype == jnp.float32
    assert got[1].dtype == jnp.int32
    assert agrees(got, truth(logits, bias, k, scoring=scoring, scale=2.5))


@pytest.mark.parametrize("implementation", ["xla", "pallas"])
def test_ties_take_the_lowest_index(implementation) -> None:
    logits, bias = np.zeros((2, 12), np.float32), np.zeros(12, np.float32)
    logits[1, 7] = 1.0
    _, ids = route(jnp.asarray(logits), jnp.asarray(bias), routes_per_token=4, implementation=implementation)
    np.testing.assert_array_equal(ids, [[0, 1, 2, 3], [7, 0, 1, 2]])


@pytest.mark.parametrize("broken", ["no_bias", "biased_weights", "not_renormalised", "highest_index_on_ties"])
def test_check_catches_mistakes(broken: str) -> None:
    logits, bias = random_logits(33, 16)
    logits[:, 8:] = logits[:, :8]
    bias[8:] = bias[:8]
    got = route(jnp.asarray(logits), jnp.asarray(bias), routes_per_token=5)
    assert agrees(got, truth(logits, bias, 5))
    assert not agrees(got, truth(logits, bias, 5, broken=broken))


NON_FINITE = [np.nan, np.inf, -np.inf, MAX, -MAX, 0.0, 1.0, -3.0]


@pytest.mark.parametrize("scoring", ["sigmoid", "softmax"])
def test_non_finite_rule(scoring) -> None:
    rng = np.random.default_rng(5)
    logits = rng.choice(np.asarray(NON_FINITE, np.float32), (64, 8))
    logits[0], logits[1], logits[2] = np.nan, np.inf, -np.inf
    bias = np.asarray([0, np.nan, 0, np.inf, -np.inf, 0, 0.1, 0], np.float32)
    want = truth(logits, bias, 4, scoring=scoring)
    for implementation in ("xla", "pallas"):
        weights, ids = route(
            jnp.asarray(logits), jnp.asarray(bias), routes_per_token=4, scoring=scoring, implementation=implementation
        )
        assert np.isfinite(weights).all()
        assert all(len(set(row)) == 4 and min(row) >= 0 and max(row) < 8 for row in np.asarray(ids).tolist())
        assert agrees((weights, ids), want)


@pytest.mark.parametrize("implementation", ["xla", "pallas"])
def test_non_finite_token_touches_no_other(implementation) -> None:
    logits, bias = random_logits(9, 16)
    clean = route(jnp.asarray(logits), jnp.asarray(bias), routes_per_token=4, implementation=implementation)
    logits[3] = np.nan
    got = route(jnp.asarray(logits), jnp.asarray(bias), routes_per_token=4, implementation=implementation)
    others = np.arange(9) != 3
    for a, b in zip(got, clean, strict=True):
        np.testing.assert_array_equal(np.asarray(a)[others], np.asarray(b)[others])


@settings(deadline=None, max_examples=40)
@given(st.lists(st.lists(st.sampled_from(NON_FINITE), min_size=6, max_size=6), min_size=4, max_size=4))
def test_any_logits_give_distinct_finite_routes(rows: list[list[float]]) -> None:
    weights, ids = route(jnp.asarray(rows, jnp.float32), jnp.zeros(6), routes_per_token=3, implementation="xla")
    assert np.isfinite(weights).all()
    assert all(len(set(row)) == 3 for row in np.asarray(ids).tolist())


@pytest.mark.parametrize("implementation", ["xla", "pallas"])
def test_no_tokens(implementation) -> None:
    weights, ids = route(jnp.zeros((0, 8)), jnp.zeros(8), routes_per_token=2, implementation=implementation)
    assert weights.shape == ids.shape == (0, 2)


def test_bad_arguments() -> None:
    with pytest.raises(ValueError, match="scoring is 'relu'; expected 'sigmoid' or 'softmax'"):
        route(jnp.zeros((1, 8)), jnp.zeros(8), routes_per_token=2, scoring="relu")
    with pytest.raises(ValueError, match="routes_per_token is 9; expected 1 to the number of experts, 8"):
        route(jnp.zeros((1, 8)), jnp.zeros(8), routes_per_token=9)
    with pytest.raises(TypeError, match="expected float32 both"):
        route(jnp.zeros((1, 8), jnp.bfloat16), jnp.zeros(8), routes_per_token=2)
    with pytest.raises(ValueError, match="expected one value an expert"):
        route(jnp.zeros((1, 8)), jnp.zeros(7), routes_per_token=2)
