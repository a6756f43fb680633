"""Orbax conversion: what is restored is what the loaders give, on any mesh; folders are whole or not there."""

from __future__ import annotations

import dataclasses
import json
import sys

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import orbax.checkpoint as ocp
import pytest

from muse_jax import cli
from muse_jax.checkpoint import QuantizedWeight, convert, load_layer, small_config, to_fnuz, write_random_checkpoint
from muse_jax.checkpoint.convert import ConvertedLayer, convert_checkpoint
from muse_jax.checkpoint.restore import CONVERSION_NAME, restore_layer
from muse_jax.cli.convert import layer_numbers
from muse_jax.config import MuseConfig
from muse_jax.quantization import QuantizedArray, fp8, quantize_mxfp4
from muse_jax.sharding import BlockMesh, place_weights
from tests.checkpoint.build import HF_TINY, QUARK_FP8, QUARK_MXFP4, quark_copy
from tests.parallel.cases import make_mesh

SOURCES = {"bf16": HF_TINY, "fp8": QUARK_FP8, "mxfp4": QUARK_MXFP4}
CONFIG = small_config(model_width=24, latent_width=64, expert_width=96, num_experts=6, num_layers=3)


@pytest.fixture(scope="module")
def converted(tmp_path_factory):
    """{format: (checkpoint, converted folder)}, layers 0 and 1 of each."""
    root = tmp_path_factory.mktemp("converted")
    for name, source in SOURCES.items():
        convert_checkpoint(source, root / name, layers=(0, 1))
    return {name: (source, root / name) for name, source in SOURCES.items()}


def leaves(weights: dict) -> dict[str, np.ndarray]:
    """Every array by name, those of a quantized weight by their own."""
    found = {}
    for name, value in weights.items():
        if not isinstance(value, QuantizedWeight | QuantizedArray):
            found[name] = value
            continue
        found |= {f"{name}.{part}": getattr(value, part) for part in ("values", "scales")}
        if value.input_scale is not None:
            found[f"{name}.input_scale"] = np.asarray(value.input_scale, np.float32)
    return found


def assert_same(ours: dict, expected: dict) -> None:
    assert list(ours) == list(expected)
    ours, expected = leaves(ours), leaves(expected)
    assert list(ours) == list(expected)
    for name, value in expected.items():
        assert (ours[name].shape, ours[name].dtype) == (value.shape, value.dtype), name
        assert np.asarray(ours[name]).tobytes() == np.asarray(value).tobytes(), name
        if isinstance(value, jax.Array):
            assert ours[name].sharding == value.sharding, name


@pytest.mark.parametrize("form", SOURCES)
def test_restored_layers_are_those_of_the_loader(converted, form):
    source, folder = converted[form]
    for layer in (0, 1):
        assert_same(restore_layer(folder, layer), load_layer(source, layer))
    assert MuseConfig.from_checkpoint(folder) == MuseConfig.from_checkpoint(source)


@pytest.mark.parametrize("shape", [(1, 1, 3), (2, 2, 1), (1, 2, 3)])
@pytest.mark.parametrize("form", SOURCES)
def test_restored_onto_another_mesh(converted, form, shape):
    source, folder = converted[form]
    mesh = BlockMesh(mesh=make_mesh(shape))
    expected = place_weights(load_layer(source, 1), MuseConfig.from_checkpoint(source), mesh, jnp.bfloat16)
    assert_same(restore_layer(folder, 1, mesh), expected)


def test_fp8_is_converted_for_chips_with_fnuz(converted):
    source, folder = converted["fp8"]
    fnuz = {n: to_fnuz(v) if isinstance(v, QuantizedWeight) else v for n, v in load_layer(source, 1).items()}
    assert_same(restore_layer(folder, 1, flavour="e4m3fnuz"), fnuz)
    mesh = BlockMesh(mesh=make_mesh((1, 1, 2)))
    expected = place_weights(fnuz, MuseConfig.from_checkpoint(source), mesh, jnp.bfloat16)
    assert_same(restore_layer(folder, 1, mesh, flavour="e4m3fnuz"), expected)


def test_nan_codes_and_both_zeros_become_fnuz_ones():
    codes = np.arange(256, dtype=np.uint8).view(ml_dtypes.float8_e4m3fn).reshape(1, 8, 32)
    host = QuantizedWeight(values=codes, scales=np.ones((1, 8), np.float32), format="fp8")
    ours, expected = fp8.to_fnuz(QuantizedArray.from_host(host)), to_fnuz(host)
    assert np.asarray(ours.values).tobytes() == expected.values.tobytes()
    np.testing.assert_array_equal(ours.scales, expected.scales)


