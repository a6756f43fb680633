"""Who holds what: slices of every tensor on every mesh, and the meshes that are refused."""

import dataclasses

import jax
import numpy as np
import pytest

from muse_jax.schedule import Chunk, Schedule
from muse_jax.sharding import (
    HELD,
    BlockMesh,
    expert_of_slot,
    experts_of_ranks,
    held_shapes,
    place_weights,
    whole_weight,
)
from tests.parallel.cases import CONFIG, FLOAT32, make_mesh, weights


def block_mesh(*shape, **options):
    return BlockMesh(mesh=make_mesh(shape), **options)


def test_experts_are_placed_in_order_and_the_first_ranks_hold_more():
    assert experts_of_ranks(9, 4) == [range(0, 3), range(3, 5), range(5, 7), range(7, 9)]
    assert expert_of_slot(9, 4) == [0, 1, 2, 3, 4, None, 5, 6, None, 7, 8, None]
    assert expert_of_slot(4, 1) == [0, 1, 2, 3]


@pytest.mark.parametrize("shape", [(2, 2, 2), (1, 4, 2), (8, 1, 1)])
def test_every_device_holds_its_slice(shape):
    """Slices cut by hand: experts of its ep rank, then the same columns F of gate, of up and of down."""
    mesh, layer = block_mesh(*shape), weights()
    held = place_weights(layer, CONFIG, mesh, FLOAT32)
    assert {name: value.shape for name, value in held.items()} == held_shapes(CONFIG, mesh)
    (_, ep, tp), F = shape, CONFIG.expert_width
    for device in np.ndindex(*shape):
        experts = list(experts_of_ranks(CONFIG.num_experts, ep)[device[1]])
        cut = slice(device[2] * F // tp, (device[2] + 1) * F // tp)
        gate, up = layer["gate_up"][experts, :F], layer["gate_up"][experts, F:]
        local = {name: _on(value, mesh.mesh.devices[device]) for name, value in held.items()}
        np.testing.assert_array_equal(local["gate_up"][: len(experts), 0], gate[:, cut])
        np.testing.assert_array_equal(local["gate_up"][: len(experts), 1], up[:, cut])
        np.testing.assert_array_equal(local["down"][: len(experts)], layer["down"][experts][:, :, cut])
        assert not local["gate_up"][len(experts) :].any()
        for name in HELD:
            if name not in ("gate_up", "down"):
                np.testing.assert_array_equal(local[name], layer[name])
    for name, value in held.items():
        np.testing.assert_array_equal(whole_weight(name, value, CONFIG, mesh), layer[name])


def _on(array: jax.Array, device: jax.Device) -> np.ndarray:
    return next(np.asarray(shard.data) for shard in array.addressable_shards if shard.device == device)


@pytest.mark.parametrize(
    "shape, block, message",
    [
        ((1, 1, 3), 1, r"tp is 3 and the block has E=9 experts of width F=16; tp can be 1, 2, 4, 8, 16$"),
        ((1, 1, 8), 8, r"tp is 8 .* F=16, in quantization blocks of 8; tp can be 1, 2$"),
        ((1, 1, 2), 32, r"tp is 2 .* in quantization blocks of 32; F can be a multiple of 32$"),
    ],
)
def test_what_does_not_divide_is_refused(shape, block, message):
    with pytest.raises(ValueError, match=message):
        block_mesh(*shape).check(CONFIG, quantization_block=block)


def test_too_many_ranks_for_the_experts_are_refused():
    few = dataclasses.replace(CONFIG, num_experts=3)
    with pytest.raises(ValueError, match=r"ep is 8 and the block has E=3 experts of width F=16; ep can be 1 to 3$"):
        block_mesh(1, 8, 1).check(few)


@pytest.mark.parametrize(
    "rules, message",
    [
        ({"pp": "tp"}, "rules name 'pp'; expected dp, ep, tp"),
        ({"tp": "model"}, "rules place tp on 'model'; the mesh has dp, ep, tp"),
        ({"tp": "ep"}, "rules place both ep and tp on 'ep'; each needs an own axis"),
        ({"dp": None, "ep": None, "tp": None}, "expected at least one of dp, ep, tp, or rules such as"),
    ],
)
def test_rules_that_do_not_fit_the_mesh(rules, message):
    with pytest.raises(ValueError, match=message):
        block_mesh(2, 2, 2, rules=rules)


def test_weights_that_do_not_fit():
    with pytest.raises(ValueError, match="weights has no 'down'; expected router_weight"):
        place_weights({n: v for n, v in weights().items() if n != "down"}, CONFIG, block_mesh(2, 2, 2), FLOAT32)
    with pytest.raises(ValueError, match=r"weights\['down'\] is \(8, 12, 16\); expected \(9, 12, 16\)"):
        place_weights(weights() | {"down": weights()["down"][1:]}, CONFIG, block_mesh(2, 2, 2), FLOAT32)


def test_chunks():
    real = 8 * 4096
    assert Schedule().chunks(1100, real, tp=8) == [Chunk(tokens=1024, scatter=True), Chunk(tokens=76, scatter=False)]
    assert Schedule().chunks(255, real, tp=2) == [Chunk(tokens=255, scatter=False)]
    assert Schedule().chunks(256, real, tp=2) == [Chunk(tokens=256, scatter=True)]
    assert Schedule().chunks(4096, real, tp=1) == [Chunk(tokens=4096, scatter=False)]
    assert Schedule().chunks(0, real, tp=8) == [Chunk(tokens=0, scatter=False)]
    assert len(Schedule(chunk_elements=1).chunks(3, real, tp=2)) == 3


@pytest.mark.parametrize(
    "options, message",
    [
        ({"reduce_dtype": "bf16"}, "reduce_dtype is 'bf16'; expected 'float32' or 'bfloat16'"),
        ({"chunk_elements": 0}, "chunk_elements is 0; expected a number above 0"),
        ({"scatter_min_tokens": -1}, "scatter_min_tokens is -1; expected a number above 0"),
    ],
)
def test_schedules_are_checked(options, message):
    with pytest.raises(ValueError, match=message):
        Schedule(**options)
