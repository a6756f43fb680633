"""QuantizedWeight: the codes and scales of one expert weight in host memory, as the loader hands it over.

    fp8      w[e, o, i] = fp8(values[e, o, i]) * scales[e, o]                       or scales[e, o // 128, i // 128]
    mxfp4    w[e, o, i] = e2m1(nibble i % 2 of values[e, o, i // 2]) * 2^(scales[e, o, i // 32] - 127)

Nibble 0 is the low one. A scale that a checkpoint has once a tensor stands here once a row: the same numbers.

`to_fnuz` is for chips whose matrix units multiply float8_e4m3fnuz (gfx942): read as fnuz, the bits of an e4m3fn number
are half of it, so the bytes stay and the scales double. Two bytes differ: 0x80, -0 in the one format and NaN in the
other, becomes 0; 0x7F and 0xFF, NaN in the one and 240 in the other, become 0x80.
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import Literal

import ml_dtypes
import numpy as np

from pallas_kernels.block_sizes import FP8_BLOCK, MX_BLOCK

FP8_DTYPES = (np.dtype(ml_dtypes.float8_e4m3fn), np.dtype(ml_dtypes.float8_e4m3fnuz))


@dataclass(frozen=True, kw_only=True, eq=False)
class QuantizedWeight:
    """One weight of all experts, [E, out, in], as codes and scales.

    Attributes:
      values: "fp8": float8_e4m3fn or float8_e4m3fnuz [E, out, in]. "mxfp4": uint8 [E, out, in / 2].
      scales: "fp8": float32 [E, out], or [E, ceil(out / 128), ceil(in / 128)]. "mxfp4": uint8 [E, out, in / 32].
      format: "fp8" or "mxfp4".
      input_scale: float32 scale of every input of an fp8 weight, where the checkpoint has one; None where each row
        of inputs (with 128 x 128 scales: each 128 columns of it) finds its own.

    Raises ValueError when dtypes or shapes are not those of the format.
    """

    values: np.ndarray
    scales: np.ndarray
    format: Literal["fp8", "mxfp4"]
    input_scale: float | None = None

    def __post_init__(self) -> None:
        if self.format not in ("fp8", "mxfp4"):
            raise ValueError(f"format is {self.format!r}; expected 'fp8' or 'mxfp4'")
        dtypes = FP8_DTYPES if self.format == "fp8" else (np.dtype(np.uint8),)
        if self.values.dtype not in dtypes or self.values.ndim != 3:
            words = " or ".join(dtype.name for dtype in dtypes)
            raise ValueError(
                f"values are {self.values.dtype.name} {self.values.shape}; {self.format} has {words} with 3 axes"
            )
        scale_dtype = np.dtype(np.float32 if self.format == "fp8" else np.uint8)
        if self.scales.dtype != scale_dtype or self.scales.shape not in self._scale_shapes():
            shapes = " or ".join(map(str, self._scale_shapes()))
            raise ValueError(
                f"scales are {self.scales.dtype.name} {self.scales.shape}; {self.format} values of shape "
                f"{self.values.shape} have {scale_dtype.name} {shapes}"
            )
        if self.format == "mxfp4" and self.shape[-1] % MX_BLOCK:
            raise ValueError(f"values have {self.shape[-1]} columns; mxfp4 needs a multiple of {MX_BLOCK}")
        if self.input_scale is not None and (self.format != "fp8" or not self.input_scale > 0):
            raise ValueError(f"input_scale is {self.input_scale} with {self.format}; expected fp8 and a number above 0")

    @property
    def shape(self) -> tuple[int, int, int]:
        """The logical shape [E, out, in]."""
        experts, rows, columns = self.values.shape
        return experts, rows, columns * 2 if self.format == "mxfp4" else columns

    @property
    def nbytes(self) -> int:
        """Bytes of codes and scales."""
        return self.values.nbytes + self.scales.nbytes

    @property
    def has_block_scales(self) -> bool:
        """Whether an fp8 weight has a scale for every 128 x 128 block instead of every row."""
        return self.format == "fp8" and self.scales.ndim == 3

    def _scale_shapes(self) -> tuple[tuple[int, ...], ...]:
        experts, rows, columns = self.shape
        if self.format == "mxfp4":
            return ((experts, rows, columns // MX_BLOCK),)
        return (experts, rows), (experts, -(-rows // FP8_BLOCK), -(-columns // FP8_BLOCK))


def to_fnuz(weight: QuantizedWeight) -> QuantizedWeight:
    """The same numbers in float8_e4m3fnuz; a weight that is so already, or is no fp8, is returned as it is.

    Inputs are quantized with limit 224 then, which gives them the bytes of 448 in e4m3fn and twice its scales, so both
    chips multiply the same numbers. Raises ValueError when a doubled scale is beyond float32.
    """
    if weight.values.dtype != ml_dtypes.float8_e4m3fn:
        return weight
    values, scales = fnuz_values(weight.values), fnuz_scales(weight.scales)
    input_scale = None if weight.input_scale is None else 2 * weight.input_scale
    return dataclasses.replace(weight, values=values, scales=scales, input_scale=input_scale)


def fnuz_values(values: np.ndarray) -> np.ndarray:
    """Codes of float8_e4m3fn as float8_e4m3fnuz codes of half their numbers."""
    table = np.arange(256, dtype=np.uint8)
    table[[0x80, 0x7F, 0xFF]] = 0, 0x80, 0x80
    return table[values.view(np.uint8)].view(ml_dtypes.float8_e4m3fnuz)


def fnuz_scales(scales: np.ndarray) -> np.ndarray:
    """The scales doubled; ValueError where that is beyond float32."""
    with np.errstate(over="ignore"):
        doubled = scales * np.float32(2)
    if np.any(np.isinf(doubled) & np.isfinite(scales)):
        raise ValueError(f"a scale is {scales[np.isinf(doubled)][0]:.4g}; doubled for fnuz it is beyond float32")
    return doubled
