"""load_layer: every layout gives the same bytes, only the layer's bytes are read, every fault is named."""

from __future__ import annotations

import dataclasses
import json
import struct
from pathlib import Path

import ml_dtypes
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from muse_jax.checkpoint import load, load_layer
from muse_jax.checkpoint.header import read_header
from muse_jax.checkpoint.index import INDEX_NAME, SINGLE_NAME
from muse_jax.checkpoint.names import WHOLE_NAMES
from muse_jax.checkpoint.synthetic import small_config
from muse_jax.config import MuseConfig
from tests.checkpoint.build import (
    CONFIG,
    HF_TINY,
    MLP,
    QUARK_FP8,
    QUARK_MXFP4,
    assert_same,
    build,
    edit_json,
    shard_of,
    truth,
)

D, H, F, E = CONFIG.model_width, CONFIG.latent_width, CONFIG.expert_width, CONFIG.num_experts
ONE = MLP.format(1)


def raw_layer(folder: Path, layer: int) -> dict[str, np.ndarray]:
    """hf-tiny's weights read without this project's code: names written out, bytes cut by the header's offsets."""
    weights = {}
    for file in folder.glob("*.safetensors"):
        data = file.read_bytes()
        (length,) = struct.unpack("<Q", data[:8])
        header = json.loads(data[8 : 8 + length])
        for weight, rest in WHOLE_NAMES.items():
            info = header.get(f"model.language_model.layers.{layer}.mlp.{rest}")
            if info:
                begin, end = (8 + length + offset for offset in info["data_offsets"])
                dtype = {"F32": np.float32, "BF16": ml_dtypes.bfloat16}[info["dtype"]]
                weights[weight] = np.frombuffer(data[begin:end], dtype).reshape(info["shape"])
    return {weight: weights[weight] for weight in WHOLE_NAMES}


@pytest.mark.parametrize("layer", range(4))
def test_golden_consolidated_checkpoint(layer):
    loaded = load_layer(HF_TINY, layer)
    assert_same(loaded, raw_layer(HF_TINY, layer))
    assert all(value.flags.c_contiguous and value.flags.writeable for value in loaded.values())


@pytest.mark.parametrize("layer", [0, 3])
@pytest.mark.parametrize("folder", [QUARK_FP8, QUARK_MXFP4], ids=lambda folder: folder.name)
def test_golden_per_expert_layers_equal_the_consolidated_ones(folder, layer):
    assert_same(load_layer(folder, layer), raw_layer(HF_TINY, layer))


def swap_experts(name, tensor):
    return (dataclasses.replace(name, expert={0: 1, 1: 0}.get(name.expert, name.expert)), tensor)


def swap_gate_and_up(name, tensor):
    projection = {"gate_proj": "up_proj", "up_proj": "gate_proj"}.get(name.projection, name.projection)
    return (dataclasses.replace(name, projection=projection), tensor)


@pytest.mark.parametrize("broken", [swap_experts, swap_gate_and_up])
def test_broken_placement_would_be_seen(monkeypatch, broken):
    right = load._targets
    monkeypatch.setattr(
        load, "_targets", lambda weights, tensors, config: right(weights, tuple(broken(*t) for t in tensors), config)
    )
    with pytest.raises(AssertionError):
        assert_same(load_layer(QUARK_FP8, 0), raw_layer(HF_TINY, 0))


@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
@pytest.mark.parametrize("shards", [1, 5])
@pytest.mark.parametrize("layout", ["consolidated", "per_expert"])
def test_every_layout_gives_the_same_weights(tmp_path, layout, shards, dtype):
    folder = build(tmp_path / "ckpt", layout=layout, shards=shards, dtype=dtype)
    for layer in range(CONFIG.num_layers):
        assert_same(load_layer(folder, layer), truth(layer, dtype=dtype))
        assert_same(load_layer(str(folder), np.int64(layer), CONFIG), truth(layer, dtype=dtype))


