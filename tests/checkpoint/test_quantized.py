"""Quark's quantized layers: loaded code by code, and refused wherever tensors and quantization_config disagree."""

from __future__ import annotations

import dataclasses
import json
import re

import ml_dtypes
import numpy as np
import pytest

from muse_jax.checkpoint import QuantizedWeight, load, load_layer, stack, take_inventory
from muse_jax.checkpoint.index import SINGLE_NAME
from muse_jax.checkpoint.slots import ExpertSlots
from muse_jax.config import MuseConfig
from muse_jax.reference import quantized as truth
from tests.checkpoint.build import DATA, HF_TINY, MLP, QUARK_FP8, QUARK_MXFP4, assert_same, edit_json, quark_copy
from tests.quark import EXPERTS, quark_weights

FOLDERS = {"fp8": QUARK_FP8, "mxfp4": QUARK_MXFP4}
ONE = MLP.format(1)
FORMS = pytest.mark.parametrize("form", FOLDERS)
VARIANTS = DATA / "quark-tiny" / "config-variants"


def assert_layer(loaded, expected):
    assert list(loaded) == list(expected)
    plain = [name for name in expected if name not in ("gate_up", "down")]
    assert_same({name: loaded[name] for name in plain}, {name: expected[name] for name in plain})
    for name in ("gate_up", "down"):
        ours, theirs = loaded[name], expected[name]
        assert isinstance(ours, QuantizedWeight)
        assert (ours.format, ours.input_scale, ours.shape) == (theirs.format, theirs.input_scale, theirs.shape)
        assert_same({"v": ours.values, "s": ours.scales}, {"v": theirs.values, "s": theirs.scales})


def refusal(folder, layer=1):
    with pytest.raises(ValueError, match=r"layer|config") as error:
        load_layer(folder, layer)
    message = str(error.value)
    assert "\n" not in message
    return message


@FORMS
@pytest.mark.parametrize("layer", [1, 2])
def test_codes_and_scales_are_quarks(form, layer):
    assert_layer(load_layer(FOLDERS[form], layer), quark_weights(form, layer))


@FORMS
@pytest.mark.parametrize("layer", [0, 3])
def test_excluded_layers_are_bfloat16(form, layer):
    assert_same(load_layer(FOLDERS[form], layer), load_layer(HF_TINY, layer))


@FORMS
def test_codes_are_near_the_weights_that_quark_was_given(form):
    """FP8 keeps 3 bits of mantissa, so half a unit is 2^-4 at most; MXFP4 loses about 0.11 (relative RMS)."""
    given = load_layer(HF_TINY, 1)
    for name in ("gate_up", "down"):
        ours = load_layer(FOLDERS[form], 1)[name]
        dense = np.stack([truth.expert_of(ours, expert) for expert in range(EXPERTS)])
        error = np.linalg.norm(dense - given[name].astype(np.float64)) / np.linalg.norm(given[name].astype(np.float64))
        assert (0.02 < error < 0.03) if form == "fp8" else (0.10 < error < 0.13)


@pytest.mark.parametrize("broken", ["swapped projections", "swapped experts"])
@FORMS
def test_broken_placement_would_be_seen(monkeypatch, form, broken):
    if broken == "swapped projections":
        monkeypatch.setattr(stack, "EXPERT_WEIGHTS", {"gate_up": ("up_proj", "gate_proj"), "down": ("down_proj",)})
    else:
        right = stack._Stack.joined
        monkeypatch.setattr(stack._Stack, "joined", lambda self: np.roll(right(self), 1, axis=0))
    with pytest.raises(AssertionError):
        assert_layer(load_layer(FOLDERS[form], 1), quark_weights(form))


def variant(name):
    return json.loads((VARIANTS / f"{name}.json").read_text())


