"""The safetensors format: a header says where each tensor's bytes lie; the rest of the file is those bytes.

    file = length (8 bytes, little endian) + header (JSON, `length` bytes) + data
    header = {name: {"dtype", "shape", "data_offsets": [begin, end)}}, offsets counted from the end of the header

A header is believed only if its tensors tile the data exactly: no gap, no overlap, nothing beyond the end.
Source: the format's description in the safetensors repository.
"""

from __future__ import annotations

import math
import os
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeGuard

import ml_dtypes
import numpy as np

from muse_jax.strict_json import parse_object

MAX_HEADER_BYTES = 100_000_000  # the format's own limit

_BITS = {
    **{"F4": 4, "F6_E2M3": 6, "F6_E3M2": 6, "BOOL": 8, "U8": 8, "I8": 8, "F8_E4M3": 8, "F8_E5M2": 8, "F8_E8M0": 8},
    **{"F8_E4M3FNUZ": 8, "F8_E5M2FNUZ": 8, "U16": 16, "I16": 16, "F16": 16, "BF16": 16},
    **{"U32": 32, "I32": 32, "F32": 32, "U64": 64, "I64": 64, "F64": 64, "C64": 64},
}
NUMPY_DTYPES: dict[str, np.dtype] = {
    "U8": np.dtype(np.uint8),
    "F8_E4M3": np.dtype(ml_dtypes.float8_e4m3fn),
    "BF16": np.dtype(ml_dtypes.bfloat16),
    "F32": np.dtype(np.float32),
    "I32": np.dtype(np.int32),
    "I64": np.dtype(np.int64),
}


@dataclass(frozen=True, kw_only=True)
class TensorEntry:
    """Where one tensor lies: `nbytes` bytes from byte `start` of `file`, row-major; dtype is the format's own word."""

    name: str
    file: Path
    dtype: str
    shape: tuple[int, ...]
    start: int
    nbytes: int

    @property
    def elements(self) -> int:
        """The number of elements, as the shape counts them."""
        return math.prod(self.shape)

    def __str__(self) -> str:
        return f"{self.name!r} in {self.file.name}"


def read_header(path: Path) -> dict[str, TensorEntry]:
    """The tensors of one safetensors file, in file order; reads the header and nothing else.

    Raises OSError when the file cannot be read and ValueError, naming the file and the tensor, when it is truncated
    or its header does not describe it.
    """
    with path.open("rb", buffering=0) as file:
        size = os.fstat(file.fileno()).st_size
        if size < 8:
            raise ValueError(f"{path} is {size} bytes long; a safetensors file starts with 8 bytes of header length")
        length = int.from_bytes(_read_exactly(file, 8, path), "little")
        if length > size - 8:
            raise ValueError(f"{path} has a header of {length} bytes, but only {size - 8} bytes follow its length")
        if length > MAX_HEADER_BYTES:
            raise ValueError(f"{path} has a header of {length} bytes; the format allows {MAX_HEADER_BYTES}")
        data = _read_exactly(file, length, path)
    if not data.startswith(b"{"):
        raise ValueError(f"{path} has a header that does not start with '{{'; it is no safetensors file")
    header = parse_object(data, f"the header of {path}")
    _check_metadata(header.pop("__metadata__", None), path)
    entries = [_entry(name, info, path, 8 + length) for name, info in header.items()]
    entries.sort(key=lambda entry: (entry.start, entry.nbytes))
    _check_tiling(entries, path, 8 + length, size)
    return {entry.name: entry for entry in entries}


def read_into(targets: Iterable[tuple[TensorEntry, np.ndarray]]) -> None:
    """Fill each array with its tensor's bytes, in file order, opening each file once; nothing else is read.

    An array must be C-contiguous and have its tensor's shape, and the dtype that NUMPY_DTYPES gives for it.
    Raises ValueError when a file ends early (it changed since its header was read).
    """
    by_file: dict[Path, list[tuple[TensorEntry, np.ndarray]]] = {}
    for entry, array in targets:
        fits = array.shape == entry.shape and array.dtype == NUMPY_DTYPES.get(entry.dtype)
        if not fits or not array.flags.c_contiguous:
            raise ValueError(
                f"{entry} is {entry.dtype} {list(entry.shape)}; the array for it is {array.dtype.name} "
                f"{list(array.shape)}, contiguous: {array.flags.c_contiguous}"
            )
        by_file.setdefault(entry.file, []).append((entry, array))
    for path, items in by_file.items():
        with path.open("rb", buffering=0) as file:
            for entry, array in sorted(items, key=lambda item: item[0].start):
                file.seek(entry.start)
                _fill(file, memoryview(array.reshape(-1).view(np.uint8)), path)


def _fill(file: Any, view: memoryview, path: Path) -> None:
    done = 0
    while done < len(view):
        count = file.readinto(view[done:])
        if not count:
            raise ValueError(f"{path} ended {len(view) - done} bytes early; it is truncated or was changed while read")
        done += count


def _read_exactly(file: Any, count: int, path: Path) -> bytes:
    data = bytearray(count)
    _fill(file, memoryview(data), path)
    return bytes(data)


def _check_metadata(metadata: Any, path: Path) -> None:
    if metadata is None:
        return
    if not isinstance(metadata, dict) or not all(isinstance(value, str) for value in metadata.values()):
        raise ValueError(f"the header of {path} has a __metadata__ that is no map from text to text")


def _entry(name: str, info: Any, path: Path, data_start: int) -> TensorEntry:
    where = f"tensor {name!r} in {path}"
    if not name.isprintable():
        raise ValueError(f"{where} has a name with unprintable characters")
    if not isinstance(info, dict):
        raise ValueError(f"{where} is described by a {type(info).__name__}; expected dtype, shape and data_offsets")
    dtype, shape, offsets = (info.get(key) for key in ("dtype", "shape", "data_offsets"))
    if not isinstance(dtype, str) or dtype not in _BITS:
        raise ValueError(f"{where} has the dtype {dtype!r}; expected one of {', '.join(_BITS)}")
    if not _is_sizes(shape):
        raise ValueError(f"{where} has the shape {shape!r}; expected a list of integers, none negative")
    if not _is_sizes(offsets) or len(offsets) != 2 or offsets[0] > offsets[1]:
        raise ValueError(f"{where} has the data_offsets {offsets!r}; expected two ascending byte offsets")
    begin, end = offsets
    if (end - begin) * 8 != math.prod(shape) * _BITS[dtype]:
        raise ValueError(
            f"{where} is {dtype} {shape}, {math.prod(shape) * _BITS[dtype] / 8:g} bytes, "
            f"but its data_offsets hold {end - begin}"
        )
    return TensorEntry(
        name=name, file=path, dtype=dtype, shape=tuple(shape), start=data_start + begin, nbytes=end - begin
    )


def _is_sizes(value: Any) -> TypeGuard[list[int]]:
    return isinstance(value, list) and all(type(item) is int and item >= 0 for item in value)


def _check_tiling(entries: list[TensorEntry], path: Path, data_start: int, size: int) -> None:
    position = data_start
    for entry in entries:
        if entry.start != position:
            fault = "overlaps the tensor before it" if entry.start < position else "leaves a gap before it"
            raise ValueError(
                f"tensor {entry.name!r} in {path} {fault}: it starts at byte {entry.start}, not {position}"
            )
        position += entry.nbytes
    if position > size:
        raise ValueError(
            f"{path} is truncated: its tensors end at byte {position}, the file at byte {size}; "
            f"the last tensor is {entries[-1].name!r}"
        )
    if position < size:
        raise ValueError(f"{path} has {size - position} bytes after its last tensor")
