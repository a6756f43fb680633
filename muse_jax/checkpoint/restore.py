"""Layers as Orbax holds them: a folder that `muse_jax.checkpoint.convert` fills and `restore_layer` reads.

    config.json         the model's settings, without a quantization_config
    conversion.json     {"version": 1, "layers": {"0": "bf16", "1": "mxfp4", ...}}: the row of FORMATS of each layer
    layer_<i>/          one Orbax tree: the names of `load_layer`, with
        gate_up [E, 2, F, H]    down [E, H, F]      or of each, quantized: values, scales, input_scale (if there is one)
Orbax restores an array onto any mesh, and silently casts where it is asked for another dtype than it holds. So shapes
and dtypes are compared with its metadata first, and what differs is refused.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh, SingleDeviceSharding
from jax.typing import DTypeLike

from muse_jax.checkpoint.formats import FORMATS, ExpertFormat
from muse_jax.checkpoint.header import NUMPY_DTYPES
from muse_jax.checkpoint.names import EXPERT_WEIGHTS, weight_shapes
from muse_jax.checkpoint.sharded import local_flavour
from muse_jax.config import MuseConfig
from muse_jax.quantization.array import QuantizedArray
from muse_jax.quantization.fp8 import to_fnuz
from muse_jax.sharding import HELD, BlockMesh, scale_axes
from muse_jax.strict_json import read_object
from pallas_kernels.formats import Flavour

CONVERSION_NAME = "conversion.json"
VERSION = 1


def orbax_package() -> Any:
    """The module orbax.checkpoint; NotImplementedError, saying how to install it, where it is missing."""
    try:
        import orbax.checkpoint
    except ImportError as error:
        raise NotImplementedError("this needs the package orbax-checkpoint: pip install 'muse-jax[convert]'") from error
    return orbax.checkpoint


def layer_folder(path: str | Path, layer: int) -> Path:
    """Where a layer's tree lies; Orbax takes absolute paths only."""
    return Path(path).absolute() / f"layer_{layer}"


def converted_layers(path: str | Path) -> dict[int, ExpertFormat]:
    """The layers of a converted checkpoint and how their experts are held.

    Raises FileNotFoundError where `path` is no converted checkpoint, ValueError for one that this version cannot read.
    """
    file = Path(path) / CONVERSION_NAME
    if not file.is_file():
        raise FileNotFoundError(f"{file} does not exist; expected a folder that muse-jax convert wrote")
    found = read_object(file)
    layers = found.get("layers")
    if found.get("version") != VERSION or not isinstance(layers, dict):
        raise ValueError(f"{file} has version {found.get('version')!r}; expected {VERSION} and an object of layers")
    unknown = [name for name in layers.values() if name not in FORMATS]
    if unknown or not all(number.isdecimal() for number in layers):
        raise ValueError(f"{file} has layers {layers}; expected numbers, each with one of {', '.join(FORMATS)}")
    return {int(number): FORMATS[name] for number, name in layers.items()}