@FORMS
@pytest.mark.parametrize("layer", [0, 3])
def test_config_that_forgets_the_experts_of_bfloat16_layers(tmp_path, form, layer):
    """Quark's own, when it splits fused experts: it calls layers quantized whose tensors are not."""
    settings = variant(f"{form}_fused_source")
    folder = quark_copy(
        tmp_path / "ckpt", FOLDERS[form], edit_quantization=lambda old: (old.clear(), old.update(settings))
    )
    message = refusal(folder, layer)
    assert f"layer {layer}'s experts are stored in BF16 (weights BF16), but quantization_config of " in message
    assert f"config.json says {form.upper()}: neither its exclude list nor its layer_quant_config makes" in message
    assert f"exception of 'model.language_model.layers.{layer}.mlp.experts.0.gate_proj'" in message
    assert_layer(load_layer(folder, 1), quark_weights(form))
    inventory = take_inventory(folder)
    assert [layer.label for layer in inventory.layers] == ["bf16", form, form, "bf16"]
    assert [bool(layer.conflict) for layer in inventory.layers] == [True, False, False, True]
    assert inventory.to_dict()["complete"] is False


@FORMS
def test_in_memory_export(tmp_path, form):
    """The same scheme with its keys in another order, and FP8 scales in bfloat16."""

    def edit(tensors):
        for name in [name for name in tensors if name.endswith("weight_scale") and form == "fp8"]:
            tensors[name] = tensors[name].astype(ml_dtypes.bfloat16)

    settings = variant(f"{form}_in_memory")
    folder = quark_copy(
        tmp_path / "ckpt", FOLDERS[form], edit=edit, edit_quantization=lambda old: (old.clear(), old.update(settings))
    )
    loaded, expected = load_layer(folder, 2), quark_weights(form, 2)
    assert loaded["down"].scales.dtype == expected["down"].scales.dtype
    if form == "fp8":
        rounded = expected["down"].scales.astype(ml_dtypes.bfloat16).astype(np.float32)
        np.testing.assert_array_equal(loaded["down"].scales, rounded)
    else:
        assert_layer(loaded, expected)


def test_scales_of_two_dtypes_are_each_widened(tmp_path):
    """The format allows float32 and bfloat16; one of each side by side loses nothing."""

    def edit(tensors):
        for expert in range(0, EXPERTS, 2):
            name = ONE + f"experts.{expert}.up_proj.weight_scale"
            tensors[name] = tensors[name].astype(ml_dtypes.bfloat16)

    loaded = load_layer(quark_copy(tmp_path / "ckpt", QUARK_FP8, edit=edit), 1)["gate_up"].scales
    expected = quark_weights("fp8")["gate_up"].scales.copy()
    expected[::2, 96:] = expected[::2, 96:].astype(ml_dtypes.bfloat16).astype(np.float32)
    np.testing.assert_array_equal(loaded, expected)


def to_tensor_scales(tensors):
    for name in [name for name in tensors if name.endswith("weight_scale")]:
        stem = name.removesuffix("weight_scale")
        tensors[name] = tensors[name].max(keepdims=True) if "gate" in name else tensors[name].max()
        tensors[stem + "input_scale"] = np.float32(len(stem) + ("7.mlp" in name)).reshape(())


def as_tensor_scheme(settings):
    for part in settings["global_quant_config"].values():
        if part:
            part.update(qscheme="per_tensor", is_dynamic=False, ch_axis=None)


def test_one_scale_a_tensor_is_given_to_every_row(tmp_path):
    folder = quark_copy(tmp_path / "ckpt", QUARK_FP8, edit=to_tensor_scales, edit_quantization=as_tensor_scheme)
    loaded, channel = load_layer(folder, 1), quark_weights("fp8")
    for expert in range(EXPERTS):
        for rows in (slice(0, 96), slice(96, 192)):
            expected = channel["gate_up"].scales[expert, rows].max()
            assert np.all(loaded["gate_up"].scales[expert, rows] == expected)
        assert np.all(loaded["down"].scales[expert] == channel["down"].scales[expert].max())
    names = [f"{ONE}experts.{e}.{p}_proj." for e in range(EXPERTS) for p in ("gate", "up")]
    assert loaded["gate_up"].input_scale == max(map(len, names))
    assert take_inventory(folder).layers[1].label == "fp8_tensor"


