"""One layer's MoE weights out of a checkpoint's files, reading that layer's bytes and no others.

gate_up[e, :F] = experts.{e}.gate_proj    gate_up[e, F:] = experts.{e}.up_proj    down[e] = experts.{e}.down_proj
or the whole of gate_up, of down, or of both from one tensor each
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import numpy as np

from muse_jax.checkpoint.audit import LayerAudit, NamedTensor, audit_layer, describe, tensors_by_layer
from muse_jax.checkpoint.header import NUMPY_DTYPES, TensorEntry, read_into
from muse_jax.checkpoint.index import open_checkpoint
from muse_jax.checkpoint.names import WHOLE_NAMES, weight_shapes
from muse_jax.config import MuseConfig

LOADABLE = ("bf16", "f32")
FORMAT_WORDS = {"fp8": "FP8", "mxfp4": "MXFP4", "mixed": "a mix of formats", "unknown": "an unknown format"}


def load_layer(path: str | Path, layer: int, config: MuseConfig | None = None) -> dict[str, np.ndarray]:
    """The weights of one layer's MoE block, as new arrays, from a checkpoint folder or a .safetensors file.

    router_weight [E, D] and router_bias [E] are float32. The others have the layer's dtype, bfloat16 (as
    ml_dtypes.bfloat16) or float32, the same for all of them: pre_expert_proj [H, D], pre_expert_norm [H],
    gate_up [E, 2F, H] (rows 0..F-1 gate, F..2F-1 up), down [E, H, F], post_expert_norm [H], post_expert_proj [D, H].
    The experts may be stored whole, one tensor an expert and projection, or gate_up one way and down the other.
    config defaults to the config.json beside the tensors.

    Raises OSError when a file cannot be read and ValueError, before any tensor is read, when a file is absent or
    malformed, the layer has no MoE block, its experts are quantized, or a tensor is missing, held twice, stray under
    the layer's mlp prefix, or of another shape or dtype than config and the layer's other tensors ask for.
    """
    tensors, config = layer_tensors(path, layer, config)
    return _read(tensors, config)


def layer_tensors(
    path: str | Path, layer: int, config: MuseConfig | None = None
) -> tuple[tuple[NamedTensor, ...], MuseConfig]:
    """Where each tensor of a layer that can be loaded lies; arguments and errors as for `load_layer`."""
    if config is None:
        config = MuseConfig.from_checkpoint(path)
    layer = config.check_moe_layer(layer)
    checkpoint = open_checkpoint(path)
    audit = audit_layer(layer, tensors_by_layer(checkpoint.entries.values()).get(layer, ()), config)
    _refuse(audit, checkpoint.source)
    return audit.tensors, config


def _refuse(audit: LayerAudit, source: Path) -> None:
    found = audit.found
    experts = "" if found is None else f"experts in {FORMAT_WORDS.get(found.label, found.label)} ({found.dtypes})"
    if found is not None and found.format.name not in LOADABLE:
        raise ValueError(
            f"layer {audit.layer} of {source} holds {experts}; "
            "only unquantized experts, all BF16 or all F32, can be loaded"
        )
    if audit.label in ("mixed", "unknown"):
        raise ValueError(
            f"layer {audit.layer} of {source} holds {experts}; expected all BF16 or all F32: {describe(audit.faults)}"
        )
    if audit.faults:
        raise ValueError(f"layer {audit.layer} of {source} cannot be loaded: {describe(audit.faults)}")


def _read(tensors: tuple[NamedTensor, ...], config: MuseConfig) -> dict[str, np.ndarray]:
    shapes = weight_shapes(config)
    dtypes = {name.weight: NUMPY_DTYPES[entry.dtype] for name, entry in tensors if name.weight is not None}
    weights = {weight: np.empty(shapes[weight], dtypes[weight]) for weight in WHOLE_NAMES}
    read_into(_targets(weights, tensors, config))
    return weights


def _targets(
    weights: dict[str, np.ndarray], tensors: tuple[NamedTensor, ...], config: MuseConfig
) -> Iterator[tuple[TensorEntry, np.ndarray]]:
    F = config.expert_width
    rows = {"gate_proj": slice(0, F), "up_proj": slice(F, 2 * F), "down_proj": slice(None)}
    for name, entry in tensors:
        if name.weight is None:
            continue
        whole = weights[name.weight]
        yield entry, whole if name.projection is None else whole[name.expert, rows[name.projection]]
