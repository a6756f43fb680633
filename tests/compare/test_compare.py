"""The walk names the first boundary that parts, pairs routes by expert, and tells ties from faults."""

import numpy as np
import pytest
from safetensors.numpy import save_file

from muse_jax.boundaries import BOUNDARIES
from muse_jax.compare import Limits, compare_layers, read_dump, write_dump
from muse_jax.compare.explain import CAUSES, best_profiles
from muse_jax.compare.metrics import distance, row_errors, ulps
from muse_jax.reference import replay_block, run_block
from tests.golden import HF_BF16, HF_F32, VLLM_BF16, golden_settings, golden_tensors, golden_weights

BF16 = golden_tensors(VLLM_BF16, 0)["x"].dtype
SETTINGS = golden_settings("hf-tiny")


def golden():
    return {name: value.copy() for name, value in golden_tensors(HF_F32, 1).items()}


def statuses(report):
    return {found.name: found.status for found in report.boundaries}


def test_same_file_is_the_same_everywhere():
    report = compare_layers(1, golden(), golden(), Limits())
    assert report.parted is None
    assert set(statuses(report).values()) == {"same"}


def test_order_of_routes_does_not_matter():
    shuffled = golden()
    order = np.random.default_rng(0).permuted(np.tile(np.arange(4), (33, 1)), axis=1)
    for name in ("topk_ids", "topk_weights", "activation", "expert_rows", "normed_rows"):
        value = shuffled[name]
        shuffled[name] = np.take_along_axis(value, order.reshape(order.shape + (1,) * (value.ndim - 2)), 1)
    report = compare_layers(1, golden(), shuffled, Limits())
    assert set(statuses(report).values()) == {"same"}


@pytest.mark.parametrize("name", [name for name in BOUNDARIES if name != "topk_ids"])
def test_first_parting_is_named(name):
    """A fault at one boundary and at all after it: the first is named, the others follow."""
    broken = golden()
    for later in BOUNDARIES[BOUNDARIES.index(name) :]:
        if later != "topk_ids":
            broken[later].reshape(33, -1)[7] *= 1.001
    report = compare_layers(1, broken, golden(), Limits())
    assert report.parted == name
    assert statuses(report)[name] == "PARTS"
    after = [found.status for found in report.boundaries if BOUNDARIES.index(found.name) > BOUNDARIES.index(name)]
    assert set(after) <= {"follows", "same"}
    where = next(found.distance for found in report.boundaries if found.name == name)
    assert where.worst_row[0] == 7
    assert where.max_row == pytest.approx(1e-3, rel=1e-3)


@pytest.mark.parametrize("broken", ["experts_swapped", "row_dropped", "nan_row"])
def test_broken_rows_part(broken):
    other = golden()
    if broken == "experts_swapped":
        other["expert_rows"][:, [0, 1]] = other["expert_rows"][:, [1, 0]]
    elif broken == "row_dropped":
        other["expert_rows"][3, 2] = 0
    else:
        other["expert_rows"][3, 2, 5] = np.nan
    assert compare_layers(1, other, golden(), Limits()).parted == "expert_rows"
    assert compare_layers(1, golden(), other, Limits()).parted == "expert_rows"


def send_elsewhere(layer, token):
    """One route of a token goes to the best expert it was not sent to; returns the two scores' distance."""
    scores = 1 / (1 + np.exp(-layer["router_logits"][token].astype(np.float64)))
    unused = np.setdiff1d(np.arange(16), layer["topk_ids"][token])
    other = unused[np.argmax(scores[unused])]
    spread = abs(scores[other] - scores[layer["topk_ids"][token, 0]])
    layer["topk_ids"][token, 0] = other
    for name in ("expert_rows", "combined", "out"):
        layer[name][token] = 7
    return spread


def test_near_tie_is_no_fault_and_is_left_out():
    other = golden()
    spread = send_elsewhere(other, 5)
    within = compare_layers(1, other, golden(), Limits(tie_gap=spread * 1.01))
    assert within.parted is None
    assert within.routing.ties == (5,)
    assert statuses(within)["topk_ids"] == "ties"
    beyond = compare_layers(1, other, golden(), Limits(tie_gap=spread * 0.99))
    assert beyond.parted == "topk_ids"
    assert beyond.routing.faults == (5,)