def stored_tree(config: MuseConfig, form: ExpertFormat) -> dict[str, Any]:
    """Shapes and dtypes of a layer's tree."""
    E, H, F = config.num_experts, config.latent_width, config.expert_width
    tree: dict[str, Any] = {}
    for name, shape in weight_shapes(config).items():
        dtype = np.float32 if name.startswith("router_") else NUMPY_DTYPES[form.plain_dtype]
        tree[name] = jax.ShapeDtypeStruct(shape, dtype)
    for name, shape in {"gate_up": (E, 2, F, H), "down": (E, H, F)}.items():
        if not form.scale_dtypes:
            tree[name] = jax.ShapeDtypeStruct(shape, NUMPY_DTYPES[form.weight_dtype])
            continue
        *rows, columns = shape
        row_unit, column_unit = form.scale_block
        blocks = (
            tuple(rows) if column_unit is None else (*rows[:-1], rows[-1] // (row_unit or 1), columns // column_unit)
        )
        values = (*rows, columns // form.in_per_weight)
        tree[name] = {
            "values": jax.ShapeDtypeStruct(values, NUMPY_DTYPES[form.weight_dtype]),
            "scales": jax.ShapeDtypeStruct(blocks, np.uint8 if form.scale_dtypes == ("U8",) else np.float32),
        }
        if form.has_input_scale:
            tree[name]["input_scale"] = jax.ShapeDtypeStruct((), np.float32)
    return tree


def restore_layer(
    path: str | Path,
    layer: int,
    mesh: Mesh | BlockMesh | None = None,
    *,
    dtype: DTypeLike | None = None,
    flavour: Flavour | None = None,
) -> dict[str, jax.Array | QuantizedArray]:
    """One layer of a converted checkpoint: on a mesh as `load_sharded_layer` gives it, or whole as `load_layer` does.

    Args:
      path: a folder that `muse_jax.checkpoint.convert` wrote.
      layer: one of its layers.
      mesh: axes dp, ep and tp; None for the first device and the shapes of `load_layer`.
      dtype: what the unquantized tensors (router apart) must have; None takes what is there.
      flavour: what FP8 codes are held as; None is what this machine's GPU multiplies, or e4m3fn.

    Raises NotImplementedError without Orbax, FileNotFoundError and ValueError where the folder is none of these or
    lacks the layer, and ValueError, before anything is read, where the tree holds other shapes or dtypes than the
    layer's format and `dtype` ask for, or the mesh does not fit or does not divide the experts.
    """
    ocp = orbax_package()
    layers, config = converted_layers(path), MuseConfig.from_checkpoint(path)
    if layer not in layers:
        raise ValueError(f"layer {layer} is not in {path}; it holds {', '.join(map(str, layers))}")
    form = layers[layer]
    plain = NUMPY_DTYPES[form.plain_dtype]
    if dtype is not None and np.dtype(dtype) != plain:
        raise ValueError(
            f"layer {layer} of {path} holds {plain.name} and {np.dtype(dtype).name} is asked for; "
            "leave dtype out and cast what is restored"
        )
    if mesh is not None and not isinstance(mesh, BlockMesh):
        mesh = BlockMesh(mesh=mesh)
    shardings = _shardings(config, form, mesh)
    tree, folder = stored_tree(config, form), layer_folder(path, layer)
    if not folder.is_dir():
        raise FileNotFoundError(f"{folder} does not exist, though {CONVERSION_NAME} names it; convert again")
    with ocp.StandardCheckpointer() as checkpointer:
        _check_metadata(checkpointer.metadata(folder).item_metadata.tree, tree, folder)
        target = jax.tree.map(
            lambda leaf, sharding: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=sharding), tree, shardings
        )
        restored = checkpointer.restore(folder, target)
    to_local = to_fnuz if (flavour or local_flavour()) == "e4m3fnuz" else lambda array: array
    weights = {}
    for name in tree:
        value = _as_loaded(name, restored[name], is_whole=mesh is None, is_mxfp4=form.name == "mxfp4")
        weights[name] = to_local(value) if isinstance(value, QuantizedArray) and value.format == "fp8" else value
    return weights


def _shardings(config: MuseConfig, form: ExpertFormat, mesh: BlockMesh | None) -> dict[str, Any]:
    tree = stored_tree(config, form)
    if mesh is None:
        return jax.tree.map(lambda _: SingleDeviceSharding(jax.local_devices()[0]), tree)
    mesh.check(config, form.scale_block[1] or 1)
    experts, ranks = config.num_experts, mesh.size("ep")
    if experts % ranks:
        sizes = ", ".join(str(size) for size in range(1, experts + 1) if experts % size == 0)
        raise ValueError(
            f"ep is {ranks} and a converted layer has {experts} experts side by side; ep can be {sizes}, "
            "or load the safetensors with load_sharded_layer"
        )
    shardings: dict[str, Any] = {name: mesh.sharding(*axes) for name, axes in HELD.items()}
    for name in EXPERT_WEIGHTS:
        if form.scale_dtypes:
            shardings[name] = {
                "values": mesh.sharding(*HELD[name]),
                "scales": mesh.sharding(*scale_axes(name, form.scale_block[1] is not None)),
                **({"input_scale": mesh.sharding()} if form.has_input_scale else {}),
            }
    return shardings


def _check_metadata(found: Any, tree: dict[str, Any], folder: Path) -> None:
    words = lambda leaf: f"{np.dtype(leaf.dtype).name} {list(leaf.shape)}"
    held, wanted = (
        {jax.tree_util.keystr(path, simple=True, separator="."): words(leaf) for path, leaf in leaves}
        for leaves in (jax.tree_util.tree_leaves_with_path(part) for part in (dict(found), tree))
    )
    for name in wanted | held:
        if held.get(name) != wanted.get(name):
            raise ValueError(
                f"{folder} holds {name} as {held.get(name, 'nothing')}; expected {wanted.get(name, 'nothing')}"
            )


def _as_loaded(name: str, value: Any, *, is_whole: bool, is_mxfp4: bool) -> jax.Array | QuantizedArray:
    """A restored leaf as the loaders give it: gate_up's halves one after the other where it is whole."""

    def join(array: jax.Array) -> jax.Array:
        return array.reshape(array.shape[0], -1, *array.shape[3:]) if is_whole and name == "gate_up" else array

    if not isinstance(value, dict):
        return join(value)
    return QuantizedArray(
        values=join(value["values"]),
        scales=join(value["scales"]),
        format="mxfp4" if is_mxfp4 else "fp8",
        input_scale=value.get("input_scale"),
    ).check()
