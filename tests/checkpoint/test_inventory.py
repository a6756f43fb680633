"""The inventory: formats, layouts, totals and faults of every layer, from headers alone."""

from __future__ import annotations

import dataclasses
import json

import ml_dtypes
import numpy as np
import pytest

from muse_jax.checkpoint import header, take_inventory
from muse_jax.checkpoint.index import SINGLE_NAME
from tests.checkpoint.build import CONFIG, HF_TINY, MLP, QUARK_FP8, QUARK_MXFP4, build

ONE = MLP.format(1)


def labels(inventory):
    return [audit.label for audit in inventory.layers]


@pytest.mark.parametrize(
    "folder, formats, layout, nbytes, elements",
    [
        (HF_TINY, ["bf16"] * 4, "consolidated", 3210224, {"BF16": 1588600, "F32": 8256}),
        (QUARK_FP8, ["bf16", "fp8", "fp8", "bf16"], "per_expert", 2653168, {"F8_E4M3": 2 * 16 * 3 * 96 * 64}),
        (QUARK_MXFP4, ["bf16", "mxfp4", "mxfp4", "bf16"], "per_expert", 2343920, {"F32": 8256}),
    ],
)
def test_golden_checkpoints_are_complete(folder, formats, layout, nbytes, elements):
    inventory = take_inventory(folder)
    assert labels(inventory) == formats
    assert {audit.layout for audit in inventory.layers} == {layout}
    assert inventory.faults == ()
    assert inventory.nbytes == nbytes
    assert elements.items() <= inventory.elements.items()


def test_no_tensor_data_is_read(monkeypatch):
    lengths = []
    right = header._fill
    monkeypatch.setattr(
        header, "_fill", lambda file, view, path: (lengths.append(len(view)), right(file, view, path))[1]
    )
    take_inventory(HF_TINY)
    assert len(lengths) == 2 * 14
    assert sum(lengths) < 20_000


def test_json_form(tmp_path):
    value = json.loads(json.dumps(take_inventory(build(tmp_path / "ckpt", shards=2)).to_dict()))
    assert value["complete"] is True
    layer = value["layers"][1]
    assert (layer["layer"], layer["format"], layer["layout"], layer["tensors"]) == (1, "bf16", "consolidated", 8)
    assert layer["shapes"]["experts.down_proj"] == [3, 10, 6]
    assert (
        layer["missing"] == layer["stray"] == layer["duplicate"] == layer["wrong_shape"] == layer["wrong_dtype"] == []
    )


def test_faults_are_reported_not_raised(tmp_path):
    def edit(tensors):
        del tensors[ONE + "gate.weight"]
        tensors[ONE + "router.weight"] = np.zeros(3, np.float32)
        tensors[ONE + "pre_expert_norm.weight"] = np.zeros(3, np.float32)
        tensors[MLP.format(2) + "gate.weight"] = np.zeros(3, np.float32)

    inventory = take_inventory(build(tmp_path / "ckpt", edit=edit))
    assert inventory.layers[0].faults == ()
    one = inventory.layers[1]
    assert one.faulty("missing") == (ONE + "gate.weight",)
    assert one.faulty("stray") == (ONE + "router.weight",)
    assert one.faulty("wrong shape") == one.faulty("wrong dtype") == (ONE + "pre_expert_norm.weight",)
    assert [fault.name for fault in inventory.beyond] == [MLP.format(2) + "gate.weight"]
    assert inventory.to_dict()["complete"] is False


def test_labels_of_layers_that_are_not_plain(tmp_path):
    def edit(tensors):
        for name in [name for name in tensors if name.startswith(MLP.format(0))]:
            del tensors[name]
        tensors[ONE + "experts.2.down_proj.weight"] = tensors[ONE + "experts.2.down_proj.weight"].astype(np.float32)

    inventory = take_inventory(build(tmp_path / "ckpt", layout="per_expert", edit=edit))
    assert labels(inventory) == ["absent", "mixed"]
    assert len(inventory.layers[0].faulty("missing")) == 8

    def to_half(tensors):
        for name in [name for name in tensors if name.startswith(ONE + "experts.") and "norm" not in name]:
            tensors[name] = tensors[name].astype(np.float16)

    assert labels(take_inventory(build(tmp_path / "half", edit=to_half))) == ["bf16", "unknown"]


def test_dense_layers(tmp_path):
    config = dataclasses.replace(CONFIG, mlp_types=("sparse", "dense"))
    dense = {ONE + f"{name}_proj.weight": np.zeros((4, 4), ml_dtypes.bfloat16) for name in ("gate", "up", "down")}
    inventory = take_inventory(build(tmp_path / "ckpt", config=config, edit=lambda tensors: tensors.update(dense)))
    assert labels(inventory) == ["bf16", "dense"]
    assert inventory.faults == ()

    def edit(tensors):
        tensors.update(dense)
        tensors[ONE + "gate.weight"] = tensors.pop(ONE + "up_proj.weight")

    layer = take_inventory(build(tmp_path / "bad", config=config, edit=edit)).layers[1]
    assert layer.faulty("missing") == (ONE + "up_proj.weight",)
    assert layer.faulty("stray") == (ONE + "gate.weight",)


@pytest.mark.parametrize("part, kind", [("weight", "missing"), ("weight_scale", "missing"), ("input_scale", "stray")])
def test_quantized_layers_are_audited_tensor_by_tensor(tmp_path, part, kind):
    name = ONE + f"experts.1.up_proj.{part}"

    def edit(tensors):
        for expert in range(CONFIG.num_experts):
            for projection in ("gate", "up", "down"):
                stem = ONE + f"experts.{expert}.{projection}_proj"
                tensors[stem + ".weight_scale"] = np.ones(len(tensors[stem + ".weight"]), np.float32)
        if part == "input_scale":
            tensors[name] = np.ones((), np.float32)
        else:
            del tensors[name]

    folder = build(tmp_path / "ckpt", layout="per_expert", edit=edit)
    _recode(folder / SINGLE_NAME, ONE)
    layer = take_inventory(folder).layers[1]
    assert layer.label == "fp8"
    assert [fault.kind for fault in layer.faults] == [kind]
    assert layer.faulty(kind) == (name,)
    assert "FP8 (weights F8_E4M3, scales F32), but config.json has no quantization_config" in layer.conflict


def _recode(file, prefix):
    """Rewrite a file so that every expert weight under `prefix` is F8_E4M3 (zeros), which safetensors cannot write."""
    entries = header.read_header(file)
    table, position = {}, 0
    for name, entry in entries.items():
        fp8 = name.startswith(prefix + "experts.") and name.endswith("_proj.weight")
        nbytes = entry.elements if fp8 else entry.nbytes
        dtype = "F8_E4M3" if fp8 else entry.dtype
        table[name] = {"dtype": dtype, "shape": entry.shape, "data_offsets": [position, position + nbytes]}
        position += nbytes
    raw = json.dumps(table).encode()
    file.write_bytes(len(raw).to_bytes(8, "little") + raw + bytes(position))