@pytest.mark.parametrize("layout", ["consolidated", "per_expert"])
def test_online_is_the_whole_quantized_at_once(tmp_path, monkeypatch, layout):
    """A chunk of 4 of 6 experts is in memory at a time; the first and the last layer stay."""
    path = write_random_checkpoint(tmp_path / "checkpoint", config=CONFIG, layout=layout)
    read, right = [], convert.ExpertReader.read

    def spy(self, index):
        read.append(index[0].stop - index[0].start)
        return right(self, index)

    monkeypatch.setattr(convert.ExpertReader, "read", spy)
    found = convert_checkpoint(path, tmp_path / "out", online="mxfp4", chunk=4)
    assert read == [4, 2, 4, 2]
    assert [(layer.layer, layer.source, layer.format) for layer in found] == [
        (0, "bf16", "bf16"),
        (1, "bf16", "mxfp4"),
        (2, "bf16", "bf16"),
    ]
    plain = load_layer(path, 1)
    whole = {name: quantize_mxfp4(plain[name]) for name in ("gate_up", "down")}
    restored = restore_layer(tmp_path / "out", 1)
    assert_same(restored, plain | {name: value.to_host() for name, value in whole.items()})
    assert found[1].nbytes == sum(value.nbytes for value in leaves(restored).values())
    assert_same(restore_layer(tmp_path / "out", 2), load_layer(path, 2))


def test_one_scale_a_tensor_and_float32(tmp_path):
    """An input_scale travels along; unquantized layers keep float32."""

    def edit(tensors):
        for name in [name for name in tensors if name.endswith("weight_scale")]:
            tensors[name] = tensors[name].max()
            tensors[name.replace("weight_scale", "input_scale")] = np.float32(0.25).reshape(())

    def scheme(settings):
        for part in settings["global_quant_config"].values():
            if part:
                part.update(qscheme="per_tensor", is_dynamic=False, ch_axis=None)

    single = quark_copy(tmp_path / "single", QUARK_FP8, edit=edit, edit_quantization=scheme)
    convert_checkpoint(single, tmp_path / "a", layers=[2])
    restored = restore_layer(tmp_path / "a", 2)
    assert float(restored["down"].input_scale) == 0.25
    assert_same(restored, load_layer(single, 2))
    float32 = write_random_checkpoint(tmp_path / "float32", config=CONFIG, dtype="float32")
    convert_checkpoint(float32, tmp_path / "b", layers=[1])
    assert_same(restore_layer(tmp_path / "b", 1, dtype=np.float32), load_layer(float32, 1))


def test_nothing_is_left_of_a_conversion_that_failed(tmp_path, monkeypatch):
    path = write_random_checkpoint(tmp_path / "checkpoint", config=CONFIG)
    before = set(tmp_path.iterdir())
    seen: list[ConvertedLayer] = []

    def fail(*_, **__):
        assert seen[0].layer == 0
        raise OSError("disk full")

    monkeypatch.setattr(convert, "quantize_experts_mxfp4", fail)
    with pytest.raises(OSError, match="disk full"):
        convert_checkpoint(path, tmp_path / "out", online="mxfp4", on_layer=seen.append)
    assert set(tmp_path.iterdir()) == before


def test_other_dtypes_than_are_stored_are_refused(converted, tmp_path):
    """Orbax itself would cast without a word."""
    _, folder = converted["bf16"]
    with pytest.raises(ValueError, match=r"layer 1 of .* holds bfloat16 and float32 is asked for; leave dtype out"):
        restore_layer(folder, 1, dtype=np.float32)
    path = write_random_checkpoint(tmp_path / "checkpoint", config=CONFIG, dtype="float32")
    convert_checkpoint(path, tmp_path / "out", layers=[1])
    note = tmp_path / "out" / CONVERSION_NAME
    note.write_text(note.read_text().replace("f32", "bf16"))
    with pytest.raises(ValueError, match=r"layer_1 holds \w+ as float32 \[[\d, ]+\]; expected bfloat16 \["):
        restore_layer(tmp_path / "out", 1)
    note.write_text(note.read_text().replace("bf16", "mxfp4"))
    with pytest.raises(ValueError, match=r"layer_1 holds \S+ as .*; expected "):
        restore_layer(tmp_path / "out", 1)
    with ocp.StandardCheckpointer() as checkpointer:
        checkpointer.save(tmp_path / "out" / "layer_0", {"down": np.zeros(3, np.float32)})
    note.write_text(json.dumps({"version": 1, "layers": {"0": "f32"}}))
    with pytest.raises(ValueError, match=r"layer_0 holds down as float32 \[3\]; expected float32 \[6, 64, 96\]$"):
        restore_layer(tmp_path / "out", 0)


