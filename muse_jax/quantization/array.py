"""QuantizedArray: a weight as codes and scales, a pytree whose leaves are the two arrays."""

from __future__ import annotations

import math
from dataclasses import dataclass, field, replace
from typing import Any, Literal

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec
from jax.typing import DTypeLike

from muse_jax.checkpoint.quantized import FP8_DTYPES, QuantizedWeight
from pallas_kernels.expert_gemm import Codes, hold, stored
from pallas_kernels.formats import FP8_BLOCK, MX_BLOCK, decode_e4m3
from pallas_kernels.quantize import dequantize_mxfp4_rows

Format = Literal["fp8", "mxfp4"]


@jax.tree_util.register_dataclass
@dataclass(frozen=True, kw_only=True, eq=False)
class QuantizedArray:
    """w[..., o, i] = decode(values)[..., o, i] * the scale of that element, with any number of leading axes.

        fp8      e4m3(values[..., o, i]) * scales[..., o]                   or * scales[..., o // 128, i // 128]
        mxfp4    e2m1(values[..., o, i // 2] >> 4 * (i % 2) & 15) * 2^(scales[..., o, i // 32] - 127)

    Attributes:
      values: "fp8": float8_e4m3fn or float8_e4m3fnuz [..., out, in]. "mxfp4": uint8 [..., out, in / 2], or, held as
        kernels read it (`held`), uint16 [..., out, in / 4] with bfloat16 scales, the same codes and powers of two.
      scales: "fp8": float32 [..., out], or [..., ceil(out / 128), ceil(in / 128)]. "mxfp4": uint8 [..., out, in / 32].
      format: "fp8" or "mxfp4"; part of the tree's structure, not a leaf.
      input_scale: float32 [], the one scale of all inputs of an fp8 weight; None where each row finds its own.

    Leaves may be shapes, shardings or slices, so the constructor takes anything; `check` says whether arrays fit.
    """

    values: Any
    scales: Any
    format: Format = field(metadata={"static": True})
    input_scale: Any = None

    @classmethod
    def from_host(cls, weight: QuantizedWeight) -> QuantizedArray:
        """The loader's weight, on the default device."""
        scale = None if weight.input_scale is None else jnp.float32(weight.input_scale)
        values, scales = jnp.asarray(weight.values), jnp.asarray(weight.scales)
        return cls(values=values, scales=scales, format=weight.format, input_scale=scale).check()

    def to_host(self) -> QuantizedWeight:
        """The same weight in host memory; it must have the axes [E, out, in]."""
        scale = None if self.input_scale is None else float(self.input_scale)
        codes = stored(self.codes)
        values, scales = np.asarray(codes.values), np.asarray(codes.scales)
        return QuantizedWeight(values=values, scales=scales, format=self.format, input_scale=scale)

    @property
    def codes(self) -> Codes:
        """The two arrays as the expert GEMMs take them."""
        return Codes(values=self.values, scales=self.scales)

    def held(self) -> QuantizedArray:
        """The same weight as kernels read it (`pallas_kernels.expert_gemm.hold`); XLA paths read either."""
        codes = hold(self.codes)
        return replace(self, values=codes.values, scales=codes.scales)

    @property
    def shape(self) -> tuple[int, ...]:
        """The logical shape [..., out, in]."""
        return (*self.values.shape[:-1], self.codes.columns)

    @property
    def has_block_scales(self) -> bool:
        """Whether an fp8 weight has a scale for every 128 x 128 block instead of every row."""
        return self.format == "fp8" and len(self.scales.shape) == len(self.values.shape)

    def check(self) -> QuantizedArray:
        """This array. Raises ValueError where dtypes and shapes are not those of the format."""
        values, scales = self.values, self.scales
        if self.format not in ("fp8", "mxfp4"):
            raise ValueError(f"format is {self.format!r}; expected 'fp8' or 'mxfp4'")
        dtypes = FP8_DTYPES if self.format == "fp8" else (np.dtype(np.uint8),)
        if values.dtype not in dtypes or len(values.shape) < 2:
            words = " or ".join(dtype.name for dtype in dtypes)
            raise ValueError(f"values are {values.dtype} {values.shape}; {self.format} has {words} [..., out, in]")
        *rows, columns = self.shape
        if self.format == "mxfp4":
            _check_columns(columns)
            dtype, shapes = np.dtype(np.uint8), [(*rows, columns // MX_BLOCK)]
        else:
            blocks = (*rows[:-1], -(-rows[-1] // FP8_BLOCK), -(-columns // FP8_BLOCK))
            dtype, shapes = np.dtype(np.float32), [tuple(rows), blocks]
        if scales.dtype != dtype or scales.shape not in shapes:
            raise ValueError(
                f"scales are {scales.dtype} {scales.shape}; {self.format} values of shape {values.shape} have "
                f"{dtype} {' or '.join(map(str, shapes))}"
            )
        return self

    def dequantize(self, dtype: DTypeLike = jnp.float32) -> jax.Array:
        """The numbers that codes and scales stand for, [..., out, in], multiplied in float32."""
        if self.format == "mxfp4":
            codes = stored(self.codes)
            return dequantize_mxfp4_rows(codes.values, codes.scales).astype(dtype)
        flavour = "e4m3fn" if self.values.dtype == jnp.float8_e4m3fn else "e4m3fnuz"
        values = decode_e4m3(jax.lax.bitcast_convert_type(self.values, jnp.uint8), flavour)
        scales = self.scales[..., None]
        if self.has_block_scales:
            rows, columns = self.shape[-2:]
            scales = jnp.repeat(jnp.repeat(self.scales, FP8_BLOCK, -2), FP8_BLOCK, -1)[..., :rows, :columns]
        return (values * scales).astype(dtype)

    def shardings(self, mesh: Mesh, spec: PartitionSpec) -> QuantizedArray:
        """Shardings of values and scales for a weight [..., out, in] that is split as `spec` says; for `device_put`.

        Raises ValueError where an axis would not be split evenly, or at the edges of quantization blocks.
        """
        axes = (*spec, *[None] * (len(self.shape) - len(spec)))
        if len(axes) != len(self.shape):
            raise ValueError(f"spec is {spec} for a weight of {len(self.shape)} axes, {self.shape}")
        units = {-2: FP8_BLOCK, -1: FP8_BLOCK} if self.has_block_scales else {}
        units |= {-1: MX_BLOCK} if self.format == "mxfp4" else {}
        for position, (axis, size) in enumerate(zip(axes, self.shape, strict=True), -len(axes)):
            ranks = math.prod(mesh.shape[name] for name in ((axis,) if isinstance(axis, str) else axis or ()))
            unit = units.get(position, 1)
            if size % (ranks * unit) and ranks > 1:
                possible = [str(n) for n in range(1, size // unit + 1) if size % (n * unit) == 0]
                raise ValueError(
                    f"axis {position} of a {self.format} weight {self.shape} has {size} columns, which {ranks} devices "
                    f"cannot share in blocks of {unit}; {', '.join(possible) or 'no number of'} devices can"
                )
        row_scales = self.format == "fp8" and not self.has_block_scales
        place = lambda *names: NamedSharding(mesh, PartitionSpec(*names))
        return QuantizedArray(
            values=place(*axes),
            scales=place(*axes[:-1]) if row_scales else place(*axes),
            format=self.format,
            input_scale=None if self.input_scale is None else place(),
        )


def _check_columns(columns: int) -> None:
    if columns % MX_BLOCK:
        raise ValueError(f"the weight has {columns} columns; MXFP4 needs a multiple of {MX_BLOCK}")
