"""One layer's weights from a checkpoint's files straight onto a mesh: each process reads the slices of its devices.

A slice of a held tensor (`muse_jax.sharding`) is read part by part, one part for each slot and half:
    gate_up[slot, half, F, H]   experts.gate_up_proj[e, half * F :][F, H]   or experts.{e}.gate_proj | up_proj [F, H]
    down[slot, H, F]            experts.down_proj[e, H, F]                  or experts.{e}.down_proj [H, F]
with e the expert of the slot; a slot without one stays zero. Host memory holds one slice at a time.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import jax
import numpy as np
from jax.sharding import Mesh
from jax.typing import DTypeLike

from muse_jax.checkpoint.audit import NamedTensor
from muse_jax.checkpoint.header import NUMPY_DTYPES, TensorEntry
from muse_jax.checkpoint.load import layer_tensors
from muse_jax.checkpoint.names import EXPERT_WEIGHTS
from muse_jax.checkpoint.region import read_region
from muse_jax.config import MuseConfig
from muse_jax.sharding import BlockMesh, Index, expert_of_slot, held_shapes, place


def load_sharded_layer(
    path: str | Path,
    layer: int,
    mesh: Mesh | BlockMesh,
    config: MuseConfig | None = None,
    *,
    dtype: DTypeLike | None = None,
) -> dict[str, jax.Array]:
    """The weights of one layer's MoE block, every device of the mesh its slice, in the shapes of `held_shapes`.

    Args:
      path: a checkpoint folder or a .safetensors file, which every process can read.
      layer: a layer with a MoE block.
      mesh: axes dp, ep and tp; another mesh's names through a `BlockMesh`.
      config: defaults to the config.json beside the tensors.
      dtype: of all but the router, which stays float32; None keeps the file's.

    Raises what `load_layer` raises, before any tensor is read, and ValueError where the mesh does not fit.
    """
    mesh = mesh if isinstance(mesh, BlockMesh) else BlockMesh(mesh=mesh)
    tensors, config = layer_tensors(path, layer, config)
    mesh.check(config)
    experts = expert_of_slot(config.num_experts, mesh.size("ep"))
    held = {}
    for name, shape in held_shapes(config, mesh).items():
        own = [(parsed, entry) for parsed, entry in tensors if parsed.weight == name]
        stored = NUMPY_DTYPES[own[0][1].dtype]
        read = ExpertReader.of(name, own, experts).read if name in EXPERT_WEIGHTS else _whole_reader(own[0][1])
        held[name] = place(name, shape, stored if name.startswith("router_") else dtype or stored, mesh, read)
    return held


@dataclass(frozen=True, kw_only=True)
class ExpertReader:
    """Reads slices of one held tensor of the experts, whatever its dtype and its axes after those of slot and half.

    halves: the number of projections that the tensor holds side by side (2 for gate_up, which then has an axis for
      them, 1 for down). expert_of: the expert in each slot. entry_of: (expert, half) -> the tensor and its first axes:
      the region of a consolidated tensor starts with the expert and, for gate_up, is shifted by the half.
    """

    halves: int
    expert_of: list[int | None]
    dtype: np.dtype
    entry_of: Callable[[int, int], tuple[TensorEntry, bool]]

    @classmethod
    def of(cls, name: str, tensors: list[NamedTensor], expert_of: list[int | None]) -> ExpertReader:
        """The reader of `name` (gate_up or down) over the layer's tensors of that name and of one part."""
        projections = EXPERT_WEIGHTS[name]
        entries = {(parsed.expert, parsed.projection): entry for parsed, entry in tensors}

        def entry_of(expert: int, half: int) -> tuple[TensorEntry, bool]:
            consolidated = entries.get((None, None))
            return (consolidated, True) if consolidated else (entries[expert, projections[half]], False)

        dtype = NUMPY_DTYPES[tensors[0][1].dtype]
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
        if not is_consolidated:
            read_region(entry, rest, out)
            return
        shift = half * (entry.shape[1] // self.halves)
        first = slice(shift + rest[0].start, shift + rest[0].stop)
        read_region(entry, (slice(expert, expert + 1), first, *rest[1:]), out[None])


def _whole_reader(entry: TensorEntry) -> Callable[[Index], np.ndarray]:
    def read(index: Index) -> np.ndarray:
        out = np.empty([cut.stop - cut.start for cut in index], NUMPY_DTYPES[entry.dtype])
        read_region(entry, index, out)
        return out

    return read