@pytest.mark.parametrize("whole", ["gate_up", "down"])
def test_one_expert_weight_whole_and_the_other_per_expert(tmp_path, whole):
    def edit(tensors):
        rest, parts = {"gate_up": ("experts.gate_up_proj", "gu"), "down": ("experts.down_proj", "d")}[whole]
        for name in [name for name in tensors if ".experts." in name and name.split(".")[-2][0] in parts]:
            del tensors[name]
        for layer in range(CONFIG.num_layers):
            tensors[MLP.format(layer) + rest] = truth(layer)[whole]

    def edit_with_norm_kept(tensors):
        norms = {name: value for name, value in tensors.items() if name.endswith("_norm.weight")}
        edit(tensors)
        tensors.update(norms)

    folder = build(tmp_path / "ckpt", layout="per_expert", shards=4, edit=edit_with_norm_kept)
    for layer in range(CONFIG.num_layers):
        assert_same(load_layer(folder, layer), truth(layer))


def test_single_file_beside_its_config(tmp_path):
    folder = build(tmp_path / "ckpt")
    assert_same(load_layer(folder / SINGLE_NAME, 1), truth(1))


def test_checkpoint_without_towers_or_attention(tmp_path):
    def only_moe(tensors):
        for name in [name for name in tensors if not name.startswith("model.language_model.") or ".mlp." not in name]:
            del tensors[name]

    assert_same(load_layer(build(tmp_path / "ckpt", edit=only_moe), 0), truth(0))


@pytest.mark.skipif(not Path("/proc/self/io").exists(), reason="needs Linux's count of the bytes a process read")
@pytest.mark.parametrize("layout", ["consolidated", "per_expert"])
def test_only_the_layers_bytes_are_read(tmp_path, layout):
    config = small_config(model_width=256, latent_width=128, expert_width=128, num_experts=16, num_layers=4)
    folder = build(tmp_path / "ckpt", config=config, layout=layout, shards=3)

    def bytes_read():
        return int(Path("/proc/self/io").read_text().split()[1])

    load_layer(folder, 2)  # imports and caches are warm after this
    before = bytes_read()
    weights = load_layer(folder, 2)
    read = bytes_read() - before
    layer = sum(value.nbytes for value in weights.values())
    headers = sum(8 + min(entry.start for entry in read_header(file).values()) for file in folder.glob("*.safetensors"))
    other = headers + sum((folder / name).stat().st_size for name in ("config.json", INDEX_NAME))
    assert layer > 1_500_000
    assert layer + other - 100 <= read <= layer + other + 20_000


def test_no_tensor_is_read_before_every_check_passed(tmp_path, monkeypatch):
    folder = build(tmp_path / "ckpt", edit=lambda tensors: tensors.pop(ONE + "post_expert_proj.weight"))
    monkeypatch.setattr(load, "read_into", lambda targets: pytest.fail("read"))
    with pytest.raises(ValueError, match="post_expert_proj"):
        load_layer(folder, 1)


def refusal(folder, layer=1, config=None):
    with pytest.raises(ValueError, match=r"layer|config") as error:
        load_layer(folder, layer, config)
    message = str(error.value)
    assert "\n" not in message
    return message


@pytest.mark.parametrize("rest", WHOLE_NAMES.values())
def test_missing_tensor(tmp_path, rest):
    message = refusal(build(tmp_path / "ckpt", edit=lambda tensors: tensors.pop(ONE + rest)))
    assert f"1 missing tensor: '{ONE}{rest}'" in message
    assert "layer 1 of" in message
    assert "model.safetensors" in message


