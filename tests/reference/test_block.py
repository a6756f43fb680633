"""The block's edges: no tokens, idle and crowded experts, masked routes, NaN, wrong shapes; and what it may import."""

import ast
import dataclasses
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

import muse_jax.reference
from muse_jax.boundaries import BOUNDARIES
from muse_jax.reference import PROFILES, BlockSettings, block, replay_block, run_block
from muse_jax.reference.rounding import BFLOAT16, FLOAT32, round_to, widen
from tests.reference.checks import row_errors

D, H, F, E, K = 24, 10, 14, 6, 3
SETTINGS = BlockSettings(routes_per_token=K, output_multiplier=0.7, norm_eps=1e-5, post_norm_eps=1e-8, route_scale=2.5)


def make_weights(seed=0):
    random = np.random.default_rng(seed)

    def bf16(*shape, spread=None):
        return round_to(random.normal(size=shape) * (shape[-1] ** -0.5 if spread is None else spread), BFLOAT16)

    return {
        "router_weight": random.normal(size=(E, D)).astype(FLOAT32),
        "router_bias": (random.normal(size=E) * 0.1).astype(FLOAT32),
        "pre_expert_proj": bf16(H, D),
        "pre_expert_norm": bf16(H, spread=0.2),
        "gate_up": bf16(E, 2 * F, H),
        "down": bf16(E, H, F),
        "post_expert_norm": bf16(H, spread=0.2),
        "post_expert_proj": bf16(D, H),
    }


def make_x(tokens, seed=1):
    return round_to(np.random.default_rng(seed).normal(size=(tokens, D)), BFLOAT16)


def by_hand(w, x):
    """out of one token in plain scalar loops."""
    w = {name: widen(value) for name, value in w.items()}
    score = 1 / (1 + np.exp(-(w["router_weight"] @ x) * SETTINGS.output_multiplier))
    chosen = sorted(range(E), key=lambda e: -(score[e] + w["router_bias"][e]))[:K]
    latent = w["pre_expert_proj"] @ x
    row = latent / np.sqrt(sum(v * v for v in latent) / H + SETTINGS.norm_eps) * (1 + w["pre_expert_norm"])
    combined = np.zeros(H)
    for e in chosen:
        gate, up = w["gate_up"][e, :F] @ row, w["gate_up"][e, F:] @ row
        z = (w["down"][e] @ (gate / (1 + np.exp(-gate)) * up)) * (1 + w["post_expert_norm"])
        weight = score[e] / (sum(score[c] for c in chosen) + SETTINGS.score_eps) * SETTINGS.route_scale
        combined += weight * z / np.sqrt(sum(v * v for v in z) / H + SETTINGS.post_norm_eps)
    return w["post_expert_proj"] @ combined


def test_exact_is_the_formula():
    x = make_x(5)
    ours = run_block(make_weights(), x, SETTINGS)["out"]
    np.testing.assert_allclose(ours, [by_hand(make_weights(), row) for row in widen(x)], rtol=1e-11)


@pytest.mark.parametrize("profile", PROFILES)
@pytest.mark.parametrize("tokens", [0, 1, 9])
def test_shapes_and_dtypes(tokens, profile):
    ours = run_block(make_weights(), make_x(tokens), SETTINGS, profile)
    assert tuple(ours) == BOUNDARIES
    latents = {name: (tokens, H) for name in ("latent", "expert_input", "combined")}
    rows = {name: (tokens, K, H) for name in ("expert_rows", "normed_rows")}
    routes = {"router_logits": (tokens, E), "topk_ids": (tokens, K), "topk_weights": (tokens, K)}
    shapes = latents | rows | routes | {"x": (tokens, D), "activation": (tokens, K, F), "out": (tokens, D)}
    assert {name: value.shape for name, value in ours.items()} == shapes
    p = PROFILES[profile]
    special = {"topk_ids": np.dtype(np.int32), "normed_rows": p.normed_rows}
    special |= {"router_logits": p.arithmetic, "topk_weights": p.arithmetic}
    assert {name: value.dtype for name, value in ours.items()} == dict.fromkeys(BOUNDARIES, p.stored) | special


