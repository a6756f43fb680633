"""Loading onto a mesh: the slices that whole arrays would give, without ever holding a whole one."""

import os
import tracemalloc

import jax.numpy as jnp
import numpy as np
import pytest

from muse_jax import sharding
from muse_jax.checkpoint import load_layer
from muse_jax.checkpoint import region as region_module
from muse_jax.checkpoint.header import read_header
from muse_jax.checkpoint.region import read_region
from muse_jax.checkpoint.sharded import load_sharded_layer
from muse_jax.checkpoint.synthetic import small_config, write_random_checkpoint
from muse_jax.parallel import ShardedMoE
from muse_jax.sharding import BlockMesh, place_weights
from tests.checkpoint.build import CONFIG, build, pack
from tests.parallel.cases import make_mesh

SHAPES = [(1, 1, 1), (2, 2, 2), (1, 3, 2), (1, 1, 6)]


def same(ours, expected):
    assert list(ours) == list(expected)
    for name, value in expected.items():
        assert ours[name].dtype == value.dtype, name
        assert ours[name].sharding == value.sharding, name
        np.testing.assert_array_equal(np.asarray(ours[name]), np.asarray(value), err_msg=name)


@pytest.mark.parametrize("layout", ["consolidated", "per_expert"])
@pytest.mark.parametrize("shape", SHAPES)
def test_slices_are_those_of_whole_arrays(tmp_path, layout, shape):
    """Runs of a few bytes: every part goes through the buffer of whole rows."""
    path = build(tmp_path / "checkpoint", layout=layout, shards=3)
    mesh = BlockMesh(mesh=make_mesh(shape))
    same(load_sharded_layer(path, 1, mesh), place_weights(load_layer(path, 1), CONFIG, mesh, jnp.bfloat16))


def test_cast_and_names(tmp_path):
    """Another dtype, another mesh's names, long runs that are read straight into place."""
    path = build(tmp_path / "checkpoint", dtype="float32")
    mesh = BlockMesh(mesh=make_mesh((3, 2), ("experts", "model")), rules={"ep": "experts", "tp": "model"})
    ours = load_sharded_layer(path, 0, mesh, dtype=jnp.bfloat16)
    same(ours, place_weights(load_layer(path, 0), CONFIG, mesh, jnp.bfloat16))
    block = ShardedMoE.from_checkpoint(path, 0, mesh, dtype=jnp.bfloat16)
    same(block.weights(), ours)


@pytest.mark.parametrize("shape", [(1, 4, 1), (1, 1, 8), (1, 2, 4)])
def test_host_memory_is_about_one_slice(tmp_path, shape, monkeypatch):
    """Peak of what numpy allocates: a slice and the buffer of rows, while the tensor is many times that.

    Devices have memory of their own here: a CPU device would keep numpy's.
    """
    monkeypatch.setattr(region_module, "BUFFER", 2**14)
    monkeypatch.setattr(
        sharding, "_send", lambda piece, devices: [jnp.zeros(piece.shape, piece.dtype, device=d) for d in devices]
    )
    config = small_config(model_width=16, latent_width=128, expert_width=512, num_experts=8, num_layers=1)
    path = write_random_checkpoint(tmp_path / "checkpoint", config=config)
    mesh = BlockMesh(mesh=make_mesh(shape))
    load_sharded_layer(path, 0, mesh)  # what is cached is not counted
    tensor = config.num_experts * 2 * config.expert_width * config.latent_width * 2
    tracemalloc.start()
    held = load_sharded_layer(path, 0, mesh)
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    largest = max(value.addressable_shards[0].data.nbytes for value in held.values())
    assert largest <= tensor // int(np.prod(shape))
    assert peak < 1.25 * largest + 2**17


def test_bytes_read_are_those_of_the_slices(tmp_path, monkeypatch):
    """With whole experts on a rank no byte is read twice and none in vain."""
    config = small_config(model_width=16, latent_width=128, expert_width=512, num_experts=8, num_layers=2)
    path = write_random_checkpoint(tmp_path / "checkpoint", config=config)
    read, preadv = [], os.preadv

    def counting(*args):
        read.append(preadv(*args))
        return read[-1]

    monkeypatch.setattr(os, "preadv", counting)
    held = load_sharded_layer(path, 1, make_mesh((8,), ("ep",)))
    assert sum(read) == sum(value.nbytes for value in held.values())


@pytest.mark.parametrize("long_run", [1, 2**30])
@pytest.mark.parametrize("buffer", [1, 40, 2**20])
def test_regions(tmp_path, monkeypatch, long_run, buffer):
    """Every way to read, against numpy's own slicing, for parts at the beginning, in the middle and at the end."""
    monkeypatch.setattr(region_module, "LONG_RUN", long_run)
    monkeypatch.setattr(region_module, "BUFFER", buffer)
    tensor = np.arange(3 * 5 * 7, dtype=np.float32).reshape(3, 5, 7)
    file = tmp_path / "model.safetensors"
    header = {"t": {"dtype": "F32", "shape": [3, 5, 7], "data_offsets": [0, tensor.nbytes]}}
    file.write_bytes(pack(header, tensor.tobytes()))
    entry = read_header(file)["t"]
    cuts = [
        [slice(0, 3), slice(1, 2)],
        [slice(0, 5), slice(2, 5), slice(3, 3)],
        [slice(0, 7), slice(0, 2), slice(4, 7)],
    ]
    for region in [(a, b, c) for a in cuts[0] for b in cuts[1] for c in cuts[2]]:
        out = np.full((*tensor[region].shape, 2), -1, np.float32)[..., 0]
        read_region(entry, region, out)
        np.testing.assert_array_equal(out, tensor[region])


def test_a_number_without_axes(tmp_path):
    file = tmp_path / "model.safetensors"
    file.write_bytes(pack({"t": {"dtype": "F32", "shape": [], "data_offsets": [0, 4]}}, np.float32(7).tobytes()))
    out = np.zeros((), np.float32)
    read_region(read_header(file)["t"], (), out)
    assert out == 7


def test_a_file_that_shrank_is_named(tmp_path):
    path = build(tmp_path / "checkpoint", layout="consolidated")
    file = path / "model.safetensors"
    entry = read_header(file)["model.language_model.layers.1.mlp.experts.down_proj"]
    with file.open("r+b") as opened:
        opened.truncate(entry.start + entry.nbytes // 2)
    out = np.empty(entry.shape, jnp.bfloat16)
    with pytest.raises(ValueError, match=r"model.safetensors ended early; .* while '.*down_proj' was read"):
        read_region(entry, tuple(slice(0, size) for size in entry.shape), out)
    with pytest.raises(ValueError, match=r"does not fit an array float32 \[1\]"):
        read_region(entry, (slice(0, 1),) * 3, np.empty(1, np.float32))


def test_what_cannot_be_loaded_is_refused_before_reading(tmp_path):
    path = build(tmp_path / "checkpoint")
    with pytest.raises(ValueError, match="tp is 4 and the block has E=3 experts of width F=6; tp can be 1, 2, 3, 6"):
        load_sharded_layer(path, 0, make_mesh((4,), ("tp",)))