def test_missing_experts_show_eight_and_the_count(tmp_path):
    def edit(tensors):
        for name in [name for name in tensors if name.startswith(ONE + "experts.") and "norm" not in name][1:]:
            del tensors[name]

    message = refusal(build(tmp_path / "ckpt", layout="per_expert", edit=edit))
    # gate_proj of expert 0 is left: two projections of the others and up_proj of 0 are missing, and down as a whole.
    assert f"6 missing tensors: '{ONE}experts.0.up_proj.weight', '{ONE}experts.1.gate_proj.weight'" in message
    assert f"'{ONE}experts.down_proj'" in message
    config = small_config(num_experts=9)
    folder = build(tmp_path / "more", config=config, layout="per_expert")
    edit_json(folder / "config.json", lambda value: value["text_config"].update(num_local_experts=14))
    message = refusal(folder)
    assert "15 missing tensors" in message
    assert "... (15 in all)" in message
    assert message.count(".gate_proj.weight'") + message.count(".up_proj.weight'") == 8


def test_whole_and_per_expert_for_the_same_weight(tmp_path):
    name = ONE + "experts.2.up_proj.weight"
    folder = build(tmp_path / "ckpt", edit=lambda tensors: tensors.update({name: truth(1)["gate_up"][2, F:].copy()}))
    message = refusal(folder)
    assert f"1 duplicate tensor: '{name}' in model.safetensors" in message
    assert f"'{ONE}experts.gate_up_proj' holds as well" in message
    assert_same(load_layer(folder, 0), truth(0))


@pytest.mark.parametrize(
    "rest",
    [
        "gate_proj.weight",
        "shared_expert.up_proj.weight",
        "gate.bias",
        f"experts.{E}.gate_proj.weight",
        "experts.0.gate_proj.input_scale",
        "experts.gate_up_proj_weight_scale",
    ],
)
@pytest.mark.parametrize("layout", ["consolidated", "per_expert"])
def test_stray_tensor(tmp_path, rest, layout):
    value = np.zeros((F, H), ml_dtypes.bfloat16)
    folder = build(tmp_path / "ckpt", layout=layout, shards=2, edit=lambda tensors: tensors.update({ONE + rest: value}))
    file = shard_of(folder, ONE + rest).name
    assert f"1 stray tensor: '{ONE}{rest}' in {file}" in refusal(folder)
    assert_same(load_layer(folder, 0), truth(0))


@pytest.mark.parametrize("rest", WHOLE_NAMES.values())
def test_wrong_shape(tmp_path, rest):
    def edit(tensors):
        tensors[ONE + rest] = np.concatenate([tensors[ONE + rest]] * 2)

    message = refusal(build(tmp_path / "ckpt", edit=edit))
    assert f"1 wrong shape tensor: '{ONE}{rest}' in model.safetensors is [" in message
    assert ", expected [" in message


def test_gate_and_up_stored_transposed(tmp_path):
    def edit(tensors):
        name = ONE + "experts.1.gate_proj.weight"
        tensors[name] = tensors[name].T.copy()

    message = refusal(build(tmp_path / "ckpt", layout="per_expert", edit=edit))
    assert f"experts.1.gate_proj.weight' in model.safetensors is [{H}, {F}], expected [{F}, {H}]" in message


@pytest.mark.parametrize(
    "rest, dtype, found, expected",
    [
        ("gate.weight", ml_dtypes.bfloat16, "BF16", "F32"),
        ("gate.e_score_correction_bias", ml_dtypes.bfloat16, "BF16", "F32"),
        ("pre_expert_proj.weight", np.float32, "F32", "BF16"),
        ("pre_expert_norm.weight", np.float16, "F16", "BF16"),
        ("experts.post_expert_norm.weight", np.float32, "F32", "BF16"),
        ("experts.down_proj", np.float16, "F16", "BF16"),
    ],
)
def test_wrong_dtype(tmp_path, rest, dtype, found, expected):
    def edit(tensors):
        tensors[ONE + rest] = tensors[ONE + rest].astype(np.float32).astype(dtype)

    message = refusal(build(tmp_path / "ckpt", edit=edit))
    assert f"1 wrong dtype tensor: '{ONE}{rest}' in model.safetensors is {found}, expected {expected}" in message


def test_float32_experts_want_a_float32_layer(tmp_path):
    def edit(tensors):
        tensors[ONE + "pre_expert_proj.weight"] = truth(1)["pre_expert_proj"]

    message = refusal(build(tmp_path / "ckpt", dtype="float32", edit=edit))
    assert f"'{ONE}pre_expert_proj.weight' in model.safetensors is BF16, expected F32" in message


