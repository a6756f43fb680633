"""What AMD Quark wrote, read without this project's loader: a quantized layer's weights, the blocks and the vectors.

moe_<run>             one layer's boundaries in float64 arithmetic; nothing is rounded but the quantized values
bit_exact_<format>    rows chosen so that no sum rounds: an activation is predicted to the bit
<format>_vectors      what Quark's quantizers make of awkward inputs
"""

from __future__ import annotations

import json
from functools import cache
from pathlib import Path

import ml_dtypes
import numpy as np

from muse_jax.checkpoint import QuantizedWeight
from muse_jax.reference import BlockSettings

QUARK = Path(__file__).parent / "data" / "quark-tiny"
EXPERTS = 16
LAYER = 1
# Of every golden run: the format and the rule by which the activations were quantized.
RUNS = {
    "fp8": ("fp8", None),
    "mxfp4_even": ("mxfp4", "even"),
    "mxfp4_rceil": ("mxfp4", "rceil"),
    "mxfp4_w4a16": ("mxfp4", "w4a16"),
}
_DTYPES = {
    **{"F32": np.float32, "F64": np.float64, "U8": np.uint8, "I32": np.int32},
    **{"BF16": ml_dtypes.bfloat16, "F8_E4M3": ml_dtypes.float8_e4m3fn},
}


@cache
def quark_file(name: str) -> dict[str, np.ndarray]:
    """Every tensor of a safetensors file under quark-tiny, fp8 included."""
    data = (QUARK / name).read_bytes()
    start = 8 + int.from_bytes(data[:8], "little")
    tensors = {}
    for tensor, info in json.loads(data[8:start]).items():
        if tensor != "__metadata__":
            begin, end = (start + offset for offset in info["data_offsets"])
            tensors[tensor] = np.frombuffer(data[begin:end], _DTYPES[info["dtype"]]).reshape(info["shape"])
    return tensors


@cache
def quark_weights(form: str, layer: int = LAYER) -> dict[str, np.ndarray | QuantizedWeight]:
    """A quantized layer of checkpoint-<form>, experts stacked. Copy before changing one."""
    tensors: dict[str, np.ndarray] = {}
    for file in sorted((QUARK / f"checkpoint-{form}").glob("*.safetensors")):
        tensors |= quark_file(f"checkpoint-{form}/{file.name}")
    mlp = f"model.language_model.layers.{layer}.mlp."

    def stacked(part: str, *projections: str) -> np.ndarray:
        names = [[f"{mlp}experts.{e}.{projection}_proj.{part}" for projection in projections] for e in range(EXPERTS)]
        return np.stack([np.concatenate([tensors[name] for name in row]) for row in names])

    def quantized(*projections: str) -> QuantizedWeight:
        values, scales = stacked("weight", *projections), stacked("weight_scale", *projections)
        return QuantizedWeight(values=values, scales=scales, format=form)

    return {
        "router_weight": tensors[mlp + "gate.weight"],
        "router_bias": tensors[mlp + "gate.e_score_correction_bias"],
        "pre_expert_proj": tensors[mlp + "pre_expert_proj.weight"],
        "pre_expert_norm": tensors[mlp + "pre_expert_norm.weight"],
        "gate_up": quantized("gate", "up"),
        "down": quantized("down"),
        "post_expert_norm": tensors[mlp + "experts.post_expert_norm.weight"],
        "post_expert_proj": tensors[mlp + "post_expert_proj.weight"],
    }


def quark_run(run: str) -> dict[str, np.ndarray]:
    """The boundaries of moe_<run>."""
    return {name.removeprefix(f"{LAYER}."): value for name, value in quark_file(f"moe_{run}.safetensors").items()}


def quark_settings() -> BlockSettings:
    """The settings of both checkpoints."""
    text = json.loads((QUARK / "checkpoint-fp8" / "config.json").read_text())["text_config"]
    return BlockSettings(
        routes_per_token=text["num_experts_per_tok"],
        output_multiplier=text["output_multiplier"],
        norm_eps=text["rms_norm_eps"],
        post_norm_eps=text["post_norm_eps"],
        route_scale=text["routed_scaling_factor"],
    )
