"""Quark's per-expert tensors of one weight, collected into one `QuantizedWeight`.

    values[e, rows of p] = experts.{e}.{p}.weight           scales[e, rows of p] = experts.{e}.{p}.weight_scale
with p = gate_proj, up_proj for gate_up and p = down_proj for down. A scale stored once a tensor is given to each row of
its projection: the same numbers, where merging gate's and up's scales into one would change codes. Scales stored in
bfloat16 are widened. input_scale is the largest over experts and projections, as one activation serves them all.
"""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np

from muse_jax.checkpoint.audit import NamedTensor
from muse_jax.checkpoint.formats import ExpertFormat
from muse_jax.checkpoint.header import NUMPY_DTYPES, TensorEntry, read_into
from muse_jax.checkpoint.names import EXPERT_WEIGHTS
from muse_jax.checkpoint.quantized import QuantizedWeight
from muse_jax.config import MuseConfig


def read_quantized(
    weight: str, tensors: tuple[NamedTensor, ...], form: ExpertFormat, config: MuseConfig
) -> QuantizedWeight:
    """gate_up or down of an audited layer, reading the bytes of its tensors once.

    Raises OSError or ValueError when a file ends early, and ValueError when an input_scale is not a positive number.
    """
    parts = {part: _Stack(weight, part, tensors, config) for part in ("weight", "weight_scale")}
    read_into(target for stack in parts.values() for target in stack.targets)
    values, scales = parts["weight"].joined(), parts["weight_scale"].joined()
    if form.scale_dtypes != ("U8",):
        scales = scales.astype(np.float32)
    if form.name == "fp8_tensor":
        scales = np.repeat(scales, values.shape[1] // scales.shape[1], axis=1)
    own = [(name, entry) for name, entry in tensors if name.weight == weight and name.part == "input_scale"]
    input_scale = read_input_scale(weight, own) if form.has_input_scale else None
    return QuantizedWeight(
        values=values, scales=scales, format="mxfp4" if form.name == "mxfp4" else "fp8", input_scale=input_scale
    )


def read_input_scale(weight: str, tensors: Iterable[NamedTensor]) -> float:
    """The largest of the input_scale tensors of gate_up or down; ValueError when that is not a positive number."""
    found = [(entry, np.empty(entry.shape, NUMPY_DTYPES[entry.dtype])) for _, entry in tensors]
    read_into(found)
    scale = float(np.max([value.astype(np.float32).reshape(()) for _, value in found]))
    if not 0 < scale < np.inf:
        raise ValueError(f"the largest input_scale of {weight} is {scale}; expected a number above 0")
    return scale


class _Stack:
    """One part of one weight, [E, P, *stored] with P projections, and where each tensor's bytes go."""

    def __init__(self, weight: str, part: str, tensors: tuple[NamedTensor, ...], config: MuseConfig) -> None:
        projections = EXPERT_WEIGHTS[weight]
        own = [(name, entry) for name, entry in tensors if name.weight == weight and name.part == part]
        dtypes = {NUMPY_DTYPES[entry.dtype] for _, entry in own}
        # Scales may be F32 here and BF16 there: each is read as it is stored, then widened.
        self._arrays = {dtype: np.zeros(self._shape(own, config.num_experts, projections), dtype) for dtype in dtypes}
        self.targets: list[tuple[TensorEntry, np.ndarray]] = []
        for name, entry in own:
            place = self._arrays[NUMPY_DTYPES[entry.dtype]][name.expert, projections.index(name.projection)]
            self.targets.append((entry, place.reshape(entry.shape)))

    @staticmethod
    def _shape(own: list[NamedTensor], experts: int, projections: tuple[str, ...]) -> tuple[int, ...]:
        return (experts, len(projections), *(own[0][1].shape or (1,)))

    def joined(self) -> np.ndarray:
        """[E, P * rows, ...], the projections one after the other."""
        arrays = list(self._arrays.values())
        whole = arrays[0] if len(arrays) == 1 else np.sum([array.astype(np.float32) for array in arrays], axis=0)
        return whole.reshape(whole.shape[0], whole.shape[1] * whole.shape[2], *whole.shape[3:])