@pytest.mark.parametrize("layout", ["consolidated", "per_expert"])
def test_experts_of_two_dtypes(tmp_path, layout):
    name = ONE + ("experts.down_proj" if layout == "consolidated" else "experts.2.down_proj.weight")

    def edit(tensors):
        tensors[name] = tensors[name].astype(np.float32)

    message = refusal(build(tmp_path / "ckpt", layout=layout, edit=edit))
    assert "holds experts in a mix of formats (weights BF16 and F32)" in message
    assert f"1 wrong dtype tensor: '{name}' in model.safetensors is F32, expected BF16" in message


def test_scales_beside_bf16_experts_are_refused_by_name(tmp_path):
    name = ONE + "experts.0.down_proj.weight_scale"
    folder = build(
        tmp_path / "ckpt", layout="per_expert", edit=lambda tensors: tensors.update({name: np.ones(H, np.float32)})
    )
    message = refusal(folder)
    assert "an unknown format (weights BF16, scales F32); expected all BF16, all F32, or all of one quant" in message
    assert f"1 stray tensor: '{name}'" in message


@pytest.mark.parametrize("layer", [-1, 2, 10**30, True, 1.0, "1", None])
def test_layers_that_do_not_exist(tmp_path, layer):
    assert f"layer is {layer!r}; expected " in refusal(build(tmp_path / "ckpt"), layer)


def test_dense_layers_have_no_block(tmp_path):
    config = dataclasses.replace(CONFIG, mlp_types=("sparse", "dense"))
    folder = build(tmp_path / "ckpt", config=config)
    assert_same(load_layer(folder, 0), truth(0))
    assert "layer 1 has a dense MLP" in refusal(folder)


def test_config_that_belongs_to_another_checkpoint(tmp_path):
    folder = build(tmp_path / "ckpt")
    message = refusal(folder, config=dataclasses.replace(CONFIG, expert_width=F + 1))
    assert "2 wrong shape tensors: " in message
    assert f"'{ONE}experts.gate_up_proj' in model.safetensors is [{E}, {2 * F}, {H}]" in message
    assert f", expected [{E}, {H}, {F + 1}]" in message


def test_config_must_be_there(tmp_path):
    folder = build(tmp_path / "ckpt")
    (folder / "config.json").unlink()
    assert "config.json does not exist" in refusal(folder)
    assert_same(load_layer(folder, 0, CONFIG), truth(0))
    with pytest.raises(FileNotFoundError, match="nowhere"):
        load_layer(tmp_path / "nowhere", 0)


def test_other_layers_faults_do_not_matter(tmp_path):
    folder = build(tmp_path / "ckpt", edit=lambda tensors: tensors.pop(MLP.format(0) + "gate.weight"))
    assert_same(load_layer(folder, 1), truth(1))
    refusal(folder, 0)


@pytest.fixture(scope="module")
def flippable(tmp_path_factory):
    return build(tmp_path_factory.mktemp("flip") / "ckpt", layout="per_expert")


@settings(max_examples=300, deadline=None)
@given(where=st.floats(0, 1, exclude_max=True), byte=st.integers(0, 255))
def test_a_flipped_header_byte_is_refused_or_harmless(flippable, where, byte):
    file = flippable / SINGLE_NAME
    right = file.read_bytes()
    header = 8 + int.from_bytes(right[:8], "little")
    wrong = bytearray(right)
    wrong[int(where * header)] = byte
    file.write_bytes(wrong)
    try:
        loaded = load_layer(flippable, 1)
    except ValueError:
        return
    finally:
        file.write_bytes(right)
    assert_same(loaded, truth(1))


def test_config_read_once_serves_every_layer():
    config = MuseConfig.from_checkpoint(HF_TINY)
    assert_same(load_layer(HF_TINY, 3, config), raw_layer(HF_TINY, 3))
