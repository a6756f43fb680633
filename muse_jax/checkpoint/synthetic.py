"""Small checkpoints of random weights under real names, for demonstrations and tests.

    projections ~ N(0, 1 / fan_in)    norm gains ~ N(0, 0.1^2) (zero-centred: 1 + w)    router bias ~ N(0, 0.05^2)

Values depend on the seed, the layer and the weight alone: the same seed gives the same bytes in every layout, however
many shards. The files hold the MoE blocks only: no attention, embeddings or towers.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal

import numpy as np
from safetensors.numpy import save_file

from muse_jax.checkpoint.folder import new_folder
from muse_jax.checkpoint.header import NUMPY_DTYPES
from muse_jax.checkpoint.index import INDEX_NAME, SINGLE_NAME
from muse_jax.checkpoint.names import (
    EXPERT_WEIGHTS,
    ROUTER_WEIGHTS,
    WHOLE_NAMES,
    expert_rest,
    full_name,
    weight_shapes,
)
from muse_jax.config import MuseConfig

Layout = Literal["consolidated", "per_expert"]
_DTYPES = {"bfloat16": NUMPY_DTYPES["BF16"], "float32": NUMPY_DTYPES["F32"]}


def small_config(
    *,
    model_width: int = 96,
    latent_width: int = 64,
    expert_width: int = 80,
    num_experts: int = 8,
    routes_per_token: int = 2,
    num_layers: int = 2,
    output_multiplier: float = 0.7,
    route_scale: float = 1.0,
) -> MuseConfig:
    """A configuration with Muse Spark's epsilons and layer pattern, at widths of the caller's choice."""
    full = [(num_layers - 1 - layer) % 4 == 0 for layer in range(num_layers)]
    return MuseConfig(
        model_width=model_width,
        latent_width=latent_width,
        expert_width=expert_width,
        num_experts=num_experts,
        routes_per_token=routes_per_token,
        num_layers=num_layers,
        norm_eps=1e-5,
        post_norm_eps=1e-8,
        output_multiplier=output_multiplier,
        route_scale=route_scale,
        attention_types=tuple("full_attention" if held else "sliding_attention" for held in full),
        mlp_types=("sparse",) * num_layers,
        rope_thetas=tuple(0.0 if held else 500000.0 for held in full),
    )


def random_layer(
    config: MuseConfig, layer: int, *, seed: int, dtype: Literal["bfloat16", "float32"] = "bfloat16"
) -> dict[str, np.ndarray]:
    """Random weights of one layer, as `load_layer` returns them; router_weight and router_bias are float32."""
    if dtype not in _DTYPES:
        raise ValueError(f"dtype is {dtype!r}; expected one of {', '.join(_DTYPES)}")
    weights = {}
    for index, (name, shape) in enumerate(weight_shapes(config).items()):
        random = np.random.default_rng([seed, layer, index])
        values = random.standard_normal(shape, dtype=np.float32) * np.float32(_scale(name, shape))
        weights[name] = values if name in ROUTER_WEIGHTS else values.astype(_DTYPES[dtype])
    return weights


def named_tensors(weights: Mapping[str, np.ndarray], layer: int, layout: Layout) -> dict[str, np.ndarray]:
    """The checkpoint tensors that hold a layer's weights: experts whole, or one tensor an expert and projection."""
    if layout not in ("consolidated", "per_expert"):
        raise ValueError(f"layout is {layout!r}; expected 'consolidated' or 'per_expert'")
    tensors = {}
    for name, value in weights.items():
        if layout == "consolidated" or name not in EXPERT_WEIGHTS:
            tensors[full_name(layer, WHOLE_NAMES[name])] = value
            continue
        for expert, rows in enumerate(value):
            for projection, part in zip(EXPERT_WEIGHTS[name], np.split(rows, len(EXPERT_WEIGHTS[name])), strict=True):
                tensors[full_name(layer, expert_rest(expert, projection))] = part
    return tensors


def write_random_checkpoint(
    path: str | Path,
    *,
    config: MuseConfig,
    seed: int = 0,
    layout: Layout = "consolidated",
    shards: int = 1,
    dtype: Literal["bfloat16", "float32"] = "bfloat16",
) -> Path:
    """Write a checkpoint folder of random weights, config.json included, and return its path.

    The folder appears complete or not at all; ValueError and OSError as `write_checkpoint`.
    """
    tensors: dict[str, np.ndarray] = {}
    for layer in config.moe_layers:
        tensors |= named_tensors(random_layer(config, layer, seed=seed, dtype=dtype), layer, layout)
    return write_checkpoint(path, config=config, tensors=tensors, shards=shards)


def write_checkpoint(
    path: str | Path,
    *,
    config: MuseConfig,
    tensors: Mapping[str, np.ndarray],
    shards: int = 1,
    settings: Mapping[str, Any] | None = None,
) -> Path:
    """Write a checkpoint folder: config.json and `tensors` in one file, or in `shards` files and an index.

    settings: more entries of config.json, such as a quantization_config.
    The folder appears complete or not at all.
    Raises FileExistsError when `path` exists (an empty folder is replaced), ValueError when there are fewer tensors
    than shards.
    """
    path = Path(path)
    if not 1 <= shards <= max(1, len(tensors)):
        raise ValueError(f"shards is {shards}; expected 1 to {len(tensors)}, the number of tensors")
    with new_folder(path) as temporary:
        text = json.dumps(config.to_dict() | dict(settings or {}), indent=2)
        (temporary / "config.json").write_text(text + "\n", encoding="utf-8")
        _write_tensors(temporary, tensors, shards)
    return path


def _write_tensors(folder: Path, tensors: Mapping[str, np.ndarray], shards: int) -> None:
    if shards == 1:
        _save(tensors, folder / SINGLE_NAME)
        return
    names = list(tensors)
    where = {}
    for shard in range(shards):
        file = f"model-{shard + 1:05d}-of-{shards:05d}.safetensors"
        chosen = names[shard * len(names) // shards : (shard + 1) * len(names) // shards]
        _save({name: tensors[name] for name in chosen}, folder / file)
        where |= dict.fromkeys(chosen, file)
    index = {"metadata": {"total_size": sum(value.nbytes for value in tensors.values())}, "weight_map": where}
    (folder / INDEX_NAME).write_text(json.dumps(index, indent=2) + "\n", encoding="utf-8")


def _save(tensors: Mapping[str, np.ndarray], file: Path) -> None:
    save_file({name: np.ascontiguousarray(value) for name, value in tensors.items()}, file, metadata={"format": "pt"})


def _scale(name: str, shape: tuple[int, ...]) -> float:
    if name == "router_bias":
        return 0.05
    return 0.1 if name.endswith("_norm") else 1 / math.sqrt(shape[-1])
