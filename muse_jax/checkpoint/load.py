"""One layer's MoE weights out of a checkpoint's files, reading that layer's bytes and no others.

gate_up[e, :F] = experts.{e}.gate_proj    gate_up[e, F:] = experts.{e}.up_proj    down[e] = experts.{e}.down_proj
or the whole of gate_up, of down, or of both from one tensor each; codes and scales of quantized experts likewise
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from pathlib import Path

import numpy as np

from muse_jax.checkpoint.audit import LayerAudit, NamedTensor, audit_layer, describe, tensors_by_layer
from muse_jax.checkpoint.conflict import FORMAT_WORDS
from muse_jax.checkpoint.formats import FORMATS, ExpertFormat, FoundFormat
from muse_jax.checkpoint.header import NUMPY_DTYPES, TensorEntry, read_into
from muse_jax.checkpoint.index import open_checkpoint
from muse_jax.checkpoint.names import EXPERT_WEIGHTS, WHOLE_NAMES, weight_shapes
from muse_jax.checkpoint.quantized import QuantizedWeight
from muse_jax.checkpoint.quark import read_quantization
from muse_jax.checkpoint.slots import ExpertSlots
from muse_jax.checkpoint.stack import read_quantized
from muse_jax.config import MuseConfig


def load_layer(
    path: str | Path, layer: int, config: MuseConfig | None = None
) -> dict[str, np.ndarray | QuantizedWeight]:
    """The weights of one layer's MoE block, as new arrays, from a checkpoint folder or a .safetensors file.

    router_weight [E, D] and router_bias [E] are float32. The others have the layer's dtype, bfloat16 (as
    ml_dtypes.bfloat16) or float32, the same for all of them: pre_expert_proj [H, D], pre_expert_norm [H],
    gate_up [E, 2F, H] (rows 0..F-1 gate, F..2F-1 up), down [E, H, F], post_expert_norm [H], post_expert_proj [D, H].
    The experts may be stored whole, one tensor an expert and projection, or gate_up one way and down the other.
    Of a layer that AMD Quark quantized, gate_up and down are each a `QuantizedWeight` of the same logical shape.
    config defaults to the config.json beside the tensors, whose quantization_config is read in any case.

    Raises OSError when a file cannot be read and ValueError, before any tensor is read, when a file is absent or
    malformed, the layer has no MoE block, its tensors and its quantization_config disagree, their scheme is not served,
    or a tensor is missing, held twice, stray under the layer's mlp prefix, or of another shape or dtype than config and
    the layer's other tensors ask for.
    """
    audit, config = _audited(path, layer, config)
    weights: dict[str, np.ndarray | QuantizedWeight] = {}
    experts = {}
    if audit.found is not None and audit.found.format.scale_dtypes:
        experts = {name: read_quantized(name, audit.tensors, audit.found.format, config) for name in EXPERT_WEIGHTS}
    plain = tuple(pair for pair in audit.tensors if pair[0].weight not in experts)
    weights = read_plain(plain, config) | experts
    return {name: weights[name] for name in WHOLE_NAMES}


def layer_tensors(
    path: str | Path, layer: int, config: MuseConfig | None = None
) -> tuple[tuple[NamedTensor, ...], ExpertFormat, MuseConfig]:
    """Where each tensor of a layer lies, and how its experts are stored; arguments and errors as for `load_layer`."""
    audit, config = _audited(path, layer, config)
    return audit.tensors, FORMATS[audit.label], config


def _audited(path: str | Path, layer: int, config: MuseConfig | None) -> tuple[LayerAudit, MuseConfig]:
    if config is None:
        config = MuseConfig.from_checkpoint(path)
    layer = config.check_moe_layer(layer)
    checkpoint = open_checkpoint(path)
    tensors = tensors_by_layer(checkpoint.entries.values()).get(layer, ())
    audit = audit_layer(layer, tensors, config, read_quantization(path))
    _refuse(audit, checkpoint.source)
    if audit.found is not None and audit.found.format.scale_dtypes:
        _check_slots(audit, audit.found, config)
    return audit, config


def _refuse(audit: LayerAudit, source: Path) -> None:
    if audit.found is not None and audit.label in ("mixed", "unknown"):
        raise ValueError(
            f"layer {audit.layer} of {source} holds experts in {FORMAT_WORDS[audit.label]} ({audit.found.dtypes}); "
            f"expected all BF16, all F32, or all of one quantized format: {describe(audit.faults)}"
        )
    if audit.conflict:
        raise ValueError(f"{source} cannot be loaded: {audit.conflict}")
    if audit.faults:
        raise ValueError(f"layer {audit.layer} of {source} cannot be loaded: {describe(audit.faults)}")


def _check_slots(audit: LayerAudit, found: FoundFormat, config: MuseConfig) -> None:
    """Every slot of the experts exactly once over all files, whatever the audit of names made of them."""
    slots = ExpertSlots(audit.layer, config.num_experts, found.format.parts)
    files: dict[str, list[str]] = {}
    for _, entry in audit.tensors:
        files.setdefault(entry.file.name, []).append(entry.name)
    for file, names in files.items():
        slots.deliver(names, file)
    slots.check()


def read_plain(tensors: Iterable[NamedTensor], config: MuseConfig) -> dict[str, np.ndarray]:
    """The weights that unquantized tensors of an audited layer hold, all of them or some, in the files' dtypes."""
    tensors = tuple(tensors)
    shapes = weight_shapes(config)
    dtypes = {name.weight: NUMPY_DTYPES[entry.dtype] for name, entry in tensors if name.weight is not None}
    weights = {weight: np.empty(shapes[weight], dtype) for weight, dtype in dtypes.items()}
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
