"""Quantized layers onto a mesh: each device's codes and scales are those cut by hand from whole ones."""

import tracemalloc

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest

from muse_jax import sharding
from muse_jax.checkpoint import QuantizedWeight, load_layer, small_config, to_fnuz
from muse_jax.checkpoint import region as region_module
from muse_jax.checkpoint.sharded import load_sharded_layer
from muse_jax.config import MuseConfig
from muse_jax.quantization import QuantizedArray, write_quantized_checkpoint
from muse_jax.sharding import BlockMesh, expert_of_slot, held_shapes, place_weights
from tests.checkpoint.build import MLP, QUARK_FP8, QUARK_MXFP4, edit_json, quark_copy
from tests.parallel.cases import make_mesh

FOLDERS = {"fp8": QUARK_FP8, "mxfp4": QUARK_MXFP4}
SHAPES = [(1, 1, 1), (2, 2, 1), (1, 1, 3), (1, 3, 1), (1, 2, 3)]


def bytes_of(array) -> np.ndarray:
    return np.ascontiguousarray(array).view(np.uint8)


def check(held: dict, whole: dict, shape: tuple[int, int, int], mesh: BlockMesh, unit: int | None) -> None:
    """Every device's part of every tensor, against slices of `load_layer`'s by its place in the mesh.

    unit: columns of F that share a scale of down; None where a row does.
    """
    config_experts = len(whole["router_bias"])
    f = whole["down"].shape[2]
    slots = expert_of_slot(config_experts, shape[1])
    per_rank = len(slots) // shape[1]
    for device in np.ndindex(*shape):
        own = slots[device[1] * per_rank :][:per_rank]
        experts = [expert for expert in own if expert is not None]
        first, last = (n * f // shape[2] for n in (device[2], device[2] + 1))
        rows, down = [slice(first, last), slice(f + first, f + last)], whole["down"]
        packed = down.values.shape[2] * first // f, down.values.shape[2] * last // f
        block = 1 if unit is None else whole["gate_up"].values.shape[1] // whole["gate_up"].scales.shape[1]
        want = {
            "gate_up": (
                [whole["gate_up"].values[experts, cut] for cut in rows],
                [whole["gate_up"].scales[experts, cut.start // block : cut.stop // block] for cut in rows],
            ),
            "down": (
                down.values[experts, :, slice(*packed)],
                down.scales[experts] if unit is None else down.scales[experts, :, slice(first // unit, last // unit)],
            ),
        }
        for name, (values, scales) in want.items():
            if name == "gate_up":
                values, scales = np.stack(values, 1), np.stack(scales, 1)
            for ours, expected in ((held[name].values, values), (held[name].scales, scales)):
                local = on(ours, mesh.mesh.devices[device])
                assert ours.dtype == expected.dtype
                np.testing.assert_array_equal(bytes_of(local[: len(experts)]), bytes_of(expected), err_msg=name)
                assert not bytes_of(local[len(experts) :]).any()
    for name, value in whole.items():
        if name not in ("gate_up", "down"):
            np.testing.assert_array_equal(np.asarray(held[name]), value)


def on(array: jax.Array, device: jax.Device) -> np.ndarray:
    return next(np.asarray(shard.data) for shard in array.addressable_shards if shard.device == device)


def same(ours: dict, expected: dict) -> None:
    assert list(ours) == list(expected)
    for name, value in expected.items():
        pairs = [(ours[name], value)]
        if isinstance(value, QuantizedArray):
            assert (ours[name].format, ours[name].shape) == (value.format, value.shape)
            assert (ours[name].input_scale is None) == (value.input_scale is None)
            pairs = list(zip(jax.tree.leaves(ours[name]), jax.tree.leaves(value), strict=True))
        for a, b in pairs:
            assert (a.dtype, a.sharding) == (b.dtype, b.sharding), name
            np.testing.assert_array_equal(bytes_of(a), bytes_of(b), err_msg=name)


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("form", FOLDERS)
def test_slices_of_quarks_layers(form, shape):
    mesh = BlockMesh(mesh=make_mesh(shape))
    held, whole = load_sharded_layer(FOLDERS[form], 1, mesh), load_layer(FOLDERS[form], 1)
    check(held, whole, shape, mesh, 32 if form == "mxfp4" else None)
    shapes = {name: value.shape for name, value in held.items()}
    assert shapes == held_shapes(MuseConfig.from_checkpoint(FOLDERS[form]), mesh)
    same(held, place_weights(whole, MuseConfig.from_checkpoint(FOLDERS[form]), mesh, jnp.bfloat16))


def test_excluded_layers_are_as_they_were():
    held = load_sharded_layer(QUARK_MXFP4, 0, make_mesh((2,), ("tp",)))
    assert {value.dtype.name for value in held.values()} == {"float32", "bfloat16"}


def test_scales_of_two_dtypes_and_one_scale_a_tensor(tmp_path):
    """Scales in bfloat16 are widened; a scale for all rows stands once a row, the largest input_scale once."""

    def two_dtypes(tensors):
        for name in [name for name in tensors if name.endswith("up_proj.weight_scale")]:
            tensors[name] = tensors[name].astype(ml_dtypes.bfloat16)

    def one_scale(tensors):
        for number, name in enumerate([name for name in tensors if name.endswith("weight_scale")]):
            tensors[name] = np.float32(1 + number / 64).reshape(() if number % 2 else (1,))
            tensors[name.replace("weight_scale", "input_scale")] = np.float32(number + 1).reshape(())

    def scheme(settings):
        settings["global_quant_config"]["weight"].update(qscheme="per_tensor", ch_axis=None)
        settings["global_quant_config"]["input_tensors"].update(qscheme="per_tensor", ch_axis=None, is_dynamic=False)

    mesh = BlockMesh(mesh=make_mesh((1, 2, 3)))
    mixed = quark_copy(tmp_path / "mixed", QUARK_FP8, edit=two_dtypes)
    check(load_sharded_layer(mixed, 2, mesh), load_layer(mixed, 2), (1, 2, 3), mesh, None)
    single = quark_copy(tmp_path / "single", QUARK_FP8, edit=one_scale, edit_quantization=scheme)
    held, whole = load_sharded_layer(single, 2, mesh), load_layer(single, 2)
    check(held, whole, (1, 2, 3), mesh, None)
    for name in ("gate_up", "down"):
        assert float(held[name].input_scale) == whole[name].input_scale
    fnuz = load_sharded_layer(single, 2, mesh, flavour="e4m3fnuz")
    same(fnuz, place_weights(as_fnuz(whole), MuseConfig.from_checkpoint(single), mesh, jnp.bfloat16))


def as_fnuz(whole: dict) -> dict:
    return {name: to_fnuz(value) if isinstance(value, QuantizedWeight) else value for name, value in whole.items()}


def test_fnuz_codes_are_converted_slice_by_slice():
    mesh = BlockMesh(mesh=make_mesh((1, 3, 2)))
    held = load_sharded_layer(QUARK_FP8, 1, mesh, flavour="e4m3fnuz")
    assert held["down"].values.dtype == ml_dtypes.float8_e4m3fnuz
    check(held, as_fnuz(load_layer(QUARK_FP8, 1)), (1, 3, 2), mesh, None)
    packed = load_sharded_layer(QUARK_MXFP4, 1, make_mesh((2,), ("ep",)), flavour="e4m3fnuz")
    assert packed["down"].values.dtype == np.uint8


def test_blocks_of_128_are_cut_at_their_edges(tmp_path):
    """The scheme with a scale a 128 x 128 block, at two blocks of F and three of H."""
    h, f = 384, 256
    random = np.random.default_rng(0)

    def edit(tensors):
        for name in [name for name in tensors if ".mlp." in name and ".gate." not in name]:
            if "_proj" in name and "experts" in name:
                rows, columns = (h, f) if "down" in name else (f, h)
                wanted = (rows // 128, columns // 128) if name.endswith("scale") else (rows, columns)
            elif "proj" in name:
                wanted = (h, 128) if "pre_expert" in name else (128, h)
            else:
                wanted = (h,)
            tensors[name] = random.uniform(1, 2, wanted).astype(tensors[name].dtype)

    def scheme(settings):
        settings["global_quant_config"]["weight"].update(qscheme="per_block", block_size=[128, 128], ch_axis=None)
        settings["global_quant_config"]["input_tensors"].update(qscheme="per_group", group_size=128, ch_axis=-1)

    path = quark_copy(tmp_path / "checkpoint", QUARK_FP8, edit=edit, edit_quantization=scheme)
    widths = {"moe_hidden_size": h, "moe_intermediate_size": f}
    edit_json(path / "config.json", lambda value: value["text_config"].update(widths))
    mesh = BlockMesh(mesh=make_mesh((1, 3, 2)))
    held, whole = load_sharded_layer(path, 2, mesh), load_layer(path, 2)
    assert held["gate_up"].has_block_scales
    check(held, whole, (1, 3, 2), mesh, 128)
    with pytest.raises(ValueError, match=r"tp is 4 .* width F=256, in quantization blocks of 128; tp can be 1, 2$"):
        load_sharded_layer(path, 2, make_mesh((4,), ("tp",)))


@pytest.mark.parametrize("format", ["fp8", "mxfp4"])
@pytest.mark.parametrize("shape", [(1, 4, 1), (1, 1, 8)])
def test_host_memory_is_about_one_slice(tmp_path, format, shape, monkeypatch):
    """As for bfloat16: the peak of what numpy allocates is a slice and the buffer of rows, not the tensor."""
    monkeypatch.setattr(region_module, "BUFFER", 2**14)
    monkeypatch.setattr(
        sharding, "_send", lambda piece, devices: [jnp.zeros(piece.shape, piece.dtype, device=d) for d in devices]
    )
    config = small_config(model_width=16, latent_width=256, expert_width=512, num_experts=8, num_layers=3)
    path = write_quantized_checkpoint(tmp_path / "checkpoint", config=config, format=format)
    mesh = BlockMesh(mesh=make_mesh(shape))
    load_sharded_layer(path, 1, mesh)  # what is cached is not counted
    tracemalloc.start()
    held = load_sharded_layer(path, 1, mesh)
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    values = held["gate_up"].values
    largest = values.addressable_shards[0].data.nbytes
    assert largest == values.nbytes // int(np.prod(shape))
    assert peak < 1.25 * largest + 2**18 < values.nbytes


def test_widths_that_do_not_divide_are_refused_before_reading(tmp_path):
    message = r"tp is 2 and the block has E=16 experts of width F=96, in quantization blocks of 32; tp can be 1, 3$"
    with pytest.raises(ValueError, match=message):
        load_sharded_layer(QUARK_MXFP4, 1, make_mesh((2,), ("tp",)))
    whole, config = load_layer(QUARK_MXFP4, 1), MuseConfig.from_checkpoint(QUARK_MXFP4)
    with pytest.raises(ValueError, match=message):
        place_weights(whole, config, BlockMesh(mesh=make_mesh((2,), ("tp",))), jnp.bfloat16)
    path = quark_copy(tmp_path / "checkpoint", QUARK_FP8, edit=lambda tensors: tensors.pop(_SCALE))
    with pytest.raises(ValueError, match="1 missing tensor: '" + _SCALE):
        load_sharded_layer(path, 1, make_mesh((2,), ("tp",)))


_SCALE = MLP.format(1) + "experts.3.up_proj.weight_scale"
