"""A checkpoint's layers from safetensors into Orbax, one at a time, experts quantized to MXFP4 on the way if wanted.

    out/layer_<i> = the weights of load_layer(path, i)                  (the layout: `muse_jax.checkpoint.restore`)
    with online = "mxfp4": experts of all but the model's first and last layer = quantize_mxfp4(gate_up), (down)
A layer that is quantized is read and quantized a chunk of experts at a time: memory holds its packed result and one
chunk; of any other layer it holds the layer. While a layer is written Orbax takes about twice its bytes beside that.
The folder appears when every layer is written, or not at all.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, get_args

import jax
import numpy as np

from muse_jax.checkpoint.audit import NamedTensor
from muse_jax.checkpoint.folder import new_folder
from muse_jax.checkpoint.formats import FORMATS, ExpertFormat
from muse_jax.checkpoint.load import layer_tensors, load_layer, read_plain
from muse_jax.checkpoint.names import EXPERT_WEIGHTS, weight_shapes
from muse_jax.checkpoint.quantized import QuantizedWeight
from muse_jax.checkpoint.restore import CONVERSION_NAME, VERSION, layer_folder, orbax_package
from muse_jax.checkpoint.sharded import ExpertReader
from muse_jax.config import MuseConfig
from muse_jax.quantization.array import QuantizedArray
from muse_jax.quantization.mxfp4 import CHUNK, online_layers, quantize_experts_mxfp4
from pallas_kernels.formats import MX_BLOCK

Online = Literal["mxfp4"]
_CHUNK_BYTES = 2**22  # of a stored array that are read together: a device's slice needs few bytes beside its own


@dataclass(frozen=True, kw_only=True)
class ConvertedLayer:
    """One layer's way: `source` and `format` are rows of FORMATS, before and after; nbytes of arrays are held."""

    layer: int
    source: str
    format: str
    nbytes: int


def convert_checkpoint(
    path: str | Path,
    out: str | Path,
    *,
    layers: Iterable[int] | None = None,
    online: Online | None = None,
    chunk: int = CHUNK,
    on_layer: Callable[[ConvertedLayer], None] = lambda converted: None,
) -> tuple[ConvertedLayer, ...]:
    """Write `out`, a new folder, from the checkpoint `path`, and say what became of each layer.

    Args:
      path: a checkpoint folder or a .safetensors file.
      out: a folder that does not exist, or is empty.
      layers: those to convert; None for all with a MoE block.
      online: "mxfp4" quantizes unquantized experts, but those of the model's first and last layer.
      chunk: experts that are quantized at a time.
      on_layer: called when a layer is written.

    Raises NotImplementedError without Orbax, FileExistsError where `out` exists, what `load_layer` raises, and
    ValueError for no layers, for another `online`, for experts that are quantized already where `online` is given, or
    whose widths MXFP4 cannot hold. All layers are checked before one is read.
    """
    ocp = orbax_package()
    config = MuseConfig.from_checkpoint(path)
    chosen = sorted({config.check_moe_layer(layer) for layer in (config.moe_layers if layers is None else layers)})
    if not chosen:
        raise ValueError(f"no layer of {path} is chosen; it has {', '.join(map(str, config.moe_layers))}")
    if online is not None and online not in get_args(Online):
        raise ValueError(f"online is {online!r}; expected {' or '.join(get_args(Online))}, or None")
    to_quantize = set(online_layers(config)) if online else set()
    formats = {layer: layer_tensors(path, layer, config)[1] for layer in chosen}
    for layer in chosen:
        if layer in to_quantize:
            _check_online(layer, formats[layer], config)
    # An expert apart, in pieces: a mesh restores its slices without reading the rest.
    pieces, whole = ocp.SaveArgs(chunk_byte_size=_CHUNK_BYTES, shard_axes=(0,)), ocp.SaveArgs()
    done = []
    with new_folder(out) as folder, ocp.StandardCheckpointer() as checkpointer:
        for layer in chosen:
            if layer in to_quantize:
                weights, form = _quantized_layer(path, layer, config, chunk), FORMATS["mxfp4"]
            else:
                weights, form = load_layer(path, layer, config), formats[layer]
            tree = {name: _to_store(name, value, config) for name, value in weights.items()}
            del weights
            save_args = jax.tree.map(lambda leaf: pieces if leaf.ndim > 2 else whole, tree)
            checkpointer.save(layer_folder(folder, layer), tree, save_args=save_args)
            checkpointer.wait_until_finished()
            nbytes = sum(leaf.nbytes for leaf in jax.tree.leaves(tree))
            done.append(ConvertedLayer(layer=layer, source=formats[layer].name, format=form.name, nbytes=nbytes))
            on_layer(done[-1])
        _write_json(folder / "config.json", config.to_dict())
        held = {str(converted.layer): converted.format for converted in done}
        _write_json(folder / CONVERSION_NAME, {"version": VERSION, "layers": held})
    return tuple(done)


def _check_online(layer: int, form: ExpertFormat, config: MuseConfig) -> None:
    if form.scale_dtypes:
        raise ValueError(
            f"layer {layer} holds its experts in {form.name} already; leave online quantization out, or that layer"
        )
    for name in ("latent_width", "expert_width"):
        if getattr(config, name) % MX_BLOCK:
            raise ValueError(f"{name} is {getattr(config, name)}; MXFP4 needs a multiple of {MX_BLOCK}")


def _quantized_layer(path: str | Path, layer: int, config: MuseConfig, chunk: int) -> dict[str, Any]:
    tensors, _, _ = layer_tensors(path, layer, config)
    weights: dict[str, Any] = read_plain((pair for pair in tensors if pair[0].weight not in EXPERT_WEIGHTS), config)
    for name in EXPERT_WEIGHTS:
        own = [pair for pair in tensors if pair[0].weight == name]
        weights[name] = quantize_experts_mxfp4(_Experts(name, own, config), chunk=chunk).to_host()
    return {name: weights[name] for name in weight_shapes(config)}


class _Experts:
    """gate_up [E, 2F, H] or down [E, H, F] in its files, of which [start:stop] reads those experts alone."""

    def __init__(self, name: str, tensors: list[NamedTensor], config: MuseConfig) -> None:
        self.shape = weight_shapes(config)[name]
        self._reader = ExpertReader.of(name, tensors, list(range(config.num_experts)))

    def __getitem__(self, experts: slice) -> np.ndarray:
        start, stop, _ = experts.indices(self.shape[0])
        rows, columns = self.shape[1:]
        halves = self._reader.halves
        between = (slice(0, 2), slice(0, rows // 2)) if halves == 2 else (slice(0, rows),)
        return self._reader.read((slice(start, stop), *between, slice(0, columns))).reshape(-1, rows, columns)


def _to_store(name: str, value: np.ndarray | QuantizedWeight | QuantizedArray, config: MuseConfig) -> Any:
    """A weight as it is stored: gate_up with an axis for its two halves, codes and scales by name."""

    def split(array: np.ndarray) -> np.ndarray:
        return array.reshape(len(array), 2, -1, *array.shape[2:]) if name == "gate_up" else array

    if isinstance(value, np.ndarray):
        return split(value)
    parts = {"values": split(value.values), "scales": split(value.scales)}
    return parts if value.input_scale is None else parts | {"input_scale": np.asarray(value.input_scale, np.float32)}


def _write_json(file: Path, value: Any) -> None:
    file.write_text(json.dumps(value, indent=2) + "\n", encoding="utf-8")
