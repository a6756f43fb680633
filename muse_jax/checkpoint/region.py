"""A rectangular part of one tensor, read by byte ranges: as much memory as the part, not the tensor.

    run = the longest stretch of the part that is contiguous in the file
Long runs are read straight into place. Short ones (a few columns of many rows) are cut out of whole rows, which are
read a few at a time: disks and page caches work in pages, and a system call for every short run costs more than the
bytes between them.
"""

from __future__ import annotations

import itertools
import math
import os

import numpy as np

from muse_jax.checkpoint.header import NUMPY_DTYPES, TensorEntry

LONG_RUN = 2**13  # bytes from which a run is read by itself
BUFFER = 2**22  # bytes of whole rows that are read at a time


def read_region(entry: TensorEntry, region: tuple[slice, ...], out: np.ndarray) -> None:
    """Fill `out` with tensor[region] of the tensor that lies at `entry`.

    region has a slice of step 1 for every axis, within the tensor; out has its shape and the tensor's dtype, and may
    be a part of another array.
    Raises OSError when the file cannot be read and ValueError when it ends early or `out` does not fit.
    """
    bounds = [cut.indices(size) for cut, size in zip(region, entry.shape, strict=True)]
    shape = tuple(len(range(*ends)) for ends in bounds)
    if out.shape != shape or out.dtype != NUMPY_DTYPES.get(entry.dtype) or any(step != 1 for *_, step in bounds):
        raise ValueError(
            f"{entry} is {entry.dtype} {list(entry.shape)}; its part {region} does not fit an array "
            f"{out.dtype.name} {list(out.shape)}"
        )
    if out.size == 0:
        return
    file = os.open(entry.file, os.O_RDONLY)
    try:
        _read(file, entry, [(start, stop) for start, stop, _ in bounds], out)
    finally:
        os.close(file)


def _read(file: int, entry: TensorEntry, bounds: list[tuple[int, int]], out: np.ndarray) -> None:
    item = out.dtype.itemsize
    # Bytes between neighbours of each axis, and the first axis whose slices are one run each.
    strides = [item * math.prod(entry.shape[axis + 1 :]) for axis in range(out.ndim)]
    whole = [bound == (0, size) for bound, size in zip(bounds, entry.shape, strict=True)]
    axis = out.ndim
    while axis > 0 and all(whole[axis:]):
        axis -= 1
    run = (bounds[axis][1] - bounds[axis][0]) * strides[axis] if out.ndim else item
    if axis > 0 and run < LONG_RUN:
        _read_rows(file, entry, bounds, strides, axis, out)
        return
    ranges = [range(start, stop) for start, stop in bounds[:axis]]
    for place in itertools.product(*(enumerate(each) for each in ranges)):
        start = sum(at * stride for (_, at), stride in zip(place, strides, strict=False))
        start += bounds[axis][0] * strides[axis] if out.ndim else 0
        _fill(file, entry, start, out[(*(position for position, _ in place), ...)])


def _read_rows(
    file: int,
    entry: TensorEntry,
    bounds: list[tuple[int, int]],
    strides: list[int],
    axis: int,
    out: np.ndarray,
) -> None:
    """Short runs along `axis`: whole rows of the axis before it are read, a buffer at a time, and cut."""
    first, last = bounds[axis - 1]
    step = max(1, BUFFER // strides[axis - 1])
    buffer = np.empty((min(step, last - first), *entry.shape[axis:]), out.dtype)
    cut = (slice(None), slice(*bounds[axis]))
    ranges = [range(start, stop) for start, stop in bounds[: axis - 1]]
    for place in itertools.product(*(enumerate(each) for each in ranges)):
        base = sum(at * stride for (_, at), stride in zip(place, strides, strict=False))
        target = out[tuple(position for position, _ in place)]
        for row in range(first, last, step):
            rows = buffer[: min(step, last - row)]
            _fill(file, entry, base + row * strides[axis - 1], rows)
            target[row - first : row - first + len(rows)] = rows[cut]


def _fill(file: int, entry: TensorEntry, start: int, array: np.ndarray) -> None:
    """The tensor's bytes from `start` on into an array, through a copy where it is not contiguous."""
    contiguous = array if array.flags.c_contiguous else np.empty(array.shape, array.dtype)
    view = memoryview(contiguous.reshape(-1).view(np.uint8))
    done = 0
    while done < len(view):
        count = os.preadv(file, [view[done:]], entry.start + start + done)
        if not count:
            raise ValueError(f"{entry.file} ended early; it is truncated or was changed while {entry.name!r} was read")
        done += count
    if contiguous is not array:
        array[...] = contiguous
