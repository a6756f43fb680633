"""MuseConfig: what the block needs to know of a checkpoint, under this project's names, every field explicit.

    [T, D] -> pre_expert_proj -> [T, H] -> K of E experts (H -> 2F -> F -> H) -> [T, K, H] -> [T, H] -> [T, D]

This is the only file that knows Hugging Face's names for settings (`hidden_size`, `moe_hidden_size`, ...).
"""

from __future__ import annotations

import numbers
import reprlib
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import numpy as np

from muse_jax.strict_json import read_object

HF_NAMES = {
    "model_width": "hidden_size",
    "latent_width": "moe_hidden_size",
    "expert_width": "moe_intermediate_size",
    "num_experts": "num_local_experts",
    "routes_per_token": "num_experts_per_tok",
    "num_layers": "num_hidden_layers",
    "norm_eps": "rms_norm_eps",
    "post_norm_eps": "post_norm_eps",
    "output_multiplier": "output_multiplier",
    "route_scale": "routed_scaling_factor",
    "attention_types": "layer_types",
    "mlp_types": "mlp_layer_types",
    "rope_thetas": "layer_rope_theta",
}
ATTENTION_TYPES = ("full_attention", "sliding_attention")
MLP_TYPES = ("sparse", "dense")
SCORINGS = ("sigmoid", "softmax")

_COUNTS = ("model_width", "latent_width", "expert_width", "num_experts", "routes_per_token", "num_layers")
_NUMBERS = ("norm_eps", "post_norm_eps", "output_multiplier", "route_scale", "score_eps")
_F32_MAX = float(np.finfo(np.float32).max)
_TOP_TYPE, _TEXT_TYPE = "muse_spark", "muse_spark_text"

# Settings that Muse Spark's configuration does not have but its relatives do, with the values under which they change
# nothing here. Any other value asks for another block than this one. (Shared experts have a rule of their own.)
_NEUTRAL: dict[str, tuple[Any, ...]] = {
    "scoring_func": ("sigmoid",),
    "norm_topk_prob": (True,),
    "n_group": (None, 0, 1),
    "topk_group": (None, 0, 1),
    "mlp_bias": (None, False),
    "swiglu_limit": (None,),
    "rope_scaling": (None,),
}


