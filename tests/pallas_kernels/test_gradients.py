"""Gradients of the XLA paths against float64 formulas written by hand; the Pallas kernels say that they have none."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels import expert_gemm
from pallas_kernels.finalize import finalize
from pallas_kernels.formats import round_bf16
from pallas_kernels.route_map import route_map
from pallas_kernels.router import route

T, K, E, H, F = 11, 3, 5, 10, 6
# float32 sums of at most T * K * F terms, each to half a unit in the last place.
RTOL = 3e-6


def silu(g):
    return g / (1 + np.exp(-g))


def d_silu(g):
    s = 1 / (1 + np.exp(-g))
    return s * (1 + g * (1 - s))


def dense_rows(x, gate_up, down, ids):
    """Every route's row, and the gradients of (x, gate_up, down) as a function of the rows' gradient, in float64."""
    x, gate_up, down = (np.asarray(a, np.float64) for a in (x, gate_up, down))
    rows = np.zeros((*ids.shape, H))

    def gradients(d_rows):
        d_x, d_gate_up, d_down = np.zeros_like(x), np.zeros_like(gate_up), np.zeros_like(down)
        for t, k in np.argwhere((ids >= 0) & (ids < E)):
            e, dy = ids[t, k], d_rows[t, k]
            g, u = x[t] @ gate_up[e, :F].T, x[t] @ gate_up[e, F:].T
            d_down[e] += np.outer(dy, silu(g) * u)
            d_a = dy @ down[e]
            d_gu = np.concatenate([d_a * u * d_silu(g), d_a * silu(g)])
            d_gate_up[e] += np.outer(d_gu, x[t])
            d_x[t] += d_gu @ gate_up[e]
        return d_x, d_gate_up, d_down

    for t, k in np.argwhere((ids >= 0) & (ids < E)):
        e = ids[t, k]
        g, u = x[t] @ gate_up[e, :F].T, x[t] @ gate_up[e, F:].T
        rows[t, k] = (silu(g) * u) @ down[e].T
    return rows, gradients


def rows_of(x, gate_up, down, ids, block_rows, implementation="xla"):
    routes = route_map(ids, num_experts=E, block_rows=block_rows, implementation=implementation)
    options = {"implementation": implementation}
    activation = expert_gemm.gate_up(x, gate_up, routes, routes_per_token=ids.shape[1], **options)
    return expert_gemm.down(activation, down, routes, **options).reshape(*ids.shape, H)


@functools.partial(jax.jit, static_argnames="block_rows")
def rows_and_gradients(x, gate_up, down, ids, block_rows, d_rows):
    rows, pull = jax.vjp(lambda *weights: rows_of(*weights, ids, block_rows), x, gate_up, down)
    return rows, pull(d_rows)


def inputs(seed=0, dtype=np.float32):
    rng = np.random.default_rng(seed)
    x = rng.normal(size=(T, H)).astype(dtype)
    gate_up, down = rng.normal(size=(E, 2 * F, H)).astype(dtype), rng.normal(size=(E, H, F)).astype(dtype)
    return x, gate_up, down, rng.normal(size=(T, K, H)).astype(np.float32)


def close(ours, truth, tolerance=RTOL):
    """Within `tolerance` of the largest element: sums of both signs cancel."""
    np.testing.assert_allclose(np.asarray(ours, np.float64), truth, rtol=0, atol=tolerance * np.abs(truth).max())


def ids_of(kind):
    ids = np.random.default_rng(3).integers(0, E, (T, K)).astype(np.int32)
    if kind == "one hot expert":
        ids[:] = 2
    elif kind == "masked":
        ids[::2, 1] = -1
        ids[5] = E
    elif kind == "none":
        ids[:] = -1
    return ids


@pytest.mark.parametrize("kind", ["random", "one hot expert", "masked", "none"])
@pytest.mark.parametrize("block_rows", [1, 4])
def test_expert_gradients(kind, block_rows):
    x, gate_up, down, d_rows = inputs()
    ids = ids_of(kind)
    truth, gradients = dense_rows(x, gate_up, down, ids)
    rows, ours_all = rows_and_gradients(x, gate_up, down, ids, block_rows, d_rows)
    close(rows, truth)
    for ours, expected in zip(ours_all, gradients(d_rows), strict=True):
        if np.abs(expected).max() == 0:
            np.testing.assert_array_equal(ours, expected)
        else:
            close(ours, expected)


def test_bfloat16_gradients_are_close():
    """Operands and gradients of products are bfloat16: four roundings of 2^-9 each on the way, and never zero."""
    x, gate_up, down, d_rows = inputs(dtype=jnp.bfloat16)
    ids = ids_of("random")
    _, gradients = dense_rows(x, gate_up, down, ids)
    _, ours_all = rows_and_gradients(x, gate_up, down, ids, 4, d_rows.astype(jnp.bfloat16))
    for ours, expected in zip(ours_all, gradients(d_rows), strict=True):
        assert ours.dtype == jnp.bfloat16
        error = np.linalg.norm(np.asarray(ours, np.float64) - expected) / np.linalg.norm(expected)
        assert error < 4 * 2**-8


def test_a_nan_token_stays_with_its_experts():
    x, gate_up, down, d_rows = inputs()
    x[-1] = np.nan
    ids = ids_of("random") % (E - 1)
    ids[-1] = E - 1
    _, (d_x, d_gate_up, d_down) = rows_and_gradients(x, gate_up, down, ids, 4, d_rows)
    assert np.isfinite(d_x[:-1]).all()
    assert np.isfinite(d_gate_up[:-1]).all()
    assert np.isfinite(d_down[:-1]).all()
    assert np.isnan(d_gate_up[-1]).any()


def test_weights_gradient_is_never_dense_over_experts_and_tokens():
    """No value of the gradient's program has both E and R rows: its largest are the weights and the routes' rows."""
    x, gate_up, down, d_rows = inputs()
    jaxpr = jax.make_jaxpr(rows_and_gradients, static_argnums=4)(x, gate_up, down, ids_of("random"), 4, d_rows)
    sizes = [var.aval.size for eqn in _equations(jaxpr.jaxpr) for var in eqn.outvars if hasattr(var.aval, "size")]
    assert max(sizes) <= max(E * 2 * F * H, T * K * H, E * 4 * 2 * F)


def _equations(jaxpr):
    for eqn in jaxpr.eqns:
        yield eqn
        for value in jax.tree.leaves(eqn.params, is_leaf=lambda v: hasattr(v, "eqns") or hasattr(v, "jaxpr")):
            inner = getattr(value, "jaxpr", value)
            if hasattr(inner, "eqns"):
                yield from _equations(inner)


def block_tail(logits, rows, gain, d_out):
    """sum(d_out * combined) through routing and finalize."""
    weights, ids = route(logits, jnp.zeros(E), routes_per_token=K, implementation="xla")
    return jnp.sum(finalize(rows, weights, ids, gain, eps=1e-8, implementation="xla") * d_out)


def tail_truth(logits, rows, gain, d_out):
    scores = 1 / (1 + np.exp(-logits))
    chosen = np.take_along_axis(scores, np.argsort(-scores, axis=1, kind="stable")[:, :K], 1)
    z = rows * (1 + gain)
    normed = z / np.sqrt(np.mean(z**2, axis=2, keepdims=True) + 1e-8)
    return np.sum(np.sum(normed * (chosen / chosen.sum(1, keepdims=True))[:, :, None], axis=1) * d_out)


def test_routing_and_finalize_gradients():
    """Against central differences in float64: step^2 and 2^-52 / step are both below 1e-9."""
    rng = np.random.default_rng(1)
    args = [rng.normal(size=shape).astype(np.float32) for shape in ((T, E), (T, K, H), (H,))]
    d_out = rng.normal(size=(T, H)).astype(np.float32)
    ours = jax.jit(jax.grad(block_tail, (0, 1, 2)))(*args, d_out)
    for i, where in enumerate([(3, 1), (4, 2, 5), (6,)]):
        sides = []
        for step in (1e-5, -1e-5):
            moved = [np.asarray(a, np.float64) for a in args]
            moved[i][where] += step
            sides.append(tail_truth(*moved, np.asarray(d_out, np.float64)))
        np.testing.assert_allclose(ours[i][where], (sides[0] - sides[1]) / 2e-5, rtol=1e-4, atol=1e-6)


def test_gradient_is_finite_where_a_score_underflows():
    rows, d_out = np.ones((2, K, H), np.float32), np.ones((2, H), np.float32)
    gradients = jax.grad(block_tail, (0, 1, 2))(jnp.full((2, E), -200.0), rows, np.zeros(H, np.float32), d_out)
    assert all(np.isfinite(gradient).all() for gradient in gradients)


def test_rounding_passes_gradients_through():
    assert jax.grad(round_bf16)(1.2345) == 1.0


def test_pallas_has_no_gradient():
    x, gate_up, down, _ = inputs()
    with pytest.raises(
        NotImplementedError, match="Pallas kernel muse_gate_up has no derivative; use implementation='xla'"
    ):
        jax.grad(lambda x: rows_of(x, gate_up, down, ids_of("random"), 16, "pallas").sum())(x)
