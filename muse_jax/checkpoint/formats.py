"""The number formats a layer's experts are stored in: dtypes and shapes of a weight and of its scales.

    bf16, f32   weight [out, in], no scales; the layer's other tensors have the same dtype (the router is always F32)
    fp8         weight F8_E4M3 [out, in], scale F32 or BF16 [out]
    mxfp4       weight U8 [out, in / 2], two codes a byte; scale U8 [out, in / 32], one E8M0 exponent a block

Quantized experts are stored under per-expert names. A format is recognised by the tensors, not by config.json.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass

from muse_jax.checkpoint.header import TensorEntry
from muse_jax.checkpoint.names import EXPERT_WEIGHTS, MlpName


@dataclass(frozen=True, kw_only=True)
class ExpertFormat:
    """One row of FORMATS.

    weight_dtype: of expert weights. plain_dtype: of the layer's unquantized tensors, router apart. scale_dtypes: of
    scales, empty when there are none. in_per_weight, in_per_scale: input columns that one stored column stands for
    (in_per_scale None: one scale a row). optional_parts: further per-expert tensors that may, but need not, exist.
    """

    name: str
    weight_dtype: str
    plain_dtype: str = "BF16"
    scale_dtypes: tuple[str, ...] = ()
    in_per_weight: int = 1
    in_per_scale: int | None = None
    optional_parts: tuple[str, ...] = ()

    @property
    def parts(self) -> tuple[str, ...]:
        """The tensors that each expert projection must have."""
        return ("weight", "weight_scale") if self.scale_dtypes else ("weight",)

    def shape(self, part: str, rows: int, columns: int) -> tuple[int, ...]:
        """The stored shape of the weight or scale of a projection [rows, columns]."""
        if part == "weight":
            return (rows, -(-columns // self.in_per_weight))
        return (rows,) if self.in_per_scale is None else (rows, -(-columns // self.in_per_scale))

    def dtypes(self, part: str) -> tuple[str, ...]:
        """The dtypes that the weight or scale may have."""
        return (self.weight_dtype,) if part == "weight" else self.scale_dtypes


FORMATS = {
    row.name: row
    for row in (
        ExpertFormat(name="bf16", weight_dtype="BF16"),
        ExpertFormat(name="f32", weight_dtype="F32", plain_dtype="F32"),
        ExpertFormat(name="fp8", weight_dtype="F8_E4M3", scale_dtypes=("F32", "BF16"), optional_parts=("input_scale",)),
        ExpertFormat(name="mxfp4", weight_dtype="U8", scale_dtypes=("U8",), in_per_weight=2, in_per_scale=32),
    )
}
_BY_DTYPE = {row.weight_dtype: row for row in FORMATS.values()}


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
    for name, entry in tensors:
        if name.weight in EXPERT_WEIGHTS:
            share = 1 if name.expert is not None else num_experts * len(EXPERT_WEIGHTS[name.weight])
            (weights if name.part == "weight" else scales)[entry.dtype] += share
    words = f"weights {_words(weights)}" + (f", scales {_words(scales)}" if scales else "")
    known = Counter({dtype: count for dtype, count in weights.items() if dtype in _BY_DTYPE})
    if not known:
        return FoundFormat(format=FORMATS["bf16"], label="unknown" if weights or scales else "absent", dtypes=words)
    row = _BY_DTYPE[known.most_common(1)[0][0]]
    if len(weights) > 1:
        label = "mixed"
    elif bool(scales) != bool(row.scale_dtypes) or not set(scales) <= set(row.scale_dtypes):
        label = "unknown"
    else:
        label = row.name
    return FoundFormat(format=row, label=label, dtypes=words)


def _words(counts: Counter[str]) -> str:
    return " and ".join(sorted(counts)) or "none"