@pytest.mark.parametrize("profile", PROFILES)
def test_a_replay_of_its_own_run_changes_nothing(profile):
    ours = run_block(make_weights(), make_x(9), SETTINGS, profile)
    again = replay_block(make_weights(), ours, SETTINGS, profile)
    assert tuple(again) == BOUNDARIES[1:]
    for name, value in again.items():
        np.testing.assert_array_equal(value, ours[name])


@pytest.mark.parametrize("options", [{"tp": 2}, {"ep": 4}, {"tp": 7, "ep": 3, "reduce_dtype": "bfloat16"}])
@pytest.mark.parametrize("tokens", [0, 1, 9])
def test_ranks_change_roundings_only(tokens, options):
    whole = run_block(make_weights(), make_x(tokens), SETTINGS, "vllm")
    ours = run_block(make_weights(), make_x(tokens), SETTINGS, "vllm", **options)
    # Each rank's parts and sums are rounded to bfloat16: a dozen errors of up to 2^-9 that partly cancel.
    assert np.all(row_errors(ours["out"], whole["out"]) <= 5 * 2**-9)
    assert ours["combined"].dtype == BFLOAT16


@pytest.mark.parametrize("profile", PROFILES)
def test_idle_and_crowded_experts(profile):
    """All tokens to the same K experts; the others have no token and their weights are never read."""
    weights = make_weights()
    weights["router_bias"] = np.array([0, 9, 0, 9, 9, 0], FLOAT32)
    weights["gate_up"][[0, 2, 5]] = np.nan
    weights["down"][[0, 2, 5]] = np.nan
    ours = run_block(weights, make_x(9), SETTINGS, profile)
    np.testing.assert_array_equal(np.sort(ours["topk_ids"]), np.tile([1, 3, 4], (9, 1)))
    assert np.all(np.isfinite(widen(ours["out"])))


@pytest.mark.parametrize("profile", PROFILES)
@pytest.mark.parametrize("bad", [np.nan, np.inf])
def test_a_bad_token_does_not_touch_its_neighbours(bad, profile):
    x = make_x(9)
    clean = run_block(make_weights(), x, SETTINGS, profile)
    x[4, 3] = bad
    ours = run_block(make_weights(), x, SETTINGS, profile)
    assert len(set(ours["topk_ids"][4])) == K
    assert np.all(np.isnan(widen(ours["out"][4])))
    for name in BOUNDARIES:
        # Rows of one expert are one float64 product, which another batch may sum in another order.
        np.testing.assert_allclose(
            np.delete(widen(ours[name]), 4, axis=0), np.delete(widen(clean[name]), 4, axis=0), rtol=1e-9, atol=1e-12
        )


@pytest.mark.parametrize("profile", PROFILES)
def test_masked_routes_are_zero_and_never_read(profile):
    p, weights = PROFILES[profile], make_weights()
    run = run_block(weights, make_x(9), SETTINGS, profile)
    ids = run["topk_ids"].copy()
    ids[2, 1] = ids[5] = -1
    masked = ids < 0
    activation = block.activation(run["expert_input"], ids, weights["gate_up"], p)
    poisoned = activation.copy()
    poisoned[masked] = np.nan
    rows = block.expert_rows(poisoned, ids, weights["down"], p)
    for of_route, unmasked in ((activation, run["activation"]), (rows, run["expert_rows"])):
        assert np.all(of_route[masked] == 0)
        np.testing.assert_allclose(widen(of_route[~masked]), widen(unmasked[~masked]), rtol=1e-9, atol=1e-12)

    rows = run["expert_rows"].copy()
    rows[masked] = np.nan
    normed = block.normed_rows(rows, ids, weights["post_expert_norm"], SETTINGS, p)
    assert np.all(normed[masked] == 0)
    normed[masked] = np.nan
    combined = block.combined(normed, ids, run["topk_weights"], p)
    finalized = block.finalize(rows, ids, run["topk_weights"], weights["post_expert_norm"], SETTINGS, p)
    np.testing.assert_array_equal(combined, finalized)
    assert np.all(combined[5] == 0)
    untouched = np.all(~masked, axis=-1)
    np.testing.assert_array_equal(combined[untouched], run["combined"][untouched])
    without = run["normed_rows"].copy()
    without[2, 1] = 0
    np.testing.assert_array_equal(combined[2], block.combined(without, run["topk_ids"], run["topk_weights"], p)[2])