def test_what_does_not_fit_is_refused(converted, tmp_path):
    _, folder = converted["mxfp4"]
    with pytest.raises(ValueError, match=r"layer 3 is not in .*; it holds 0, 1$"):
        restore_layer(folder, 3)
    with pytest.raises(ValueError, match=r"tp is 2 .* in quantization blocks of 32; tp can be 1, 3$"):
        restore_layer(folder, 1, make_mesh((2,), ("tp",)))
    with pytest.raises(ValueError, match=r"ep is 3 and .* 16 experts side by side; ep can be 1, 2, 4, 8, 16, or load"):
        restore_layer(folder, 1, make_mesh((3,), ("ep",)))
    with pytest.raises(FileNotFoundError, match=r"conversion.json does not exist; expected a folder that muse-jax con"):
        restore_layer(QUARK_MXFP4, 1)
    (tmp_path / CONVERSION_NAME).write_text('{"version": 1, "layers": {"0": "f32"}}')
    (tmp_path / "config.json").write_text((folder / "config.json").read_text())
    with pytest.raises(FileNotFoundError, match=r"layer_0 does not exist, though conversion\.json names it"):
        restore_layer(tmp_path, 0)
    (tmp_path / CONVERSION_NAME).write_text('{"version": 2, "layers": {}}')
    with pytest.raises(ValueError, match="has version 2; expected 1"):
        restore_layer(tmp_path, 1)
    (tmp_path / CONVERSION_NAME).write_text('{"version": 1, "layers": {"0": "int8"}}')
    with pytest.raises(ValueError, match=r"has layers .*int8.*; expected numbers, each with one of bf16"):
        restore_layer(tmp_path, 1)
    with pytest.raises(ValueError, match="online is 'fp8'; expected mxfp4, or None"):
        convert_checkpoint(HF_TINY, tmp_path / "out", online="fp8")
    with pytest.raises(ValueError, match=r"no layer of .* is chosen; it has 0, 1, 2, 3"):
        convert_checkpoint(HF_TINY, tmp_path / "out", layers=[])
    with pytest.raises(ValueError, match="layer 1 holds its experts in mxfp4 already; leave online quantization out"):
        convert_checkpoint(QUARK_MXFP4, tmp_path / "out", online="mxfp4")
    narrow = dataclasses.replace(CONFIG, expert_width=80)
    path = write_random_checkpoint(tmp_path / "narrow", config=narrow)
    with pytest.raises(ValueError, match="expert_width is 80; MXFP4 needs a multiple of 32"):
        convert_checkpoint(path, tmp_path / "out", online="mxfp4")
    assert not (tmp_path / "out").exists()


def run(capsys, *argv):
    code = cli.main(["convert", *(str(word) for word in argv)])
    shown = capsys.readouterr()
    return code, shown.out, shown.err


def test_command(capsys, tmp_path):
    code, said, _ = run(capsys, HF_TINY, tmp_path / "out", "--online", "mxfp4", "--layers", "0-1")
    assert code == 0
    assert said.splitlines()[:2] == ["layer 0: bf16, 631,104 bytes", "layer 1: bf16 -> mxfp4, 197,952 bytes"]
    code, said, _ = run(capsys, QUARK_FP8, tmp_path / "fp8", "--layers", "2", "--json")
    assert code == 0
    assert json.loads(said)["layers"] == [{"layer": 2, "source": "fp8", "format": "fp8", "nbytes": 352576}]
    for argv, sentence in [
        ((HF_TINY, tmp_path / "out"), "out already exists; choose another folder or remove it"),
        ((HF_TINY, tmp_path / "new", "--layers", "1-0"), "--layers is '1-0'; expected numbers and ranges"),
        ((HF_TINY, tmp_path / "new", "--layers", "9"), "layer is 9; expected 0 to 3"),
        ((HF_TINY, tmp_path / "new", "--online", "mxfp4", "--chunk", "0"), "chunk is 0; expected a number of experts"),
        ((tmp_path / "none", tmp_path / "new"), "does not exist"),
    ]:
        code, _, said = run(capsys, *argv)
        assert code == 2
        assert sentence in said
        assert said.count("\n") == 1
    assert {path.name for path in tmp_path.iterdir()} == {"out", "fp8"}


def test_without_orbax_the_extra_is_named(capsys, tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "orbax.checkpoint", None)
    code, _, said = run(capsys, HF_TINY, tmp_path / "out")
    assert code == 2
    assert "pip install 'muse-jax[convert]'" in said


def test_layer_numbers():
    assert layer_numbers("0,4-6") == [0, 4, 5, 6]
    with pytest.raises(ValueError, match="expected numbers and ranges such as 0,4-7"):
        layer_numbers("a")
