"""Which file of a checkpoint holds which tensor: one model.safetensors, or the shards that an index names.

    folder/model.safetensors                          every tensor in one file
    folder/model.safetensors.index.json + shards      {"weight_map": {tensor name: shard file name}}

The index and the shards' own headers must say the same, tensor by tensor.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from muse_jax.checkpoint.header import TensorEntry, read_header
from muse_jax.checkpoint.names import name_list
from muse_jax.strict_json import read_object

SINGLE_NAME = "model.safetensors"
INDEX_NAME = "model.safetensors.index.json"


@dataclass(frozen=True, kw_only=True)
class Checkpoint:
    """Every tensor of a checkpoint by name, from headers alone; `source` is the file that listed them."""

    source: Path
    files: tuple[Path, ...]
    entries: Mapping[str, TensorEntry]


def open_checkpoint(path: str | Path) -> Checkpoint:
    """The tensors of the folder `path`, or of the single .safetensors file `path`; no tensor data is read.

    Raises FileNotFoundError when `path` does not exist, and ValueError, naming tensors and files, when the folder holds
    no checkpoint, a shard is missing or malformed, a tensor lies in two shards, or index and shards disagree.
    """
    path = Path(path)
    if path.is_file():
        if path.suffix != ".safetensors":
            raise ValueError(f"{path} is not a .safetensors file; expected one, or a checkpoint folder")
        return _single(path)
    if not path.is_dir():
        raise FileNotFoundError(f"{path} does not exist; expected a checkpoint folder or a .safetensors file")
    single, index = path / SINGLE_NAME, path / INDEX_NAME
    if single.is_file() and index.is_file():
        raise ValueError(f"{path} holds both {SINGLE_NAME} and {INDEX_NAME}; remove the one that is out of date")
    if single.is_file():
        return _single(single)
    if index.is_file():
        return _sharded(index)
    raise ValueError(f"{path} holds neither {SINGLE_NAME} nor {INDEX_NAME}")


def _single(path: Path) -> Checkpoint:
    return Checkpoint(source=path, files=(path,), entries=read_header(path))


def _sharded(index: Path) -> Checkpoint:
    where = _weight_map(index)
    files = tuple(index.parent / name for name in sorted(set(where.values())))
    absent = [file.name for file in files if not file.is_file()]
    if absent:
        raise ValueError(f"{index} names shards that do not exist: {name_list(absent)}")
    entries: dict[str, TensorEntry] = {}
    twice: list[str] = []
    for file in files:
        for name, entry in read_header(file).items():
            if name in entries:
                twice.append(f"{name!r} in {entries[name].file.name} and {file.name}")
            entries[name] = entry
    if twice:
        raise ValueError(f"{index.parent} holds tensors in two shards: {name_list(twice)}")
    lost = [f"{name!r} in {file}" for name, file in where.items() if name not in entries]
    if lost:
        raise ValueError(f"{index} names tensors that the shards do not hold: {name_list(lost)}")
    unlisted = [str(entry) for name, entry in entries.items() if name not in where]
    if unlisted:
        raise ValueError(f"{index} does not list tensors that its shards hold: {name_list(unlisted)}")
    moved = [f"{entry}, not {where[name]}" for name, entry in entries.items() if entry.file.name != where[name]]
    if moved:
        raise ValueError(f"{index} places tensors in the wrong shard: {name_list(moved)}")
    return Checkpoint(source=index, files=files, entries=entries)


def _weight_map(index: Path) -> dict[str, str]:
    where = read_object(index).get("weight_map")
    if not isinstance(where, dict) or not where:
        raise ValueError(f"{index} has no weight_map with the shard of each tensor")
    for name, file in where.items():
        if not isinstance(file, str) or not file.endswith(".safetensors") or Path(file).name != file or "\0" in file:
            raise ValueError(
                f"{index} places {name!r} in {file!r}; expected the plain name of a .safetensors file beside it"
            )
    return where