def test_bias_counts_for_ties():
    other = golden()
    spread = send_elsewhere(other, 5)
    bias = np.zeros(16, np.float32)
    bias[other["topk_ids"][5, 0]] = 10
    assert compare_layers(1, other, golden(), Limits(tie_gap=spread * 1.01), bias=bias).parted == "topk_ids"


def test_absent_boundaries_are_said():
    other = golden()
    del other["latent"]
    report = compare_layers(1, golden(), other, Limits())
    assert statuses(report)["latent"] == "absent"
    assert report.parted is None
    with pytest.raises(ValueError, match="no boundary in common"):
        compare_layers(1, {"x": other["x"]}, {"out": other["out"]}, Limits())
    with pytest.raises(ValueError, match=r"x is \(33, 128\) in one file and \(32, 128\) in the other"):
        compare_layers(1, golden(), {"x": other["x"][1:]}, Limits())


def test_bits_limits():
    ours = {name: value for name, value in golden_tensors(HF_BF16, 1).items()}
    other = {name: value.copy() for name, value in ours.items()}
    other["latent"][4, 4] += np.asarray(2.0**-6 * abs(float(other["latent"][4, 4])), BF16)
    assert compare_layers(1, other, ours, Limits(equal=0.99, max_ulp=4)).parted is None
    assert compare_layers(1, other, ours, Limits(equal=0.99, max_ulp=1)).parted == "latent"
    assert compare_layers(1, other, ours, Limits(equal=1.0)).parted == "latent"


@pytest.mark.parametrize("file, profile", [(HF_BF16, "hf"), (VLLM_BF16, "vllm")])
def test_profile_that_fits_is_found(file, profile):
    layer = {name: value for name, value in golden_tensors(file, 1).items() if "." not in name}
    fits = dict(best_profiles("normed_rows", layer, golden_weights("hf-tiny", 1), SETTINGS))
    assert max(fits, key=fits.__getitem__) == profile


def test_metrics_by_hand():
    a, b = np.float32([[3, 4], [0, 0], [1, 0]]), np.float32([[3, 4.5], [0, 0], [0, 0]])
    np.testing.assert_allclose(row_errors(a, b), [0.5 / np.hypot(3, 4.5), 0, np.inf])
    assert ulps(np.float32([1.0]), np.nextafter(np.float32([1.0]), 2)).tolist() == [1]
    assert ulps(np.float32([-0.0]), np.float32([0.0])).tolist() == [0]
    assert ulps(np.asarray([1.0], BF16), np.asarray([-1.0], BF16)).tolist() == [2 * 0x3F80]
    nan = np.float32([[np.nan, 1]])
    assert distance(nan, nan).equal == 1
    assert distance(nan, np.float32([[2, 1]])).max_ulp is None
    assert distance(nan, np.float32([[2, 1]])).max_row == np.inf
    assert distance(np.zeros((0, 3), np.float32), np.zeros((0, 3), np.float32)).equal == 1


def test_every_boundary_has_a_cause():
    assert tuple(CAUSES) == BOUNDARIES


def test_dump_round_trip(tmp_path):
    layer = run_block(golden_weights("hf-tiny", 1), golden()["x"], SETTINGS, "vllm")
    write_dump(tmp_path / "d.safetensors", {3: layer, None: {"x": layer["x"]}}, {"made_by": "test"})
    dump = read_dump(tmp_path / "d.safetensors")
    assert list(dump.layers[3]) == list(BOUNDARIES)
    for name, value in layer.items():
        assert dump.layers[3][name].dtype == value.dtype
        np.testing.assert_array_equal(dump.layers[3][name], value)
    assert list(dump.layers[None]) == ["x"]
    assert [path.name for path in tmp_path.iterdir()] == ["d.safetensors"]