@dataclass(frozen=True, kw_only=True)
class MuseConfig:
    """The settings of every layer's MoE block, checked at construction (also when built by hand).

    Widths: D = model_width, H = latent_width, F = expert_width; E = num_experts, K = routes_per_token.
    norm_eps is the epsilon of pre_expert_norm, post_norm_eps that of post_expert_norm, score_eps the one in
    topk_weights = p / (sum of p + score_eps) * route_scale; output_multiplier scales the router logits.
    The three lists have one entry a layer and are read as they stand, never derived from a pattern:
    attention_types ("full_attention" | "sliding_attention"), mlp_types ("sparse" | "dense"), rope_thetas (0: no rope).
    Raises ValueError naming the field, here and in config.json, what was given and what was expected.
    """

    model_width: int
    latent_width: int
    expert_width: int
    num_experts: int
    routes_per_token: int
    num_layers: int
    norm_eps: float
    post_norm_eps: float
    output_multiplier: float
    route_scale: float
    attention_types: tuple[str, ...]
    mlp_types: tuple[str, ...]
    rope_thetas: tuple[float, ...]
    scoring: Literal["sigmoid", "softmax"] = "sigmoid"
    score_eps: float = 1e-15

    def __post_init__(self) -> None:
        for name in _COUNTS:
            self._store(name, _count(getattr(self, name), _label(name)))
        for name in _NUMBERS:
            self._store(name, _positive(getattr(self, name), _label(name)))
        if self.routes_per_token > self.num_experts:
            raise ValueError(
                f"{_label('routes_per_token')} is {self.routes_per_token}, more than {_label('num_experts')}, "
                f"which is {self.num_experts}: a token's routes go to distinct experts"
            )
        if self.scoring not in SCORINGS:
            raise ValueError(f"scoring is {reprlib.repr(self.scoring)}; expected one of {', '.join(SCORINGS)}")
        self._store("attention_types", self._words("attention_types", ATTENTION_TYPES))
        self._store("mlp_types", self._words("mlp_types", MLP_TYPES))
        thetas = self._per_layer("rope_thetas")
        self._store("rope_thetas", tuple(_theta(v, f"{_label('rope_thetas')}[{i}]") for i, v in enumerate(thetas)))

    @classmethod
    def from_dict(cls, config: Mapping[str, Any]) -> MuseConfig:
        """The settings in a whole config.json (with its `text_config`) or in a text configuration alone.

        Every field must be there: nothing has a default. Keys that do not concern the block are ignored; shared
        experts, another activation, a bias, scaled rope, or a relative's routing setting are refused by name.
        """
        text = _text_config(config)
        _refuse_other_blocks(text)
        return cls(**{ours: _required(text, theirs) for ours, theirs in HF_NAMES.items()})

    @classmethod
    def from_checkpoint(cls, path: str | Path) -> MuseConfig:
        """`from_dict` of the config.json in the folder `path`, or beside the .safetensors file `path`."""
        path = Path(path)
        file = (path if path.is_dir() else path.parent) / "config.json"
        if not path.exists():
            raise FileNotFoundError(f"{path} does not exist; expected a checkpoint folder or a .safetensors file")
        if not file.is_file():
            raise ValueError(f"{file} does not exist; a checkpoint needs its config.json beside its tensors")
        data = read_object(file)
        try:
            return cls.from_dict(data)
        except ValueError as error:
            raise ValueError(f"{file}: {error}") from error

    def to_dict(self) -> dict[str, Any]:
        """A config.json that `from_dict` reads back to an equal MuseConfig; it holds nothing of attention's widths."""
        if self.scoring != "sigmoid" or self.score_eps != 1e-15:
            raise ValueError(
                f"scoring {self.scoring!r} with score_eps {self.score_eps} has no place in config.json, "
                "which always means sigmoid and 1e-15"
            )
        fields = {theirs: getattr(self, ours) for ours, theirs in HF_NAMES.items()}
        text = {name: list(value) if isinstance(value, tuple) else value for name, value in fields.items()}
        text |= {"model_type": _TEXT_TYPE, "hidden_act": "silu", "attention_bias": False}
        text["rope_parameters"] = {"rope_type": "default", "rope_theta": max(self.rope_thetas)}
        return {"architectures": ["MuseSparkForConditionalGeneration"], "model_type": _TOP_TYPE, "text_config": text}

    @property
    def moe_layers(self) -> tuple[int, ...]:
        """The layers that have a MoE block, ascending."""
        return tuple(layer for layer, kind in enumerate(self.mlp_types) if kind == "sparse")

    def check_moe_layer(self, layer: int) -> int:
        """`layer` if it is the index of a layer with a MoE block, otherwise ValueError."""
        if isinstance(layer, bool) or not isinstance(layer, numbers.Integral):
            raise ValueError(f"layer is {reprlib.repr(layer)}; expected an integer")
        if not 0 <= layer < self.num_layers:
            raise ValueError(f"layer is {layer}; expected 0 to {self.num_layers - 1} ({self.num_layers} layers)")
        if self.mlp_types[layer] != "sparse":
            raise ValueError(
                f"layer {layer} has a dense MLP ({_label('mlp_types')}[{layer}] is 'dense'), no MoE block; "
                f"layers with one: {', '.join(map(str, self.moe_layers)) or 'none'}"
            )
        return int(layer)

    def _store(self, name: str, value: object) -> None:
        object.__setattr__(self, name, value)

    def _per_layer(self, name: str) -> tuple[Any, ...]:
        values = getattr(self, name)
        if not isinstance(values, (list, tuple)):
            raise ValueError(f"{_label(name)} is {reprlib.repr(values)}; expected a list with one entry a layer")
        if len(values) != self.num_layers:
            raise ValueError(
                f"{_label(name)} has {len(values)} entries, but {_label('num_layers')} is {self.num_layers}; "
                "expected one entry a layer"
            )
        return tuple(values)

    def _words(self, name: str, known: tuple[str, ...]) -> tuple[str, ...]:
        values = self._per_layer(name)
        for index, value in enumerate(values):
            if value not in known:
                raise ValueError(
                    f"{_label(name)}[{index}] is {reprlib.repr(value)}; expected one of {', '.join(known)}"
                )
        return values


