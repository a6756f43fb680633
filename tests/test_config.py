"""MuseConfig: what it reads from config.json, and which field it names when it refuses."""

from __future__ import annotations

import copy
import dataclasses
import json
import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from muse_jax.config import HF_NAMES, MuseConfig
from tests.checkpoint.build import HF_TINY, QUARK_FP8, QUARK_MXFP4

TINY = json.loads((HF_TINY / "config.json").read_text())
READ = [*HF_NAMES.values(), "hidden_act", "attention_bias", "rope_parameters", "model_type"]


def changed(**text):
    config = copy.deepcopy(TINY)
    config["text_config"].update(text)
    return config


def refusal(config):
    with pytest.raises(ValueError, match=r".") as error:
        MuseConfig.from_dict(config)
    message = str(error.value)
    assert "\n" not in message
    return message


@pytest.mark.parametrize("folder", [HF_TINY, QUARK_FP8, QUARK_MXFP4], ids=lambda folder: folder.name)
def test_golden_configurations(folder):
    config = MuseConfig.from_checkpoint(folder)
    assert config == MuseConfig(
        model_width=128,
        latent_width=64,
        expert_width=96,
        num_experts=16,
        routes_per_token=4,
        num_layers=4,
        norm_eps=1e-5,
        post_norm_eps=1e-8,
        output_multiplier=0.7,
        route_scale=1.0,
        attention_types=("sliding_attention",) * 3 + ("full_attention",),
        mlp_types=("sparse",) * 4,
        rope_thetas=(5e5, 5e5, 5e5, 0),
        scoring="sigmoid",
        score_eps=1e-15,
    )
    assert config == MuseConfig.from_checkpoint(next(folder.glob("*.safetensors")))
    assert hash(config) == hash(dataclasses.replace(config))


def test_text_configuration_alone():
    assert MuseConfig.from_dict(TINY["text_config"]) == MuseConfig.from_dict(TINY)


def test_written_configuration_reads_back():
    config = MuseConfig.from_dict(changed(routed_scaling_factor=2.5, mlp_layer_types=["dense", "sparse"] * 2))
    assert MuseConfig.from_dict(json.loads(json.dumps(config.to_dict()))) == config
    assert config.moe_layers == (1, 3)
    with pytest.raises(ValueError, match="softmax"):
        dataclasses.replace(config, scoring="softmax").to_dict()


def test_lists_are_read_not_derived():
    odd = ["full_attention", "sliding_attention", "full_attention", "sliding_attention"]
    config = MuseConfig.from_dict(changed(layer_types=odd, layer_rope_theta=[1, 0, 3.5, 10000]))
    assert config.attention_types == tuple(odd)
    assert config.rope_thetas == (1.0, 0.0, 3.5, 10000.0)


def test_keys_that_do_not_concern_the_block_are_ignored():
    config = changed(vocab_size="?", use_cache=None, anything={"at": "all"}, head_dim=-1, num_shared_experts=0)
    config |= {"quantization_config": {}, "vision_config": 3, "unknown": []}
    assert MuseConfig.from_dict(config) == MuseConfig.from_dict(TINY)


@pytest.mark.parametrize("name", READ)
@pytest.mark.parametrize("nested", [True, False])
def test_no_field_has_a_default(name, nested):
    config = copy.deepcopy(TINY)
    del config["text_config"][name]
    message = refusal(config if nested else config["text_config"])
    assert f"{name} is missing" in message


@pytest.mark.parametrize(
    "config, message",
    [
        ([], "configuration is a list"),
        ({}, "model_type is missing"),
        ({"model_type": "llama"}, "model_type is 'llama'; expected 'muse_spark' or 'muse_spark_text'"),
        ({"model_type": ["muse_spark"]}, "model_type is"),
        ({"model_type": "muse_spark"}, "text_config is missing"),
        ({"model_type": "muse_spark", "text_config": None}, "text_config is None"),
        ({"model_type": "muse_spark", "text_config": {"model_type": "llama"}}, "text_config.model_type is 'llama'"),
    ],
)
def test_other_models(config, message):
    assert message in refusal(config)