@pytest.mark.parametrize("profile", PROFILES)
def test_zero_rows_give_exactly_zero(profile):
    p, gain = PROFILES[profile], make_weights()["post_expert_norm"]
    ids, weights = np.zeros((2, K), np.int32), np.ones((2, K), FLOAT32)
    assert np.all(block.finalize(np.zeros((2, K, H), p.stored), ids, weights, gain, SETTINGS, p) == 0)


def test_many_experts_are_walked_by_their_routes():
    """E = 256: every route gets the row of its own expert."""
    random = np.random.default_rng(0)
    down = random.normal(size=(256, 5, 7))
    activation, ids = random.normal(size=(64, 8, 7)), random.integers(0, 256, (64, 8)).astype(np.int32)
    rows = block.expert_rows(activation, ids, down, PROFILES["exact"])
    np.testing.assert_allclose(rows, np.einsum("tkf,tkhf->tkh", activation, down[ids]), rtol=1e-9, atol=1e-12)


ERRORS = {
    "x": (lambda w, x: run_block(w, x[:, :-1], SETTINGS), r"x is \(2, 23\); expected \(tokens, 24\)"),
    "profile": (lambda w, x: run_block(w, x, SETTINGS, "jax"), "profile is 'jax'; expected one of exact, vllm, hf"),
    "missing weight": (lambda w, x: run_block({}, x, SETTINGS), "weights lacks router_weight, router_bias"),
    "gate_up": (
        lambda w, x: run_block(w | {"gate_up": w["gate_up"][:, 1:]}, x, SETTINGS),
        r"weights\['gate_up'\] is \(6, 27, 10\); expected \[E, G, H\] = \(6, 28, 10\)",
    ),
    "down": (
        lambda w, x: run_block(w | {"down": w["down"][0]}, x, SETTINGS),
        r"'down'\] is \(10, 14\); expected 3 axes",
    ),
    "K": (
        lambda w, x: run_block(w, x, dataclasses.replace(SETTINGS, routes_per_token=7)),
        "routes_per_token is 7; expected at most the number of experts, 6",
    ),
    "scoring": (
        lambda w, x: dataclasses.replace(SETTINGS, scoring="relu"),
        "scoring is 'relu'; expected one of sigmoid, softmax",
    ),
    "eps": (lambda w, x: dataclasses.replace(SETTINGS, norm_eps=0.0), "norm_eps is 0.0; expected a number above 0"),
    "missing boundary": (
        lambda w, x: replay_block(w, {"x": x}, SETTINGS, "hf"),
        "boundaries lacks router_logits, topk_ids",
    ),
    "boundary": (
        lambda w, x: replay_block(w, run_block(w, x, SETTINGS) | {"latent": x}, SETTINGS, "exact"),
        r"boundaries\['latent'\] is \(2, 24\); expected \[T, H\] = \(2, 10\)",
    ),
    "id": (
        lambda w, x: block.expert_rows(np.zeros((1, 1, F)), np.array([[E]]), w["down"], PROFILES["exact"]),
        "topk_ids holds 6; expected 0 to 5, or -1 for a masked route",
    ),
    "dtype of a profile": (
        lambda w, x: dataclasses.replace(PROFILES["hf"], silu=np.dtype(np.float16)),
        r"silu is dtype\('float16'\); expected the dtype bfloat16, float32 or float64",
    ),
    "arithmetic of a profile": (
        lambda w, x: dataclasses.replace(PROFILES["hf"], arithmetic=BFLOAT16),
        "arithmetic is bfloat16; expected float32 or float64",
    ),
}


@pytest.mark.parametrize("name", ERRORS)
def test_errors(name):
    call, message = ERRORS[name]
    with pytest.raises(ValueError, match=message):
        call(make_weights(), make_x(2))


def test_the_truth_imports_nothing_of_what_it_checks():
    for file in Path(muse_jax.reference.__file__).parent.glob("*.py"):
        for node in ast.walk(ast.parse(file.read_text())):
            names = [node.module] if isinstance(node, ast.ImportFrom) else []
            names += [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
            for name in names:
                known = name.split(".")[0] in sys.stdlib_module_names | {"numpy", "ml_dtypes"}
                assert known or name.startswith("muse_jax.reference"), f"{file.name} imports {name}"


def test_importing_the_truth_loads_no_jax():
    code = "import sys, muse_jax.reference; print([m for m in sys.modules if m.split('.')[0] in ('jax', 'jaxlib')])"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"