def _label(name: str) -> str:
    theirs = HF_NAMES.get(name, name)
    return name if theirs == name else f"{name} ({theirs} in config.json)"


def _count(value: Any, label: str) -> int:
    if isinstance(value, bool) or not isinstance(value, numbers.Integral):
        raise ValueError(f"{label} is {reprlib.repr(value)}; expected a positive integer")
    if value < 1:
        raise ValueError(f"{label} is {value}; expected a positive integer")
    return int(value)


def _real(value: Any, label: str, expected: str) -> float:
    if isinstance(value, bool) or not isinstance(value, (int, float, np.integer, np.floating)):
        raise ValueError(f"{label} is {reprlib.repr(value)}; expected {expected}")
    if not -_F32_MAX <= value <= _F32_MAX:
        raise ValueError(f"{label} is {reprlib.repr(value)}; expected {expected}")
    return float(value)


def _positive(value: Any, label: str) -> float:
    expected = "a positive number within float32's range"
    number = _real(value, label, expected)
    if not np.float32(number) > 0:
        raise ValueError(f"{label} is {number}; expected {expected}")
    return number


def _theta(value: Any, label: str) -> float:
    expected = "a finite number, 0 (no rope) or above"
    number = _real(value, label, expected)
    if number < 0:
        raise ValueError(f"{label} is {number}; expected {expected}")
    return number


def _text_config(config: Mapping[str, Any]) -> Mapping[str, Any]:
    if not isinstance(config, Mapping):
        raise ValueError(f"the configuration is a {type(config).__name__}; expected an object")
    kind = _required(config, "model_type")
    if kind == _TEXT_TYPE:
        return config
    if kind != _TOP_TYPE:
        raise ValueError(f"model_type is {reprlib.repr(kind)}; expected {_TOP_TYPE!r} or {_TEXT_TYPE!r}")
    text = _required(config, "text_config")
    if not isinstance(text, Mapping):
        raise ValueError(f"text_config is {reprlib.repr(text)}; expected an object")
    inner = _required(text, "model_type", "text_config.")
    if inner != _TEXT_TYPE:
        raise ValueError(f"text_config.model_type is {reprlib.repr(inner)}; expected {_TEXT_TYPE!r}")
    return text


def _required(config: Mapping[str, Any], name: str, prefix: str = "") -> Any:
    if name not in config:
        raise ValueError(f"{prefix}{name} is missing; every setting must be given, none has a default")
    return config[name]


def _refuse_other_blocks(text: Mapping[str, Any]) -> None:
    act = _required(text, "hidden_act")
    if act != "silu":
        raise ValueError(f"hidden_act is {reprlib.repr(act)}; expected 'silu', the only activation of this block")
    bias = _required(text, "attention_bias")
    if bias is not False:
        raise ValueError(f"attention_bias is {reprlib.repr(bias)}; expected false, this model has no biases")
    rope = _required(text, "rope_parameters")
    if not isinstance(rope, Mapping):
        raise ValueError(f"rope_parameters is {reprlib.repr(rope)}; expected an object")
    kind = _required(rope, "rope_type", "rope_parameters.")
    if kind != "default":
        raise ValueError(f"rope_parameters.rope_type is {reprlib.repr(kind)}; expected 'default'")
    for name, value in text.items():
        if "shared_expert" in str(name) and value:
            raise ValueError(f"{name} is {reprlib.repr(value)}; expected 0 or no such key, no expert is shared here")
        if name in _NEUTRAL and value not in _NEUTRAL[name]:
            allowed = " or ".join(map(str, _NEUTRAL[name]))
            raise ValueError(f"{name} is {reprlib.repr(value)}; expected {allowed} or no such key")
