"""The number formats a layer's experts are stored in: dtypes and shapes of a weight and of its scales.

    bf16, f32    weight [out, in], no scales; the layer's other tensors have the same dtype (the router is always F32)
    fp8          weight F8_E4M3 [out, in], scale F32 or BF16 [out]
    fp8_tensor   weight F8_E4M3 [out, in], scale and input_scale F32 or BF16, [] or [1]
    fp8_block    weight F8_E4M3 [out, in], scale F32 or BF16 [out / 128, in / 128]
    mxfp4        weight U8 [out, in / 2], two codes a byte; scale U8 [out, in / 32], one E8M0 exponent a block

Quantized experts are stored under per-expert names. A format is recognised by the tensors; config.json must agree.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass

from muse_jax.checkpoint.header import TensorEntry
from muse_jax.checkpoint.names import EXPERT_WEIGHTS, MlpName
from pallas_kernels.block_sizes import FP8_BLOCK, MX_BLOCK


@dataclass(frozen=True, kw_only=True)
class ExpertFormat:
    """One row of FORMATS.

    weight_dtype: of expert weights. plain_dtype: of the layer's unquantized tensors, router apart. scale_dtypes: of
    scales, empty when there are none. in_per_weight: input columns that one stored column stands for. scale_block:
    (rows, columns) that share a scale, None for all of them. has_input_scale: whether an input_scale must be there.
    """

    name: str
    weight_dtype: str
    plain_dtype: str = "BF16"
    scale_dtypes: tuple[str, ...] = ()
    in_per_weight: int = 1
    scale_block: tuple[int | None, int | None] = (1, None)
    has_input_scale: bool = False

    @property
    def parts(self) -> tuple[str, ...]:
        """The tensors that each expert projection must have."""
        if not self.scale_dtypes:
            return ("weight",)
        return ("weight", "weight_scale", "input_scale") if self.has_input_scale else ("weight", "weight_scale")

    def shapes(self, part: str, rows: int, columns: int) -> tuple[tuple[int, ...], ...]:
        """The stored shapes that the weight or a scale of a projection [rows, columns] may have."""
        if part == "weight":
            return ((rows, -(-columns // self.in_per_weight)),)
        if part == "input_scale" or self.scale_block == (None, None):
            return (), (1,)
        counts = [-(-size // unit) for size, unit in zip((rows, columns), self.scale_block, strict=True) if unit]
        return (tuple(counts),)

    def dtypes(self, part: str) -> tuple[str, ...]:
        """The dtypes that the weight or scale may have."""
        return (self.weight_dtype,) if part == "weight" else self.scale_dtypes


_FP8_SCALES = ("F32", "BF16")
FORMATS = {
    row.name: row
    for row in (
        ExpertFormat(name="bf16", weight_dtype="BF16"),
        ExpertFormat(name="f32", weight_dtype="F32", plain_dtype="F32"),
        ExpertFormat(name="fp8", weight_dtype="F8_E4M3", scale_dtypes=_FP8_SCALES),
        ExpertFormat(
            name="fp8_tensor",
            weight_dtype="F8_E4M3",
            scale_dtypes=_FP8_SCALES,
            scale_block=(None, None),
            has_input_scale=True,
        ),
        ExpertFormat(
            name="fp8_block",
            weight_dtype="F8_E4M3",
            scale_dtypes=_FP8_SCALES,
            scale_block=(FP8_BLOCK, FP8_BLOCK),
        ),
        ExpertFormat(name="mxfp4", weight_dtype="U8", scale_dtypes=("U8",), in_per_weight=2, scale_block=(1, MX_BLOCK)),
    )
}
_BY_DTYPE = {row.weight_dtype: row for row in reversed(FORMATS.values())}


@dataclass(frozen=True, kw_only=True)
class FoundFormat:
    """What a layer's expert tensors look like.

    format: the row of FORMATS that most of the experts' weights follow (bf16 when none does); the audit holds every
    tensor to it. label: its name, "mixed" when weights of several dtypes are there, "unknown" when no row fits, or
    "absent" without expert tensors. dtypes: the words of a message, such as 'weights U8, scales U8'.
    """

    format: ExpertFormat
    label: str
    dtypes: str


def find_format(tensors: Iterable[tuple[MlpName, TensorEntry]], num_experts: int) -> FoundFormat:
    """The format of a layer's experts, from the dtypes of their weights and scales."""
    weights: Counter[str] = Counter()
    scales: Counter[str] = Counter()
    scale_shapes: Counter[tuple[int, ...]] = Counter()
    for name, entry in tensors:
        if name.weight in EXPERT_WEIGHTS:
            share = 1 if name.expert is not None else num_experts * len(EXPERT_WEIGHTS[name.weight])
            (weights if name.part == "weight" else scales)[entry.dtype] += share
            if name.part == "weight_scale":
                scale_shapes[entry.shape] += 1
    words = f"weights {_words(weights)}" + (f", scales {_words(scales)}" if scales else "")
    known = Counter({dtype: count for dtype, count in weights.items() if dtype in _BY_DTYPE})
    if not known:
        return FoundFormat(format=FORMATS["bf16"], label="unknown" if weights or scales else "absent", dtypes=words)
    row = _BY_DTYPE[known.most_common(1)[0][0]]
    if row.weight_dtype == "F8_E4M3" and scale_shapes:
        row = _fp8_row(scale_shapes.most_common(1)[0][0])
    if len(weights) > 1:
        label = "mixed"
    elif bool(scales) != bool(row.scale_dtypes) or not set(scales) <= set(row.scale_dtypes):
        label = "unknown"
    else:
        label = row.name
    return FoundFormat(format=row, label=label, dtypes=words)


def _fp8_row(scale_shape: tuple[int, ...]) -> ExpertFormat:
    if scale_shape in ((), (1,)):
        return FORMATS["fp8_tensor"]
    return FORMATS["fp8_block" if len(scale_shape) == 2 else "fp8"]


def _words(counts: Counter[str]) -> str:
    return " and ".join(sorted(counts)) or "none"
