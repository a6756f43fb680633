"""Names: which are the MoE block's, which only look like it."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from muse_jax.checkpoint.names import WHOLE_NAMES, expert_rest, full_name, name_list, parse

PREFIX = "model.language_model.layers.3.mlp."


@pytest.mark.parametrize("weight, rest", WHOLE_NAMES.items())
def test_whole_names(weight, rest):
    name = parse(PREFIX + rest)
    assert (name.layer, name.weight, name.expert, name.projection, name.part) == (3, weight, None, None, "weight")
    assert full_name(3, rest) == PREFIX + rest


@pytest.mark.parametrize("part", ["weight", "weight_scale", "input_scale"])
@pytest.mark.parametrize(
    "projection, weight", [("gate_proj", "gate_up"), ("up_proj", "gate_up"), ("down_proj", "down")]
)
def test_per_expert_names(projection, weight, part):
    name = parse(PREFIX + expert_rest(12, projection, part))
    assert (name.layer, name.weight, name.expert, name.projection, name.part) == (3, weight, 12, projection, part)


@pytest.mark.parametrize(
    "name",
    [
        "model.language_model.layers.3.self_attn.gate_proj.weight",
        "model.language_model.layers.3.post_attention_residual_gate.gate",
        "model.language_model.layers.3.mlp_gate.weight",
        "model.language_model.layers.03.mlp.gate.weight",
        "model.language_model.layers.-1.mlp.gate.weight",
        "model.language_model.layers.٣.mlp.gate.weight",
        "model.language_model.layers.3.mlp.",
        "model.vision_tower.layers.3.mlp.gate.weight",
        "model.audio_tower.layers.3.mlp.experts.gate_up_proj",
        "model.layers.3.mlp.gate.weight",
        "xmodel.language_model.layers.3.mlp.gate.weight",
        "lm_head.weight",
        "",
    ],
)
def test_names_of_other_parts(name):
    assert parse(name) is None


@pytest.mark.parametrize(
    "rest",
    [
        "gate_proj.weight",
        "gate.bias",
        "experts.gate_up_proj.weight",
        "experts.gate_up_proj_weight_scale",
        "experts.00.gate_proj.weight",
        "experts.0.gate_up_proj.weight",
        "experts.0.gate_proj",
        "experts.0.gate_proj.bias",
        "experts.x.gate_proj.weight",
        "experts.0.gate_proj.weight.extra",
        "shared_expert.gate_proj.weight",
    ],
)
def test_unknown_names_under_the_prefix_are_kept_as_such(rest):
    name = parse(PREFIX + rest)
    assert (name.layer, name.rest, name.weight) == (3, rest, None)


@given(st.text() | st.text().map(lambda text: PREFIX + text) | st.from_regex(r"model\.language_model\.layers\.\d+.*"))
def test_any_text_parses_or_is_not_ours(text):
    name = parse(text)
    assert name is None or full_name(name.layer, name.rest) == text


def test_lists_in_messages_stop_at_eight():
    assert name_list("abcdefgh") == "a, b, c, d, e, f, g, h"
    assert name_list("abcdefghi") == "a, b, c, d, e, f, g, h, ... (9 in all)"
