"""One layer's weights from a checkpoint's files straight onto a mesh: each process reads the slices of its devices.

A slice of a held tensor (`muse_jax.sharding`) is read part by part, one part for each slot and half:
    gate_up[slot, half, F, H]   experts.gate_up_proj[e, half * F :][F, H]   or experts.{e}.gate_proj | up_proj [F, H]
    down[slot, H, F]            experts.down_proj[e, H, F]                  or experts.{e}.down_proj [H, F]
with e the expert of the slot; a slot without one stays zero. Codes and scales of quantized experts are read the same
way, in their own columns: F / 2 bytes and F / 32 exponents of MXFP4's down, F / 128 blocks of FP8's, or a scale a row,
which gate_up's share of rows has and down's has whole. Host memory holds one slice at a time.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import jax
import ml_dtypes
import numpy as np
from jax.sharding import Mesh
from jax.typing import DTypeLike

from muse_jax.checkpoint.audit import NamedTensor
from muse_jax.checkpoint.formats import ExpertFormat
from muse_jax.checkpoint.header import NUMPY_DTYPES, TensorEntry
from muse_jax.checkpoint.load import layer_tensors
from muse_jax.checkpoint.names import EXPERT_WEIGHTS
from muse_jax.checkpoint.quantized import fnuz_scales, fnuz_values
from muse_jax.checkpoint.region import read_region
from muse_jax.checkpoint.stack import read_input_scale
from muse_jax.config import MuseConfig
from muse_jax.quantization.array import QuantizedArray
from muse_jax.sharding import HELD, BlockMesh, Index, expert_of_slot, held_shapes, place, scale_axes
from pallas_kernels.formats import Flavour
from pallas_kernels.target import current_target


def load_sharded_layer(
    path: str | Path,
    layer: int,
    mesh: Mesh | BlockMesh,
    config: MuseConfig | None = None,
    *,
    dtype: DTypeLike | None = None,
    flavour: Flavour | None = None,
) -> dict[str, jax.Array | QuantizedArray]:
    """The weights of one layer's MoE block, every device of the mesh its slice, in the shapes of `held_shapes`.

    gate_up and down of a quantized layer are each a `QuantizedArray` of that shape.

    Args:
      path: a checkpoint folder or a .safetensors file, which every process can read.
      layer: a layer with a MoE block.
      mesh: axes dp, ep and tp; another mesh's names through a `BlockMesh`.
      config: defaults to the config.json beside the tensors.
      dtype: of all but the router, which stays float32, and quantized experts; None keeps the file's.
      flavour: what FP8 codes are held as; None is what this machine's GPU multiplies, or e4m3fn.

    Raises what `load_layer` raises, before any tensor is read, and ValueError where the mesh does not fit.
    """
    mesh = mesh if isinstance(mesh, BlockMesh) else BlockMesh(mesh=mesh)
    tensors, form, config = layer_tensors(path, layer, config)
    mesh.check(config, form.scale_block[1] or 1)
    experts = expert_of_slot(config.num_experts, mesh.size("ep"))
    held: dict[str, jax.Array | QuantizedArray] = {}
    for name, shape in held_shapes(config, mesh).items():
        own = [(parsed, entry) for parsed, entry in tensors if parsed.weight == name]
        if name in EXPERT_WEIGHTS and form.scale_dtypes:
            held[name] = _quantized(name, own, form, shape, experts, mesh, flavour or local_flavour())
            continue
        stored = NUMPY_DTYPES[own[0][1].dtype]
        read = ExpertReader.of(name, own, experts).read if name in EXPERT_WEIGHTS else _whole_reader(own[0][1])
        held[name] = place(HELD[name], shape, stored if name.startswith("router_") else dtype or stored, mesh, read)
    return held


def local_flavour() -> Flavour:
    """The FP8 numbers that this machine's GPU multiplies; e4m3fn, which checkpoints hold, without one."""
    target = current_target()
    return "e4m3fnuz" if target is not None and target.fp8 == "e4m3fnuz" else "e4m3fn"