WRONG = [
    ("num_shared_experts", 1),
    ("num_shared_experts", "2"),
    ("n_shared_experts", 1),
    ("shared_expert_intermediate_size", 64),
    ("hidden_act", "gelu"),
    ("hidden_act", None),
    ("attention_bias", True),
    ("attention_bias", 0),
    ("attention_bias", None),
    ("scoring_func", "softmax"),
    ("norm_topk_prob", False),
    ("n_group", 4),
    ("mlp_bias", True),
    ("swiglu_limit", 7.0),
    ("rope_scaling", {"type": "linear"}),
    ("rope_parameters", {"rope_type": "yarn"}),
    ("rope_parameters", {"rope_theta": 1.0}),
    ("rope_parameters", None),
    ("num_experts_per_tok", 17),
    ("num_local_experts", 3),
    ("layer_types", ["full_attention"] * 3),
    ("layer_types", ["full_attention"] * 5),
    ("layer_types", ["full_attention"] * 3 + ["chunked_attention"]),
    ("layer_types", ["full_attention"] * 3 + [["full_attention"]]),
    ("layer_types", "full_attention"),
    ("layer_types", None),
    ("mlp_layer_types", ["sparse"] * 3),
    ("mlp_layer_types", ["sparse"] * 3 + ["moe"]),
    ("mlp_layer_types", ["sparse"] * 3 + [1]),
    ("layer_rope_theta", [0] * 3),
    ("layer_rope_theta", [0, 0, 0, -1]),
    ("layer_rope_theta", [0, 0, 0, "5e5"]),
    ("layer_rope_theta", [0, 0, 0, True]),
    ("layer_rope_theta", [0, 0, 0, math.inf]),
    ("layer_rope_theta", 5e5),
    ("num_hidden_layers", 5),
]
COUNTS = "hidden_size moe_hidden_size moe_intermediate_size num_local_experts num_experts_per_tok num_hidden_layers"
NUMBERS = "rms_norm_eps post_norm_eps output_multiplier routed_scaling_factor"
WRONG += [(name, value) for name in COUNTS.split() for value in (0, -1, True, "8", 8.0, None, [8], math.nan)]
WRONG += [
    (name, value)
    for name in NUMBERS.split()
    for value in (0, -1.0, True, "1", None, [1.0], math.nan, math.inf, -math.inf, 1e-60, 1e60, 10**400)
]


@pytest.mark.parametrize("name, value", WRONG)
def test_wrong_values_are_refused_by_name(name, value):
    message = refusal(changed(**{name: value}))
    assert name in message
    assert len(message) < 300


json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=5) | st.dictionaries(st.text(max_size=5), inner, max_size=3),
    max_leaves=6,
)


@settings(max_examples=300, deadline=None)
@given(name=st.sampled_from(READ), value=json_values)
def test_any_value_reads_or_is_refused_by_name(name, value):
    try:
        config = MuseConfig.from_dict(changed(**{name: value}))
    except ValueError as error:
        assert name in str(error)  # noqa: PT017 - most values are refused, a few are right
    else:
        assert MuseConfig.from_dict(config.to_dict()) == config


def test_routes_beyond_experts_name_both():
    message = refusal(changed(num_experts_per_tok=17))
    assert "num_experts_per_tok in config.json) is 17" in message
    assert "num_local_experts in config.json), which is 16" in message


def test_built_by_hand_is_checked_as_well():
    config = MuseConfig.from_dict(TINY)
    for wrong in ({"model_width": 0}, {"scoring": "tanh"}, {"score_eps": 0}, {"rope_thetas": ()}, {"num_layers": 3}):
        with pytest.raises(ValueError, match=next(iter(wrong)) if "num_layers" not in wrong else "attention_types"):
            dataclasses.replace(config, **wrong)
    same = dataclasses.replace(config, model_width=np.int64(128), rope_thetas=list(config.rope_thetas))
    assert same == config
    assert type(same.model_width) is int
    assert type(same.rope_thetas) is tuple


@pytest.mark.parametrize("layer", [-1, 4, True, 0.0, "0", None])
def test_layers_out_of_range(layer):
    with pytest.raises(ValueError, match="layer is "):
        MuseConfig.from_dict(TINY).check_moe_layer(layer)


def test_dense_layers():
    config = MuseConfig.from_dict(changed(mlp_layer_types=["sparse", "dense", "dense", "sparse"]))
    assert config.check_moe_layer(np.int32(3)) == 3
    with pytest.raises(ValueError, match=r"layer 1 has a dense MLP .* layers with one: 0, 3"):
        config.check_moe_layer(1)


def test_files(tmp_path):
    with pytest.raises(FileNotFoundError, match="nowhere does not exist"):
        MuseConfig.from_checkpoint(tmp_path / "nowhere")
    with pytest.raises(ValueError, match=r"config\.json does not exist"):
        MuseConfig.from_checkpoint(tmp_path)
    for text, message in {
        "": "not valid JSON",
        "[]": "holds a JSON list",
        '{"model_type": 1, "model_type": 2}': "'model_type' appears twice",
        json.dumps(changed(hidden_size=0)): "hidden_size in config.json) is 0",
        json.dumps(changed(output_multiplier=math.nan)): "output_multiplier is nan",
    }.items():
        (tmp_path / "config.json").write_text(text)
        with pytest.raises(ValueError, match=r"config\.json") as error:
            MuseConfig.from_checkpoint(tmp_path)
        assert message in str(error.value)
