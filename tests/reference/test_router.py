"""Routing: ties, non-finite logits, softmax, scale."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as npst

from muse_jax.reference import PROFILES, BlockSettings
from muse_jax.reference.router import router_logits, topk_ids, topk_weights

K = 3


def settings(**changed):
    base = {"routes_per_token": K, "output_multiplier": 0.7, "norm_eps": 1e-5, "post_norm_eps": 1e-8}
    return BlockSettings(**(base | changed))


def route(logits, bias=None, profile="vllm", **changed):
    logits = np.asarray(logits, np.float32)
    bias = np.zeros(logits.shape[1], np.float32) if bias is None else np.asarray(bias, np.float32)
    ids = topk_ids(logits, bias, settings(**changed), PROFILES[profile])
    return ids, topk_weights(logits, ids, settings(**changed), PROFILES[profile])


@given(
    logits=npst.arrays(np.float32, (2, 7), elements=st.floats(width=32)),
    bias=npst.arrays(np.float32, 7, elements=st.floats(width=32)),
    scoring=st.sampled_from(["sigmoid", "softmax"]),
    profile=st.sampled_from(["exact", "vllm"]),
)
def test_any_logits_give_distinct_ids_and_finite_weights(logits, bias, scoring, profile):
    ids, weights = route(logits, bias, profile, scoring=scoring)
    assert ids.dtype == np.int32
    assert all(len(set(row)) == K and 0 <= min(row) <= max(row) < 7 for row in ids.tolist())
    assert np.all(np.isfinite(weights))
    assert np.all(weights >= 0)


@given(logits=npst.arrays(np.float32, (3, 7), elements=st.floats(width=32)), token=st.integers(0, 2))
def test_tokens_do_not_touch_each_other(logits, token):
    alone_ids, alone_weights = route(logits[token : token + 1])
    ids, weights = route(logits)
    np.testing.assert_array_equal(ids[token], alone_ids[0])
    np.testing.assert_array_equal(weights[token], alone_weights[0])


def test_ties_go_to_the_lowest_index():
    ids, weights = route([[0.0, 1.0, 1.0, 0.0, 1.0, 1.0]])
    np.testing.assert_array_equal(ids, [[1, 2, 4]])
    np.testing.assert_allclose(weights, np.full((1, K), 1 / K), rtol=1e-6)
    np.testing.assert_array_equal(route(np.full((1, 6), 60.0))[0], [[0, 1, 2]])


def test_nan_is_lowest_and_infinity_largest():
    ids, weights = route([[np.nan, -np.inf, np.inf, 0.0, 100.0], [np.nan] * 5])
    # sigmoid(100) is 1 in float32, as is that of the largest float32: a tie, lowest index first.
    np.testing.assert_array_equal(ids, [[2, 4, 3], [0, 1, 2]])
    np.testing.assert_allclose(weights, [[0.4, 0.4, 0.2], [0.0, 0.0, 0.0]], rtol=1e-6)


def test_softmax_with_infinite_logits():
    ids, weights = route([[np.inf, 0.0, np.inf, -np.inf]], scoring="softmax")
    np.testing.assert_array_equal(ids, [[0, 2, 1]])
    np.testing.assert_array_equal(weights, [[0.5, 0.5, 0.0]])


def test_non_finite_bias_still_gives_distinct_ids():
    ids, weights = route([[0.0, 0.0, 0.0, 0.0]], bias=[np.nan, np.inf, 0.0, -np.inf])
    np.testing.assert_array_equal(ids, [[1, 2, 0]])
    np.testing.assert_allclose(weights, np.full((1, K), 1 / K), rtol=1e-6)


def test_bias_selects_and_does_not_weigh():
    logits = np.array([[2.0, 1.0, 0.0, -1.0]], np.float32)
    ids, weights = route(logits, bias=[0.0, 0.0, 0.0, 5.0])
    score = 1 / (1 + np.exp(-logits[0].astype(np.float64)))
    np.testing.assert_array_equal(ids, [[3, 0, 1]])
    np.testing.assert_allclose(weights[0], score[[3, 0, 1]] / score[[3, 0, 1]].sum(), rtol=1e-6)


def test_softmax_weights_and_route_scale():
    logits = np.array([[2.0, 1.0, 0.0, -1.0]], np.float32)
    ids, weights = route(logits, scoring="softmax", route_scale=2.5)
    power = np.exp(logits[0].astype(np.float64))
    np.testing.assert_array_equal(ids, [[0, 1, 2]])
    np.testing.assert_allclose(weights[0], 2.5 * power[:3] / power[:3].sum(), rtol=1e-6)


def test_masked_routes_weigh_nothing():
    weights = topk_weights(np.zeros((1, 4), np.float32), np.array([[2, -1, 0]]), settings(), PROFILES["exact"])
    np.testing.assert_allclose(weights, [[0.5, 0.0, 0.5]], rtol=1e-12)


def test_logits_are_reported_as_they_are():
    x = np.array([[np.nan, 0.0], [np.inf, 0.0], [1.0, 2.0]], np.float32)
    logits = router_logits(x, np.ones((2, 2), np.float32), 0.5, PROFILES["exact"])
    np.testing.assert_array_equal(logits, [[np.nan] * 2, [np.inf] * 2, [1.5] * 2])


@pytest.mark.parametrize("stray", [4, -2])
def test_ids_out_of_range(stray):
    with pytest.raises(ValueError, match=f"topk_ids holds {stray}; expected 0 to 3, or -1 for a masked route"):
        topk_weights(np.zeros((1, 4), np.float32), np.array([[0, stray, 1]]), settings(), PROFILES["exact"])