def test_dumps_that_do_not_fit_are_refused(tmp_path):
    path = tmp_path / "bad.safetensors"
    write_dump(path, {0: {"x": np.zeros((3, 8), np.float32), "latent": np.zeros((4, 2), np.float32)}}, {})
    with pytest.raises(ValueError, match=r"0.x in .*bad.safetensors is \(3, 8\): its T is 3, but 4 in 0.latent"):
        read_dump(path)
    write_dump(path, {0: {"x": np.zeros((3, 8, 1), np.float32)}}, {})
    with pytest.raises(ValueError, match=r"0.x in .* is \(3, 8, 1\); expected \[T, D\]"):
        read_dump(path)
    write_dump(path, {0: {"x": np.zeros((3, 8), np.int32)}}, {})
    with pytest.raises(ValueError, match="is I32; expected BF16 or F32"):
        read_dump(path)
    write_dump(path, {0: {"weights": np.zeros(3, np.float32)}}, {})
    with pytest.raises(ValueError, match="holds no boundary"):
        read_dump(path)


@pytest.mark.parametrize("name", [name for name in BOUNDARIES if name != "topk_ids"])
@pytest.mark.parametrize("value", [np.nan, np.inf])
def test_no_limit_lets_a_lost_number_through(name, value):
    ours = golden_tensors(HF_BF16, 1)
    other = {key: array.copy() for key, array in ours.items()}
    other[name].reshape(-1)[3] = value
    for limits in (Limits(), Limits(equal=0.5), Limits(rows_default=1e30)):
        assert compare_layers(1, other, ours, limits).parted == name
        assert compare_layers(1, ours, other, limits).parted == name


def test_share_of_equal_elements_does_not_hide_a_dropped_row():
    ours = golden_tensors(HF_BF16, 1)
    other = {key: array.copy() for key, array in ours.items()}
    other["expert_rows"][3, 2] = 0
    assert distance(other["expert_rows"], ours["expert_rows"]).equal > 0.99
    assert compare_layers(1, other, ours, Limits(equal=0.98)).parted == "expert_rows"


def test_norm_of_bfloat16_rows_is_allowed_what_the_rows_are():
    """A few rows one bfloat16 step away move their float32 norms by as much: no fault of the norm."""
    weights = golden_weights("hf-tiny", 1)
    ours = run_block(weights, golden()["x"], SETTINGS, "vllm")
    other = {name: value.copy() for name, value in ours.items()}
    other["expert_rows"].view(np.uint16)[3, 2, ::9] += 1
    other["normed_rows"] = replay_block(weights, other, SETTINGS, "vllm")["normed_rows"]
    assert compare_layers(1, other, ours, Limits()).parted is None
    assert compare_layers(1, other, ours, Limits(rows={"normed_rows": 2e-6})).parted == "normed_rows"
    assert compare_layers(1, other, ours, Limits(), replayed=True).parted == "normed_rows"


@pytest.mark.parametrize("theirs", [[1, 2, 3, 3], [1, 2, 3, -1]])
def test_an_expert_listed_twice_or_masked_is_no_tie(theirs):
    ours, other = golden(), golden()
    ours["topk_ids"][0], other["topk_ids"][0] = [1, 1, 2, 3], theirs
    report = compare_layers(1, ours, other, Limits(tie_gap=1e9))
    assert report.parted == "topk_ids"
    assert report.routing.faults == (0,)


def test_ties_are_judged_by_the_routers_own_scores():
    """Sigmoids of large logits all but tie; their softmax does not."""
    ours, other = golden(), golden()
    for layer in (ours, other):
        layer["router_logits"][0] = 20 + np.arange(16)
    ours["topk_ids"][0], other["topk_ids"][0] = [15, 14, 13, 12], [15, 14, 13, 11]
    assert compare_layers(1, ours, other, Limits(tie_gap=1e-4)).parted is None
    assert compare_layers(1, ours, other, Limits(tie_gap=1e-4), scoring="softmax").parted == "topk_ids"


def test_boundaries_named_twice_and_experts_that_do_not_exist_are_refused(tmp_path):
    path = tmp_path / "bad.safetensors"
    save_file({"0.x": np.ones((2, 3), np.float32), "00.x": np.ones((2, 3), np.float32)}, path)
    with pytest.raises(ValueError, match=r"is a second 0\.x"):
        read_dump(path)
    for beyond in (-2, 16):
        layer = golden()
        layer["topk_ids"][4, 1] = beyond
        write_dump(path, {1: layer}, {})
        with pytest.raises(ValueError, match=rf"1\.topk_ids in .* holds {beyond}; expected 0 to 15, or -1"):
            read_dump(path)
