"""Loaders of the golden files in tests/data: a layer's weights, its boundaries, its settings.

hf-tiny      a small checkpoint, and its MoE blocks' boundaries by transformers 5.24.0 in float32 and bfloat16
vllm-tiny    the same blocks by vLLM 0.33.0 in bfloat16, sharded too; its RMSNorm family on awkward rows
"""

from __future__ import annotations

import json
from functools import cache
from pathlib import Path

import numpy as np
from safetensors import safe_open
from safetensors.numpy import load_file

from muse_jax.reference import BlockSettings

DATA = Path(__file__).parent / "data"
HF_F32 = "hf-tiny/moe_f32.safetensors"
HF_BF16 = "hf-tiny/moe_bf16.safetensors"
HF_EAGER_BF16 = "hf-tiny/moe_bf16_eager.safetensors"  # written by scripts/oracle_hf_eager.py
VLLM_BF16 = "vllm-tiny/moe_vllm_bf16.safetensors"
LAYERS = range(4)

_NAMES = {
    "router_weight": "gate.weight",
    "router_bias": "gate.e_score_correction_bias",
    "pre_expert_proj": "pre_expert_proj.weight",
    "pre_expert_norm": "pre_expert_norm.weight",
    "gate_up": "experts.gate_up_proj",
    "down": "experts.down_proj",
    "post_expert_norm": "experts.post_expert_norm.weight",
    "post_expert_proj": "post_expert_proj.weight",
}


def golden_checkpoint(name: str = "hf-tiny") -> Path:
    """The folder of the checkpoint of that golden set."""
    return DATA / name / "checkpoint"


@cache
def golden_weights(name: str, layer: int) -> dict[str, np.ndarray]:
    """A layer's weights in the checkpoint's dtypes, under this project's names. Copy before changing one."""
    folder = golden_checkpoint(name)
    files = json.loads((folder / "model.safetensors.index.json").read_text())["weight_map"]
    weights = {}
    for ours, theirs in _NAMES.items():
        tensor = f"model.language_model.layers.{layer}.mlp.{theirs}"
        with safe_open(folder / files[tensor], "numpy") as shard:
            weights[ours] = shard.get_tensor(tensor)
    return weights


@cache
def golden_tensors(file: str, layer: int) -> dict[str, np.ndarray]:
    """What `file` (relative to tests/data) holds of a layer: boundary -> array; sharded runs have their own names."""
    prefix = f"{layer}."
    tensors = load_file(DATA / file)
    return {name.removeprefix(prefix): value for name, value in tensors.items() if name.startswith(prefix)}


def golden_settings(name: str) -> BlockSettings:
    """The settings of the checkpoint of that golden set."""
    text = json.loads((golden_checkpoint(name) / "config.json").read_text())["text_config"]
    return BlockSettings(
        routes_per_token=text["num_experts_per_tok"],
        output_multiplier=text["output_multiplier"],
        norm_eps=text["rms_norm_eps"],
        post_norm_eps=text["post_norm_eps"],
        route_scale=text["routed_scaling_factor"],
    )
