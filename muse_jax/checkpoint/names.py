"""Tensor names of the MoE block: which weight, of which layer and expert, a checkpoint's name stands for.

    model.language_model.layers.{i}.mlp.<rest>
    <rest> = gate.weight | experts.gate_up_proj | ...      one tensor a weight (WHOLE_NAMES)
    <rest> = experts.{e}.gate_proj.weight | ...            one tensor an expert and projection, as Quark writes them

Only names under that prefix are the block's: attention has a `gate_proj` too, and so may the vision tower.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass

from muse_jax.config import MuseConfig

WHOLE_NAMES = {
    "router_weight": "gate.weight",
    "router_bias": "gate.e_score_correction_bias",
    "pre_expert_proj": "pre_expert_proj.weight",
    "pre_expert_norm": "pre_expert_norm.weight",
    "gate_up": "experts.gate_up_proj",
    "down": "experts.down_proj",
    "post_expert_norm": "experts.post_expert_norm.weight",
    "post_expert_proj": "post_expert_proj.weight",
}
ROUTER_WEIGHTS = ("router_weight", "router_bias")
EXPERT_WEIGHTS = {"gate_up": ("gate_proj", "up_proj"), "down": ("down_proj",)}
SHOWN = 8  # names listed in a message before it only counts
DENSE_NAMES = ("gate_proj.weight", "up_proj.weight", "down_proj.weight")

_WEIGHT_OF_REST = {rest: weight for weight, rest in WHOLE_NAMES.items()}
_WEIGHT_OF_PROJECTION = {part: weight for weight, parts in EXPERT_WEIGHTS.items() for part in parts}
_INDEX = r"(0|[1-9][0-9]{0,8})"
_LAYER = re.compile(rf"model\.language_model\.layers\.{_INDEX}\.mlp\.(.+)")
_EXPERT = re.compile(rf"experts\.{_INDEX}\.(gate_proj|up_proj|down_proj)\.(weight|weight_scale|input_scale)")


@dataclass(frozen=True, kw_only=True)
class MlpName:
    """What a name under a layer's mlp prefix stands for.

    weight: a key of WHOLE_NAMES, or None for a name that this project does not know (or one of a dense MLP).
    expert, projection: set for per-expert names; both None when one tensor holds the whole weight.
    part: "weight", "weight_scale" or "input_scale".
    """

    layer: int
    rest: str
    weight: str | None = None
    expert: int | None = None
    projection: str | None = None
    part: str = "weight"


def parse(name: str) -> MlpName | None:
    """What `name` stands for, or None when it lies under no layer's mlp prefix (attention, embeddings, towers)."""
    match = _LAYER.fullmatch(name)
    if match is None:
        return None
    layer, rest = int(match[1]), match[2]
    if rest in _WEIGHT_OF_REST:
        return MlpName(layer=layer, rest=rest, weight=_WEIGHT_OF_REST[rest])
    match = _EXPERT.fullmatch(rest)
    if match is None:
        return MlpName(layer=layer, rest=rest)
    expert, projection, part = int(match[1]), match[2], match[3]
    weight = _WEIGHT_OF_PROJECTION[projection]
    return MlpName(layer=layer, rest=rest, weight=weight, expert=expert, projection=projection, part=part)


def full_name(layer: int, rest: str) -> str:
    """The name in a checkpoint of `rest` under layer's mlp prefix."""
    return f"model.language_model.layers.{layer}.mlp.{rest}"


def expert_rest(expert: int, projection: str, part: str = "weight") -> str:
    """The per-expert name under a layer's mlp prefix."""
    return f"experts.{expert}.{projection}.{part}"


def weight_shapes(config: MuseConfig) -> dict[str, tuple[int, ...]]:
    """The shape of each weight of one layer, in the order of the dict that `load_layer` returns."""
    D, H, F, E = config.model_width, config.latent_width, config.expert_width, config.num_experts
    return {
        "router_weight": (E, D),
        "router_bias": (E,),
        "pre_expert_proj": (H, D),
        "pre_expert_norm": (H,),
        "gate_up": (E, 2 * F, H),
        "down": (E, H, F),
        "post_expert_norm": (H,),
        "post_expert_proj": (D, H),
    }


def projection_shape(config: MuseConfig, projection: str) -> tuple[int, int]:
    """[out, in] of one expert's projection."""
    H, F = config.latent_width, config.expert_width
    return (H, F) if projection == "down_proj" else (F, H)


def name_list(names: Iterable[str]) -> str:
    """The first eight of `names` and, when there are more, how many there are: 'a, b, ... (12 in all)'."""
    names = list(names)
    more = f", ... ({len(names)} in all)" if len(names) > SHOWN else ""
    return ", ".join(names[:SHOWN]) + more