def test_one_scale_a_block(tmp_path):
    config = json.loads((QUARK_FP8 / "config.json").read_text())
    random = np.random.default_rng(0)
    H, F = 256, 128

    def edit(tensors):
        for layer in range(4):
            for name in [name for name in tensors if name.startswith(MLP.format(layer))]:
                rest = name.removeprefix(MLP.format(layer))
                if rest.startswith(("pre_expert", "post_expert", "experts.post_expert")):
                    shape = {"pre_expert_proj.weight": (H, 128), "post_expert_proj.weight": (128, H)}.get(rest, (H,))
                    tensors[name] = np.zeros(shape, ml_dtypes.bfloat16)
                elif "experts" in rest:
                    out, width = (H, F) if "down" in rest else (F, H)
                    if rest.endswith("scale"):
                        tensors[name] = random.uniform(1, 2, (out // 128, width // 128)).astype(np.float32)
                    else:
                        tensors[name] = random.standard_normal((out, width)).astype(tensors[name].dtype)
        edit.tensors = dict(tensors)

    def scheme(settings):
        settings["global_quant_config"]["weight"].update(qscheme="per_block", block_size=[128, 128], ch_axis=None)
        settings["global_quant_config"]["input_tensors"].update(qscheme="per_group", group_size=128, ch_axis=-1)

    folder = quark_copy(tmp_path / "ckpt", QUARK_FP8, edit=edit, edit_quantization=scheme)
    edit_json(
        folder / "config.json",
        lambda value: value["text_config"].update(moe_hidden_size=H, moe_intermediate_size=F),
    )
    loaded = load_layer(folder, 2)
    assert loaded["gate_up"].scales.shape == (EXPERTS, 2, 2)
    assert loaded["down"].has_block_scales
    for expert in range(EXPERTS):
        stem = MLP.format(2) + f"experts.{expert}."
        np.testing.assert_array_equal(
            loaded["gate_up"].scales[expert, 1], edit.tensors[stem + "up_proj.weight_scale"][0]
        )
        np.testing.assert_array_equal(loaded["down"].scales[expert], edit.tensors[stem + "down_proj.weight_scale"])
    assert take_inventory(folder).layers[2].label == "fp8_block"
    assert config["text_config"]["moe_hidden_size"] == 64


@FORMS
def test_no_quantization_config(tmp_path, form):
    folder = quark_copy(tmp_path / "ckpt", FOLDERS[form])
    edit_json(folder / "config.json", lambda value: value.pop("quantization_config"))
    assert "but config.json has no quantization_config that says so" in refusal(folder)
    load_layer(folder, 0)


@FORMS
def test_excluded_but_quantized(tmp_path, form):
    prefix = "model.language_model.layers.1.mlp.experts"
    for number, entry in enumerate([prefix, prefix + ".*", r"re:.*\.layers\.1\..*", "model.language_model.layers.1"]):
        folder = quark_copy(
            tmp_path / f"ckpt{number}",
            FOLDERS[form],
            edit_quantization=lambda old, entry=entry: old["exclude"].append(entry),
        )
        assert refusal(folder).endswith("config.json excludes them")
        load_layer(folder, 2)


def test_another_format_than_the_config_says(tmp_path):
    settings = json.loads((QUARK_MXFP4 / "config.json").read_text())["quantization_config"]
    folder = quark_copy(tmp_path / "ckpt", QUARK_FP8, edit_quantization=lambda old: old.update(settings))
    assert "stored in FP8 (weights F8_E4M3, scales F32), but quantization_config of" in refusal(folder)
    assert "says MXFP4" in refusal(folder)


def test_exceptions_of_a_layer(tmp_path):
    """layer_quant_config beats the global one: MXFP4 for a model that is FP8 but for one layer."""
    mxfp4 = json.loads((QUARK_MXFP4 / "config.json").read_text())["quantization_config"]["global_quant_config"]

    def edit(settings):
        fp8, settings["global_quant_config"] = settings["global_quant_config"], mxfp4
        settings["layer_quant_config"] = {"*.layers.[12].mlp.experts.*": fp8}

    assert_layer(load_layer(quark_copy(tmp_path / "a", QUARK_FP8, edit_quantization=edit), 1), quark_weights("fp8"))

    def edit_to_none(settings):
        settings["layer_quant_config"] = {"*.layers.1.mlp.experts.*": {"weight": None, "input_tensors": None}}

    folder = quark_copy(tmp_path / "b", QUARK_FP8, edit_quantization=edit_to_none)
    assert refusal(folder).endswith("config.json excludes them")


def test_a_config_that_quantizes_some_experts_only(tmp_path):
    names = [f"model.language_model.layers.1.mlp.experts.{expert}.up_proj" for expert in range(9)]
    folder = quark_copy(tmp_path / "ckpt", QUARK_FP8, edit_quantization=lambda old: old["exclude"].extend(names))
    message = refusal(folder)
    assert "gives layer 1's experts several schemes, fp8: " in message
    assert f"not quantized: '{names[0]}', " in message
    assert message.endswith("(9 in all)")


@FORMS
def test_half_quantized_tensors(tmp_path, form):
    plain = load_layer(HF_TINY, 1)["down"]

    def edit(tensors):
        for expert in range(5):
            tensors[ONE + f"experts.{expert}.down_proj.weight"] = plain[expert]
            del tensors[ONE + f"experts.{expert}.down_proj.weight_scale"]

    message = refusal(quark_copy(tmp_path / "ckpt", FOLDERS[form], edit=edit))
    assert "holds experts in a mix of formats (weights BF16 and " in message
    assert "5 missing tensors: " in message
    assert "5 wrong dtype tensors: " in message


@FORMS
@pytest.mark.parametrize("part", ["weight", "weight_scale"])
def test_missing_slots_show_eight_and_the_count(tmp_path, form, part):
    def edit(tensors):
        for expert in range(10):
            del tensors[ONE + f"experts.{expert}.gate_proj.{part}"]

    message = refusal(quark_copy(tmp_path / "ckpt", FOLDERS[form], edit=edit))
    assert f"10 missing tensors: '{ONE}experts.0.gate_proj.{part}'" in message
    assert message.endswith("... (10 in all)")


@FORMS
@pytest.mark.parametrize(
    "rest", ["experts.16.gate_proj.weight", "experts.0.up_proj.input_scale", "experts.gate_up_proj"]
)
def test_stray_tensors(tmp_path, form, rest):
    def edit(tensors):
        tensors[ONE + rest] = tensors[ONE + "experts.0.gate_proj.weight"].copy()

    message = refusal(quark_copy(tmp_path / "ckpt", FOLDERS[form], edit=edit))
    assert "stray tensor" in message
    assert f"'{ONE}{rest}'" in message


@FORMS
@pytest.mark.parametrize("fault", ["shape", "dtype"])
def test_scales_of_another_kind(tmp_path, form, fault):
    name = ONE + "experts.3.down_proj.weight_scale"

    def edit(tensors):
        tensors[name] = tensors[name][:-1].copy() if fault == "shape" else tensors[name].astype(np.int64)

    assert f"'{name}'" in refusal(quark_copy(tmp_path / "ckpt", FOLDERS[form], edit=edit))


def test_no_tensor_is_read_before_every_check_passed(tmp_path, monkeypatch):
    folder = quark_copy(
        tmp_path / "ckpt", QUARK_FP8, edit=lambda tensors: tensors.pop(ONE + "experts.0.down_proj.weight_scale")
    )
    for module in (load, stack):
        monkeypatch.setattr(module, "read_into", lambda targets: pytest.fail("read"))
    assert "1 missing tensor" in refusal(folder)


def without(key):
    return lambda settings: settings.pop(key)


def changed(part, **values):
    return lambda settings: settings["global_quant_config"][part].update(values)


@pytest.mark.parametrize(
    "form, edit, message",
    [
        (
            "fp8",
            lambda s: s.update(quant_method="compressed-tensors"),
            "has quant_method 'compressed-tensors'; only AMD Q",
        ),
        ("fp8", without("quant_method"), "has quant_method None"),
        ("fp8", without("global_quant_config"), "has no global_quant_config"),
        ("fp8", lambda s: s.update(exclude="lm_head"), "exclude is 'lm_head'; expected a list of module names"),
        ("fp8", lambda s: s.update(layer_type_quant_config={"Linear": {}}), "has a layer_type_quant_config"),
        ("fp8", lambda s: s["export"].update(weight_format="fake_quantized"), "weight_format 'fake_quantized'"),
        ("fp8", changed("weight", dtype="int8"), "with weight {dtype: int8, qscheme: per_channel, ch_axis: 0"),
        ("fp8", changed("weight", qscheme="per_tensor"), "the schemes served are fp8, fp8_tensor, fp8_block, mxfp4"),
        ("fp8", changed("input_tensors", is_dynamic=False), "input_tensors {dtype: fp8_e4m3, qscheme: per_channel"),
        ("fp8", lambda s: s["global_quant_config"].update(input_tensors=None), "and input_tensors none; the schemes"),
        ("mxfp4", changed("weight", group_size=16), "group_size: 16, scale_format: e8m0"),
        ("mxfp4", changed("input_tensors", dtype="fp6_e3m2"), "input_tensors {dtype: fp6_e3m2"),
    ],
)
def test_schemes_that_are_not_served(tmp_path, form, edit, message):
    folder = quark_copy(tmp_path / "ckpt", FOLDERS[form], edit_quantization=edit)
    found = refusal(folder)
    assert message in found
    assert "config.json" in found
    with pytest.raises(ValueError, match=re.escape(message)):
        take_inventory(folder)


def test_widths_that_blocks_do_not_divide(tmp_path):
    folder = quark_copy(tmp_path / "ckpt", QUARK_MXFP4)
    config = MuseConfig.from_checkpoint(folder)
    with pytest.raises(ValueError, match="expert_width is 80; this format needs a multiple of 32"):
        load_layer(folder, 1, dataclasses.replace(config, expert_width=80))


def test_single_file_beside_its_config(tmp_path):
    folder = quark_copy(tmp_path / "ckpt", QUARK_MXFP4)
    assert_layer(load_layer(folder / SINGLE_NAME, 1), quark_weights("mxfp4"))


def rests(experts, parts=("weight", "weight_scale")):
    projections = ("gate_proj", "up_proj", "down_proj")
    return [f"{ONE}experts.{e}.{p}.{part}" for e in range(experts) for p in projections for part in parts]


def test_slots_filled_by_several_groups():
    slots = ExpertSlots(1, 3)
    names = rests(3)
    slots.deliver([*names[:7], MLP.format(2) + "experts.0.up_proj.weight", "lm_head.weight", ONE + "gate.weight"], "a")
    with pytest.raises(ValueError, match=r"layer 1 has 7 of 18 tensors .* missing: .*\.\.\. \(11 in all\)"):
        slots.check()
    slots.deliver(names[7:], "b")
    slots.check()


def test_a_slot_delivered_twice_is_refused_across_groups():
    slots = ExpertSlots(1, 3)
    slots.deliver(rests(3), "first.safetensors")
    with pytest.raises(
        ValueError, match=r"'experts.2.down_proj.weight_scale' in first.safetensors and second.safetens"
    ):
        slots.deliver([ONE + "experts.2.down_proj.weight_scale"], "second.safetensors")


def test_missing_slots_are_named_before_strays():
    slots = ExpertSlots(1, 3)
    slots.deliver([*rests(3)[1:], ONE + "experts.3.up_proj.weight"], "a")
    with pytest.raises(ValueError, match=r"17 of 18 .* missing: 'experts.0.gate_proj.weight'"):
        slots.check()
    slots.deliver(rests(3)[:1], "b")
    with pytest.raises(ValueError, match=r"belong nowhere: 'experts.3.up_proj.weight' in a"):
        slots.check()
