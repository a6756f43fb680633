"""What a checkpoint holds, layer by layer, told from its headers and config.json: no tensor data is read."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from muse_jax.checkpoint.audit import KINDS, Fault, LayerAudit, audit_layer, tensors_by_layer
from muse_jax.checkpoint.header import TensorEntry
from muse_jax.checkpoint.index import open_checkpoint
from muse_jax.checkpoint.quark import read_quantization
from muse_jax.config import MuseConfig


@dataclass(frozen=True, kw_only=True)
class Inventory:
    """A checkpoint's layers and totals.

    source: the file that listed the tensors. layers: one audit a layer of config. beyond: tensors of layers that
    config does not have, as stray. nbytes and elements (by dtype word) count every tensor, towers and attention too;
    packed formats count stored elements.
    """

    source: Path
    files: tuple[Path, ...]
    config: MuseConfig
    layers: tuple[LayerAudit, ...]
    beyond: tuple[Fault, ...]
    nbytes: int
    elements: dict[str, int]

    @property
    def faults(self) -> tuple[Fault, ...]:
        """Everything wrong, in layer order."""
        return tuple(fault for audit in self.layers for fault in audit.faults) + self.beyond

    @property
    def conflicts(self) -> tuple[str, ...]:
        """Where tensors and quantization_config disagree, a sentence a layer."""
        return tuple(audit.conflict for audit in self.layers if audit.conflict)

    def to_dict(self) -> dict[str, Any]:
        """The inventory as plain JSON values."""
        return {
            "source": str(self.source),
            "files": [file.name for file in self.files],
            "bytes": self.nbytes,
            "elements": self.elements,
            "complete": not self.faults and not self.conflicts,
            "layers": [_layer_dict(audit, self.config) for audit in self.layers],
            "beyond": [fault.name for fault in self.beyond],
        }


def take_inventory(path: str | Path, config: MuseConfig | None = None) -> Inventory:
    """The inventory of the checkpoint at `path`, a folder or a .safetensors file beside its config.json.

    A layer with missing, stray or misshapen tensors is reported, not refused; what cannot be read at all is: OSError
    or ValueError as `open_checkpoint` and `MuseConfig.from_checkpoint` raise them, and ValueError for a
    quantization_config that AMD Quark did not write, or that gives a layer's experts a scheme that is not served.
    """
    if config is None:
        config = MuseConfig.from_checkpoint(path)
    checkpoint = open_checkpoint(path)
    quantization = read_quantization(path)
    by_layer = tensors_by_layer(checkpoint.entries.values())
    beyond = [entry for layer in sorted(by_layer) if layer >= config.num_layers for _, entry in by_layer[layer]]
    nbytes, elements = totals(checkpoint.entries.values())
    return Inventory(
        source=checkpoint.source,
        files=checkpoint.files,
        config=config,
        layers=tuple(
            audit_layer(layer, by_layer.get(layer, ()), config, quantization) for layer in range(config.num_layers)
        ),
        beyond=tuple(Fault(kind="stray", name=entry.name, detail=f" in {entry.file.name}") for entry in beyond),
        nbytes=nbytes,
        elements=elements,
    )


def totals(entries: Iterable[TensorEntry]) -> tuple[int, dict[str, int]]:
    """Bytes, and stored elements by dtype word."""
    nbytes = 0
    elements: Counter[str] = Counter()
    for entry in entries:
        nbytes += entry.nbytes
        elements[entry.dtype] += entry.elements
    return nbytes, dict(sorted(elements.items()))


def _layer_dict(audit: LayerAudit, config: MuseConfig) -> dict[str, Any]:
    nbytes, elements = totals(entry for _, entry in audit.tensors)
    shapes = {name.rest: list(entry.shape) for name, entry in audit.tensors}
    return {
        "layer": audit.layer,
        "attention": config.attention_types[audit.layer],
        "mlp": config.mlp_types[audit.layer],
        "format": audit.label,
        "layout": audit.layout,
        "conflict": audit.conflict,
        "tensors": len(audit.tensors),
        "bytes": nbytes,
        "elements": elements,
        "shapes": shapes,
        **{kind.replace(" ", "_"): list(audit.faulty(kind)) for kind in KINDS},
    }