def _quantized(
    name: str,
    tensors: list[NamedTensor],
    form: ExpertFormat,
    shape: tuple[int, ...],
    experts: list[int | None],
    mesh: BlockMesh,
    flavour: Flavour,
) -> QuantizedArray:
    """gate_up or down, [S, 2, F, H] or [S, H, F], of a quantized layer."""
    parts = {part: [(parsed, entry) for parsed, entry in tensors if parsed.part == part] for part in form.parts}
    is_mxfp4, to_fnuz = form.name == "mxfp4", form.name != "mxfp4" and flavour == "e4m3fnuz"
    values = ExpertReader.of(name, parts["weight"], experts)
    scales = ExpertReader.of(name, parts["weight_scale"], experts, np.dtype(np.uint8 if is_mxfp4 else np.float32))
    *rows, columns = shape
    row_unit, column_unit = form.scale_block
    scale_shape = tuple(rows)
    if column_unit is not None:
        scale_shape = (*rows[:-1], rows[-1] // (row_unit or 1), columns // column_unit)
    input_scale = read_input_scale(name, parts["input_scale"]) if form.has_input_scale else None
    value_dtype = ml_dtypes.float8_e4m3fnuz if to_fnuz else values.dtype
    read_values = (lambda index: fnuz_values(values.read(index))) if to_fnuz else values.read
    read_scales = (lambda index: fnuz_scales(scales.read(index))) if to_fnuz else scales.read
    if input_scale is not None and to_fnuz:
        input_scale *= 2
    return QuantizedArray(
        values=place(HELD[name], (*rows, columns // form.in_per_weight), value_dtype, mesh, read_values),
        scales=place(scale_axes(name, column_unit is not None), scale_shape, scales.dtype, mesh, read_scales),
        format="mxfp4" if is_mxfp4 else "fp8",
        input_scale=None
        if input_scale is None
        else place((), (), np.float32, mesh, lambda _: np.asarray(input_scale, np.float32)),
    ).check()


@dataclass(frozen=True, kw_only=True)
class ExpertReader:
    """Reads slices of one held tensor of the experts, whatever its dtype and its axes after those of slot and half.

    halves: the number of projections that the tensor holds side by side (2 for gate_up, which then has an axis for
      them, 1 for down). expert_of: the expert in each slot. dtype: of what is read, to which a tensor of another dtype
      is cast. entry_of: (expert, half) -> the tensor and whether it is consolidated: the region of such a one starts
      with the expert and, for gate_up, is shifted by the half. A tensor of one number stands for all rows.
    """

    halves: int
    expert_of: list[int | None]
    dtype: np.dtype
    entry_of: Callable[[int, int], tuple[TensorEntry, bool]]

    @classmethod
    def of(
        cls, name: str, tensors: list[NamedTensor], expert_of: list[int | None], dtype: np.dtype | None = None
    ) -> ExpertReader:
        """The reader of `name` (gate_up or down) over the layer's tensors of that name and of one part.

        dtype defaults to that of the tensors.
        """
        projections = EXPERT_WEIGHTS[name]
        entries = {(parsed.expert, parsed.projection): entry for parsed, entry in tensors}

        def entry_of(expert: int, half: int) -> tuple[TensorEntry, bool]:
            consolidated = entries.get((None, None))
            return (consolidated, True) if consolidated else (entries[expert, projections[half]], False)

        dtype = dtype or NUMPY_DTYPES[tensors[0][1].dtype]
        return cls(halves=len(projections), expert_of=expert_of, dtype=dtype, entry_of=entry_of)

    def read(self, index: Index) -> np.ndarray:
        """held[index], for an index with a slice for every axis."""
        slots = self.expert_of[index[0]]
        halves = range(*index[1].indices(2)) if self.halves == 2 else (0,)
        rest = index[2:] if self.halves == 2 else index[1:]
        shape = (len(slots), len(halves), *(cut.stop - cut.start for cut in rest))
        out = np.zeros(shape, self.dtype)
        for slot, expert in enumerate(slots):
            for position, half in enumerate(halves):
                if expert is not None:
                    self._read_part(expert, half, rest, out[slot, position])
        return out if self.halves == 2 else out[:, 0]

    def _read_part(self, expert: int, half: int, rest: Index, out: np.ndarray) -> None:
        entry, is_consolidated = self.entry_of(expert, half)
        if is_consolidated:
            shift = half * (entry.shape[1] // self.halves)
            first = slice(shift + rest[0].start, shift + rest[0].stop)
            read_region(entry, (slice(expert, expert + 1), first, *rest[1:]), out[None])
            return
        is_one = entry.shape in ((), (1,))
        if not is_one and NUMPY_DTYPES[entry.dtype] == self.dtype:
            read_region(entry, rest, out)
            return
        region = tuple(slice(0, size) for size in entry.shape) if is_one else rest
        part = np.empty([cut.stop - cut.start for cut in region], NUMPY_DTYPES[entry.dtype])
        read_region(entry, region, part)
        out[...] = part.reshape(()) if is_one else part


def _whole_reader(entry: TensorEntry) -> Callable[[Index], np.ndarray]:
    def read(index: Index) -> np.ndarray:
        out = np.empty([cut.stop - cut.start for cut in index], NUMPY_DTYPES[entry.dtype])
        read_region(entry, index, out)
        return out

    return read
