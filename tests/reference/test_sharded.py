"""Tensor and expert parallel roundings against what vLLM's ranks wrote."""

import numpy as np
import pytest

from muse_jax.reference import PROFILES, block, run_block, sharded
from muse_jax.reference.rounding import BFLOAT16, FLOAT32
from tests.golden import LAYERS, VLLM_BF16, golden_settings, golden_tensors, golden_weights
from tests.reference.checks import Limits, faults
from tests.reference.test_golden import F32, chained, over_layers

SETTINGS = golden_settings("hf-tiny")
VLLM = PROFILES["vllm"]
# As for the replays of the whole block, but for the distance: over this many runs some element of `out` cancels to
# nearly nothing, and a float32 sum is then several ulp of that element away.
REPLAY = Limits(row_error=F32, equal=0.999)
DTYPES = {"f32": ("float32", FLOAT32), "bf16": ("bfloat16", BFLOAT16)}
TP, EP = (2, 4), (2, 3, 4)


def sharded_golden(layer, run):
    """The boundaries of a sharded run; its routes are those of the whole block."""
    golden = golden_tensors(VLLM_BF16, layer)
    names = {"rows": "expert_rows", "combined": "combined", "out": "out"}
    found = {ours: golden[f"{run}.{theirs}"] for theirs, ours in names.items() if f"{run}.{theirs}" in golden}
    return found | {"topk_ids": golden["topk_ids"]}


@pytest.mark.parametrize("layer", LAYERS)
@pytest.mark.parametrize("reduce", DTYPES)
@pytest.mark.parametrize("ranks", TP)
def test_tp_replay(ranks, reduce, layer):
    weights, whole = golden_weights("hf-tiny", layer), golden_tensors(VLLM_BF16, layer)
    golden = sharded_golden(layer, f"tp{ranks}_{reduce}")
    ids = whole["topk_ids"]
    rows = sharded.tp_expert_rows(whole["activation"], ids, weights["down"], ranks, DTYPES[reduce][1], VLLM)
    normed = block.normed_rows(golden["expert_rows"], ids, weights["post_expert_norm"], SETTINGS, VLLM)
    ours = {
        "topk_ids": ids,
        "expert_rows": rows,
        "combined": block.combined(normed, ids, whole["topk_weights"], VLLM),
        "out": block.out(golden["combined"], weights["post_expert_proj"], VLLM),
    }
    assert rows.dtype == golden["expert_rows"].dtype
    # A float32 sum of bfloat16 parts is off where one part fell on the other side of a tie: by 2^-8 of that part.
    assert faults(ours, golden, REPLAY, our_ids=ids, as_bfloat16=("expert_rows",)) == {}


@pytest.mark.parametrize("layer", LAYERS)
@pytest.mark.parametrize("ranks", TP)
def test_tp_partial_rows(ranks, layer):
    down, whole = golden_weights("hf-tiny", layer)["down"], golden_tensors(VLLM_BF16, layer)
    golden, width = whole[f"tp{ranks}.partial_rows"], down.shape[-1] // ranks
    for rank in range(ranks):
        cut = slice(rank * width, (rank + 1) * width)
        ours = block.expert_rows(whole["activation"][..., cut], whole["topk_ids"], down[..., cut], VLLM)
        routes = {"topk_ids": whole["topk_ids"]}
        assert (
            faults(
                {"expert_rows": ours} | routes,
                {"expert_rows": golden[rank]} | routes,
                REPLAY,
                our_ids=whole["topk_ids"],
            )
            == {}
        )


@pytest.mark.parametrize("layer", LAYERS)
@pytest.mark.parametrize("reduce", DTYPES)
@pytest.mark.parametrize("ranks", EP)
def test_ep_replay(ranks, reduce, layer):
    weights, whole = golden_weights("hf-tiny", layer), golden_tensors(VLLM_BF16, layer)
    golden = sharded_golden(layer, f"ep{ranks}_{reduce}")
    ids, normed, num_experts = whole["topk_ids"], whole["normed_rows"], len(weights["down"])
    ours = {
        "topk_ids": ids,
        "combined": sharded.ep_combined(
            normed, ids, whole["topk_weights"], num_experts, ranks, DTYPES[reduce][1], VLLM
        ),
        "out": block.out(golden["combined"], weights["post_expert_proj"], VLLM),
    }
    assert faults(ours, golden, REPLAY, our_ids=ids) == {}


@pytest.mark.parametrize("ranks", EP)
def test_ep_ranks_hold_the_experts_that_vllm_gives_them(ranks):
    golden = golden_tensors(VLLM_BF16, 0)
    num_experts = len(golden_weights("hf-tiny", 0)["down"])
    placed = sharded.expert_owners(num_experts, ranks)
    for rank in range(ranks):
        np.testing.assert_array_equal(placed == rank, golden[f"ep{ranks}.map{rank}"] >= 0)


@pytest.mark.parametrize("reduce", DTYPES)
@pytest.mark.parametrize("kind, ranks", [("tp", n) for n in TP] + [("ep", n) for n in EP])
def test_chained(kind, ranks, reduce):
    golden = over_layers(lambda layer: sharded_golden(layer, f"{kind}{ranks}_{reduce}"))
    ours = over_layers(chained(VLLM_BF16, "vllm", **{kind: ranks}, reduce_dtype=DTYPES[reduce][0]))
    # One more rounding a rank than the block on one device, so a little more of a tie's two sides is left in `out`.
    limits = Limits(row_error=0.0, equal=0.99)
    assert faults(ours, golden, limits, our_ids=ours["topk_ids"], as_bfloat16=("expert_rows",)) == {}


def test_a_norm_on_partial_rows_fails():
    """The sum of normed partial rows is not the norm of their sum."""
    weights, whole = golden_weights("hf-tiny", 1), golden_tensors(VLLM_BF16, 1)
    golden, ids = sharded_golden(1, "tp2_f32"), whole["topk_ids"]
    parts = [
        block.finalize(part, ids, whole["topk_weights"], weights["post_expert_norm"], SETTINGS, VLLM)
        for part in whole["tp2.partial_rows"]
    ]
    broken = (parts[0].astype(np.float32) + parts[1].astype(np.float32)).astype(BFLOAT16)
    ours = {"topk_ids": ids, "expert_rows": golden["expert_rows"], "combined": broken, "out": golden["out"]}
    assert list(faults(ours, golden, REPLAY, our_ids=ids)) == ["combined"]


@pytest.mark.parametrize(
    "options, message",
    [
        ({"tp": 5}, r"tp is 5; expected a divisor of the expert width, 96"),
        ({"ep": 17}, r"ep is 17; expected at most the number of experts, 16"),
        ({"tp": 0}, r"tp is 0; expected a number of ranks"),
        ({"ep": 2, "reduce_dtype": "bf16"}, r"reduce_dtype is 'bf16'; expected one of float32, bfloat16"),
        ({"ep": 2, "profile": "hf"}, r"ep is 2 with profile 'hf'; only 'vllm'"),
    ],
)
def test_errors(options, message):
    x = golden_tensors(VLLM_BF16, 0)["x"][:2]
    with pytest.raises(ValueError, match=message):
        run_block(golden_weights("hf-tiny", 0), x, SETTINGS, **{"profile": "vllm", **options})
