"""Dump files: the boundaries of some layers in one safetensors file, `L.<boundary>`, or `<boundary>` where no layer
is said.

Shapes must agree with one another: x and out [T, D], router_logits [T, E], topk_ids and topk_weights [T, K], latent,
expert_input and combined [T, H], activation [T, K, F], expert_rows and normed_rows [T, K, H].
"""

from __future__ import annotations

import os
import uuid
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from safetensors.numpy import save_file

from muse_jax.boundaries import BOUNDARIES
from muse_jax.checkpoint.header import NUMPY_DTYPES, read_header, read_into

AXES = {
    "x": "TD",
    "router_logits": "TE",
    "topk_ids": "TK",
    "topk_weights": "TK",
    "latent": "TH",
    "expert_input": "TH",
    "activation": "TKF",
    "expert_rows": "TKH",
    "normed_rows": "TKH",
    "combined": "TH",
    "out": "TD",
}
_IDS = ("I32", "I64")
_VALUES = ("BF16", "F32")


@dataclass(frozen=True, kw_only=True)
class Dump:
    """A file's boundaries by layer (None: names without a layer), and how many tensors are no boundary."""

    path: Path
    layers: dict[int | None, dict[str, np.ndarray]]
    ignored: int


def read_dump(path: str | Path) -> Dump:
    """Every boundary in a dump file; other tensors are counted and left alone.

    Raises OSError when the file cannot be read and ValueError when it is malformed, holds no boundary, or its
    boundaries do not fit together.
    """
    path = Path(path)
    entries = read_header(path)
    layers: dict[int | None, dict[str, np.ndarray]] = {}
    targets = []
    for name, entry in entries.items():
        layer, _, boundary = name.rpartition(".")
        if boundary not in AXES or not (layer == "" or layer.isdecimal()):
            continue
        known = _IDS if boundary == "topk_ids" else _VALUES
        if entry.dtype not in known:
            raise ValueError(f"{entry} is {entry.dtype}; expected {' or '.join(known)}")
        number = int(layer) if layer else None
        if boundary in layers.get(number, {}):
            raise ValueError(f"{entry} is a second {number}.{boundary}; expected each boundary of a layer once")
        array = np.empty(entry.shape, NUMPY_DTYPES[entry.dtype])
        targets.append((entry, array))
        layers.setdefault(number, {})[boundary] = array
    if not layers:
        raise ValueError(f"{path} holds no boundary; expected tensors named L.x, L.router_logits, ... or x, ...")
    for layer, found in layers.items():
        _check_shapes(path, layer, found)
    read_into(targets)
    for layer, found in layers.items():
        _check_ids(path, layer, found)
    ordered = {layer: {name: layers[layer][name] for name in BOUNDARIES if name in layers[layer]} for layer in layers}
    return Dump(path=path, layers=ordered, ignored=len(entries) - len(targets))


def write_dump(
    path: str | Path, layers: Mapping[int | None, Mapping[str, np.ndarray]], metadata: Mapping[str, str]
) -> None:
    """Write the boundaries of some layers; the file appears whole or not at all."""
    path = Path(path)
    tensors = {
        name if layer is None else f"{layer}.{name}": np.ascontiguousarray(array)
        for layer, found in layers.items()
        for name, array in found.items()
    }
    temporary = path.with_name(f".{path.name}.{uuid.uuid4().hex}")
    try:
        save_file(tensors, temporary, dict(metadata))
        os.replace(temporary, path)
    finally:
        temporary.unlink(missing_ok=True)


def _check_ids(path: Path, layer: int | None, found: Mapping[str, np.ndarray]) -> None:
    if "topk_ids" not in found or "router_logits" not in found:
        return
    ids, experts = found["topk_ids"], found["router_logits"].shape[1]
    beyond = ids[(ids < -1) | (ids >= experts)]
    if beyond.size:
        shown = "topk_ids" if layer is None else f"{layer}.topk_ids"
        raise ValueError(f"{shown} in {path} holds {beyond[0]}; expected 0 to {experts - 1}, or -1 for a masked route")


def _check_shapes(path: Path, layer: int | None, found: Mapping[str, np.ndarray]) -> None:
    sizes: dict[str, tuple[int, str]] = {}
    for name, array in found.items():
        shown = name if layer is None else f"{layer}.{name}"
        if array.ndim != len(AXES[name]):
            raise ValueError(f"{shown} in {path} is {array.shape}; expected [{', '.join(AXES[name])}]")
        for axis, size in zip(AXES[name], array.shape, strict=True):
            known, owner = sizes.setdefault(axis, (size, shown))
            if known != size:
                raise ValueError(f"{shown} in {path} is {array.shape}: its {axis} is {size}, but {known} in {owner}")
