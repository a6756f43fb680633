"""Checkpoints for tests, right and wrong: random ones with an edit of their tensors, and raw safetensors bytes."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np

from muse_jax.checkpoint.header import NUMPY_DTYPES, read_header, read_into
from muse_jax.checkpoint.index import SINGLE_NAME
from muse_jax.checkpoint.synthetic import named_tensors, random_layer, small_config, write_checkpoint
from muse_jax.config import MuseConfig

DATA = Path(__file__).parent.parent / "data"
HF_TINY = DATA / "hf-tiny" / "checkpoint"
QUARK_FP8 = DATA / "quark-tiny" / "checkpoint-fp8"
QUARK_MXFP4 = DATA / "quark-tiny" / "checkpoint-mxfp4"

CONFIG = small_config(model_width=12, latent_width=10, expert_width=6, num_experts=3, routes_per_token=2)
MLP = "model.language_model.layers.{}.mlp."

Tensors = dict[str, np.ndarray]


def decoys(config: MuseConfig) -> Tensors:
    """Tensors that are none of the MoE block's but whose names look like it."""
    square = np.full((config.model_width, config.model_width), 7, ml_dtypes.bfloat16)
    names = ["model.vision_tower.layers.0.mlp.gate.weight", "model.audio_tower.layers.0.mlp.experts.gate_up_proj"]
    for layer in range(config.num_layers):
        prefix = f"model.language_model.layers.{layer}."
        names += [prefix + "self_attn.gate_proj.weight", prefix + "self_attn.up_proj.weight"]
        names += [prefix + "post_attention_residual_gate.gate", f"layers.{layer}.mlp.gate.weight"]
    return dict.fromkeys(names, square)


def build(
    path: Path,
    *,
    config: MuseConfig = CONFIG,
    layout: str = "consolidated",
    shards: int = 1,
    dtype: str = "bfloat16",
    edit: Callable[[Tensors], object] = lambda tensors: None,
) -> Path:
    """A checkpoint folder with decoys, after `edit` had its way with the tensors."""
    tensors: Tensors = decoys(config)
    for layer in config.moe_layers:
        tensors |= named_tensors(random_layer(config, layer, seed=1, dtype=dtype), layer, layout)
    edit(tensors)
    return write_checkpoint(path, config=config, tensors=tensors, shards=shards)


def truth(layer: int, *, config: MuseConfig = CONFIG, dtype: str = "bfloat16") -> Tensors:
    """The weights that `build` writes for a layer."""
    return random_layer(config, layer, seed=1, dtype=dtype)


def assert_same(loaded: Tensors, expected: Tensors) -> None:
    """Same names in the same order, same shapes, dtypes and bytes."""
    assert list(loaded) == list(expected)
    for name, value in expected.items():
        assert loaded[name].dtype == value.dtype, name
        assert loaded[name].shape == value.shape, name
        assert loaded[name].tobytes() == value.tobytes(), name


def pack(header: Any, data: bytes = b"", *, length: int | None = None) -> bytes:
    """The bytes of a safetensors file; `header` is JSON text, bytes, or an object to encode."""
    if not isinstance(header, (bytes, str)):
        header = json.dumps(header)
    raw = header.encode() if isinstance(header, str) else header
    return (len(raw) if length is None else length).to_bytes(8, "little") + raw + data


def edit_json(path: Path, edit: Callable[[Any], object]) -> None:
    """Rewrite a JSON file after `edit` changed its value in place."""
    value = json.loads(path.read_text())
    edit(value)
    path.write_text(json.dumps(value))


def shard_of(folder: Path, name: str) -> Path:
    """The file of a folder whose header lists the tensor `name`."""
    return next(file for file in sorted(folder.glob("*.safetensors")) if name in read_header(file))


def read_all(folder: Path) -> dict[str, np.ndarray]:
    """Every tensor of a folder, fp8 included."""
    entries = [entry for file in sorted(folder.glob("*.safetensors")) for entry in read_header(file).values()]
    arrays = {entry.name: np.empty(entry.shape, NUMPY_DTYPES[entry.dtype]) for entry in entries}
    read_into((entry, arrays[entry.name]) for entry in entries)
    return arrays


def write_file(file: Path, tensors: dict[str, np.ndarray]) -> None:
    """A safetensors file of any dtype that the loader knows, fp8 included, which safetensors itself cannot write."""
    words = {dtype: word for word, dtype in NUMPY_DTYPES.items()}
    table, position = {}, 0
    for name, value in tensors.items():
        offsets = [position, position := position + value.nbytes]
        table[name] = {"dtype": words[value.dtype], "shape": list(value.shape), "data_offsets": offsets}
    file.write_bytes(pack(table, b"".join(value.tobytes() for value in tensors.values())))


def quark_copy(
    folder: Path,
    source: Path,
    *,
    edit: Callable[[Tensors], object] = lambda tensors: None,
    edit_quantization: Callable[[Any], object] = lambda settings: None,
) -> Path:
    """A Quark checkpoint in one file, after the edits had their way with its tensors and its quantization_config."""
    folder.mkdir()
    config = json.loads((source / "config.json").read_text())
    edit_quantization(config["quantization_config"])
    (folder / "config.json").write_text(json.dumps(config))
    tensors = {name: value for name, value in read_all(source).items() if ".mlp." in name and "language" in name}
    edit(tensors)
    write_file(folder / SINGLE_NAME, tensors)
    return folder
