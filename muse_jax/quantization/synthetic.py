"""Small quantized checkpoints of random weights, in the layout and with the quantization_config of AMD Quark.

experts of a quantized layer: experts.{e}.{projection}.weight and .weight_scale, quantized from the bfloat16 weights
that `muse_jax.checkpoint.write_random_checkpoint` writes with the same seed; all else is as it is there
"""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import Any

import numpy as np

from muse_jax.checkpoint.names import EXPERT_WEIGHTS, WHOLE_NAMES, expert_rest, full_name
from muse_jax.checkpoint.quark import SCHEMES
from muse_jax.checkpoint.synthetic import named_tensors, random_layer, write_checkpoint
from muse_jax.config import MuseConfig
from muse_jax.quantization.array import Format, QuantizedArray
from muse_jax.quantization.fp8 import quantize_fp8
from muse_jax.quantization.mxfp4 import online_layers, quantize_experts_mxfp4


def write_quantized_checkpoint(
    path: str | Path,
    *,
    config: MuseConfig,
    format: Format,
    layers: Iterable[int] | None = None,
    seed: int = 0,
    shards: int = 1,
) -> Path:
    """Write a checkpoint folder of random weights whose `layers` have quantized experts, and return its path.

    format: "fp8" (one scale a row, inputs a scale a token) or "mxfp4". layers: by default all with a MoE block but the
    first and the last layer. The folder appears complete or not at all.
    Raises ValueError for another format, a layer without MoE block, widths that MXFP4 cannot hold, and as
    `muse_jax.checkpoint.synthetic.write_checkpoint`.
    """
    if format not in ("fp8", "mxfp4"):
        raise ValueError(f"format is {format!r}; expected 'fp8' or 'mxfp4'")
    chosen = {config.check_moe_layer(layer) for layer in (online_layers(config) if layers is None else layers)}
    tensors: dict[str, np.ndarray] = {}
    for layer in config.moe_layers:
        weights = random_layer(config, layer, seed=seed)
        tensors |= (
            _quantized(weights, layer, format) if layer in chosen else named_tensors(weights, layer, "per_expert")
        )
    settings = {"quantization_config": quantization_config(config, format, chosen)}
    return write_checkpoint(path, config=config, tensors=tensors, shards=shards, settings=settings)


def quantization_config(config: MuseConfig, format: Format, layers: Iterable[int]) -> dict[str, Any]:
    """What Quark's quantization_config says of a model whose experts of `layers` alone are quantized."""
    quantized = set(layers)
    exclude = []
    for layer in config.moe_layers:
        exclude += [full_name(layer, name) for name in ("gate", "pre_expert_proj", "post_expert_proj")]
        if layer not in quantized:
            experts = range(config.num_experts)
            projections = [name for names in EXPERT_WEIGHTS.values() for name in names]
            exclude += [full_name(layer, f"experts.{expert}.{name}") for expert in experts for name in projections]
    weight, inputs = SCHEMES[format]
    return {
        "quant_method": "quark",
        "global_quant_config": {"weight": dict(weight), "input_tensors": dict(inputs)},
        "layer_quant_config": {},
        "layer_type_quant_config": {},
        "exclude": sorted(exclude),
        "export": {"weight_format": "real_quantized", "pack_method": "reorder", "kv_cache_group": []},
    }


def _quantized(weights: dict[str, np.ndarray], layer: int, format: Format) -> dict[str, np.ndarray]:
    tensors = {}
    for name, value in weights.items():
        if name not in EXPERT_WEIGHTS:
            tensors[full_name(layer, WHOLE_NAMES[name])] = value
            continue
        array: QuantizedArray = quantize_fp8(value) if format == "fp8" else quantize_experts_mxfp4(value)
        projections = EXPERT_WEIGHTS[name]
        for part, stored in (("weight", array.values), ("weight_scale", array.scales)):
            for expert, rows in enumerate(np.asarray(stored)):
                for projection, own in zip(projections, np.split(rows, len(projections)), strict=True):
                    tensors[full_name(layer, expert_rest(expert, projection, part))] = own
    return tensors
