"""The walk names the first boundary that parts, pairs routes by expert, and tells ties from faults."""

import numpy as np
import pytest

from muse_jax.boundaries import BOUNDARIES
from muse_jax.compare import Limits, compare_layers, read_dump, write_dump
from muse_jax.compare.explain import CAUSES, best_profiles
from muse_jax.compare.metrics import distance, row_errors, ulps
from muse_jax.reference import run_block
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
