"""Who holds what: mesh axes, one PartitionSpec per tensor of the block, and the slices of a whole tensor.

    dp  tokens          ep  experts          tp  expert width F
    router, projections, norms    whole on every device
    gate_up [E, 2F, H]    held as [S, 2, F, H]:    slots S over ep, F over tp (the same F of gate and up on one device)
    down    [E, H, F]     held as [S, H, F]:       slots S over ep, F over tp
    their scales, where they are quantized         split as the weight's rows and blocks of columns are
Experts are placed in order. Where ep does not divide E the first E % ep ranks hold one expert more: every rank has
ceil(E / ep) slots, and the last slot of the others is zeros that no route reaches.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal, get_args

import jax
import numpy as np
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec
from jax.typing import DTypeLike

from muse_jax.checkpoint.names import EXPERT_WEIGHTS, weight_shapes
from muse_jax.checkpoint.quantized import QuantizedWeight
from muse_jax.config import MuseConfig
from muse_jax.quantization.array import QuantizedArray
from pallas_kernels.formats import FP8_BLOCK, MX_BLOCK

Axis = Literal["dp", "ep", "tp"]
Rules = Mapping[str, str | tuple[str, ...] | None]
Index = tuple[slice, ...]

# Of every tensor as it is held: which axis each dimension is split over.
HELD: dict[str, tuple[Axis | None, ...]] = {
    "router_weight": (None, None),  # [E, D]
    "router_bias": (None,),  # [E]
    "pre_expert_proj": (None, None),  # [H, D]
    "pre_expert_norm": (None,),  # [H]
    "gate_up": ("ep", None, "tp", None),  # [S, 2, F, H]
    "down": ("ep", None, "tp"),  # [S, H, F]
    "post_expert_norm": (None,),  # [H]
    "post_expert_proj": (None, None),  # [D, H]
}


def scale_axes(name: str, has_block_scales: bool) -> tuple[Axis | None, ...]:
    """As HELD, of the scales of a quantized gate_up or down.

    A scale of a block lies where the block does; a scale of a whole row has no axis of columns, so that those of down,
    whose columns are split over tp, are whole on every rank of tp.
    """
    return HELD[name] if has_block_scales else HELD[name][:-1]


@dataclass(frozen=True, kw_only=True)
class BlockMesh:
    """A mesh, and which of its axes are dp, ep and tp.

    mesh: axes may be Explicit or Auto; those that no rule names hold copies of everything.
    rules: "dp", "ep" or "tp" -> the mesh's own name for it, several names (the first varies slowest), or None for not
      at all. An axis without a rule is the mesh axis of the same name, if there is one.

    Raises ValueError for a rule of no such axis, a name that the mesh does not have or that serves twice, and a mesh
    none of whose axes is used.
    """

    mesh: Mesh
    rules: Rules = field(default_factory=dict, hash=False, compare=False)
    dp: tuple[str, ...] = field(init=False)
    ep: tuple[str, ...] = field(init=False)
    tp: tuple[str, ...] = field(init=False)

    def __post_init__(self) -> None:
        unknown = [axis for axis in self.rules if axis not in get_args(Axis)]
        if unknown:
            raise ValueError(f"rules name {', '.join(map(repr, unknown))}; expected {', '.join(get_args(Axis))}")
        taken: dict[str, str] = {}
        for axis in get_args(Axis):
            rule = self.rules.get(axis, axis if axis in self.mesh.axis_names else None)
            names = () if rule is None else (rule,) if isinstance(rule, str) else tuple(rule)
            for name in names:
                if name not in self.mesh.axis_names:
                    raise ValueError(f"rules place {axis} on {name!r}; the mesh has {', '.join(self.mesh.axis_names)}")
                if name in taken:
                    raise ValueError(f"rules place both {taken[name]} and {axis} on {name!r}; each needs an own axis")
                taken[name] = axis
            # Nothing varies over an axis of one device, and no collective is wanted there.
            object.__setattr__(self, axis, tuple(name for name in names if self.mesh.shape[name] > 1))
        if not taken:
            raise ValueError(
                f"the mesh has {', '.join(self.mesh.axis_names)}; expected at least one of dp, ep, tp, "
                "or rules such as {'tp': '" + self.mesh.axis_names[0] + "'}"
            )

    def size(self, axis: Axis) -> int:
        """Devices along dp, ep or tp; 1 where the mesh does not have it."""
        return math.prod(self.mesh.shape[name] for name in getattr(self, axis))

    def spec(self, *axes: Axis | None) -> PartitionSpec:
        """The PartitionSpec of an array whose dimensions are split over `axes`."""
        return PartitionSpec(*((getattr(self, axis) or None) if axis else None for axis in axes))

    def sharding(self, *axes: Axis | None) -> NamedSharding:
        """The sharding of an array whose dimensions are split over `axes`."""
        return NamedSharding(self.mesh, self.spec(*axes))

    @property
    def has_explicit_axes(self) -> bool:
        """Whether arrays of this mesh carry their sharding in their type."""
        return AxisType.Explicit in self.mesh.axis_types

    def check(self, config: MuseConfig, quantization_block: int = 1) -> None:
        """Raises ValueError where ep or tp cannot share out the experts, naming the sizes that could.

        quantization_block: columns of the expert width that must stay on one device; 1 for unquantized weights.
        """
        problem = why_not_shared_out(
            config.num_experts,
            config.expert_width,
            ep=self.size("ep"),
            tp=self.size("tp"),
            quantization_block=quantization_block,
        )
        if problem is not None:
            raise ValueError(problem)


def why_not_shared_out(
    num_experts: int, expert_width: int, *, ep: int, tp: int, quantization_block: int = 1
) -> str | None:
    """Why ep and tp cannot share out the experts, with the sizes that could; None where they can.

    quantization_block: as for `BlockMesh.check`.
    """
    where = f"the block has E={num_experts} experts of width F={expert_width}"
    if ep > num_experts:
        return f"ep is {ep} and {where}; ep can be 1 to {num_experts}"
    if expert_width % (tp * quantization_block) == 0:
        return None
    unit = f", in quantization blocks of {quantization_block}" if quantization_block > 1 else ""
    blocks, rest = divmod(expert_width, quantization_block)
    if rest:
        return f"tp is {tp} and {where}{unit}; F can be a multiple of {quantization_block}"
    possible = [str(size) for size in range(1, blocks + 1) if blocks % size == 0]
    return f"tp is {tp} and {where}{unit}; tp can be {', '.join(possible)}"


def columns_per_scale(weight: Any) -> int:
    """Columns of a weight that share a scale and must stay on one device; 1 where a row has one, or none is."""
    if not isinstance(weight, QuantizedWeight | QuantizedArray):
        return 1
    if weight.format == "mxfp4":
        return MX_BLOCK
    return FP8_BLOCK if weight.has_block_scales else 1


def weight_shape(weight: Any) -> tuple[int, ...]:
    """The shape of a weight, with the experts that have scales where it is quantized: kernels may hold more codes."""
    return (weight.scales.shape[0], *weight.shape[1:]) if isinstance(weight, QuantizedArray) else tuple(weight.shape)


def experts_of_ranks(num_experts: int, ranks: int) -> list[range]:
    """The experts of every rank of ep."""
    share, more = divmod(num_experts, ranks)
    first = [rank * share + min(rank, more) for rank in range(ranks + 1)]
    return [range(*ends) for ends in itertools.pairwise(first)]


def expert_of_slot(num_experts: int, ranks: int) -> list[int | None]:
    """The expert in each of the ranks * ceil(E / ranks) slots, None for one that is not used."""
    slots = -(-num_experts // ranks)
    return [
        expert
        for experts in experts_of_ranks(num_experts, ranks)
        for expert in [*experts, *[None] * (slots - len(experts))]
    ]


def held_shapes(config: MuseConfig, mesh: BlockMesh) -> dict[str, tuple[int, ...]]:
    """The global shape of every tensor as it is held."""
    slots = len(expert_of_slot(config.num_experts, mesh.size("ep")))
    H, F = config.latent_width, config.expert_width
    return weight_shapes(config) | {"gate_up": (slots, 2, F, H), "down": (slots, H, F)}


def place_weights(
    weights: Mapping[str, Any], config: MuseConfig, mesh: BlockMesh, dtype: DTypeLike
) -> dict[str, jax.Array | QuantizedArray]:
    """A layer's whole arrays, by the names of `load_layer`, as arrays that each device of the mesh holds its slice of.

    All but the router and quantized experts are cast to `dtype`. Every process of a run must be given the same weights;
    nothing is sent.
    Raises ValueError where a name is missing, a shape is not the configuration's, or the mesh does not fit.
    """
    for name, shape in weight_shapes(config).items():
        if name not in weights:
            raise ValueError(f"weights has no {name!r}; expected {', '.join(HELD)}")
        if weight_shape(weights[name]) != shape:
            raise ValueError(f"weights[{name!r}] is {weight_shape(weights[name])}; expected {shape}")
    mesh.check(config, max(columns_per_scale(weights[name]) for name in EXPERT_WEIGHTS))
    experts = expert_of_slot(config.num_experts, mesh.size("ep"))
    placed: dict[str, jax.Array | QuantizedArray] = {}
    for name, shape in held_shapes(config, mesh).items():
        whole = weights[name]
        if isinstance(whole, QuantizedWeight | QuantizedArray):
            placed[name] = _place_quantized(name, whole, mesh, experts)
            continue
        whole = np.asarray(whole)
        if name in EXPERT_WEIGHTS:
            read = _slots_reader(whole.reshape(len(whole), *shape[1:]), experts)
        else:
            read = whole.__getitem__
        placed[name] = place(HELD[name], shape, np.float32 if name.startswith("router_") else dtype, mesh, read)
    return placed


def _place_quantized(
    name: str, whole: QuantizedWeight | QuantizedArray, mesh: BlockMesh, experts: list[int | None]
) -> QuantizedArray:
    def split(array: Any, axes: tuple[Axis | None, ...]) -> jax.Array:
        array = np.asarray(array)
        # gate_up's rows, or its blocks of rows, are those of gate and then those of up.
        rows = array.reshape(len(array), 2, -1, *array.shape[2:]) if name == "gate_up" else array
        return place(axes, (len(experts), *rows.shape[1:]), array.dtype, mesh, _slots_reader(rows, experts))

    scale = None if whole.input_scale is None else np.float32(whole.input_scale)
    return QuantizedArray(
        values=split(whole.values, HELD[name]),
        scales=split(whole.scales, scale_axes(name, columns_per_scale(whole) > 1)),
        format=whole.format,
        input_scale=None if scale is None else place((), (), np.float32, mesh, lambda index: np.asarray(scale)),
    )


def place(
    axes: tuple[Axis | None, ...],
    shape: tuple[int, ...],
    dtype: DTypeLike,
    mesh: BlockMesh,
    read: Callable[[Index], np.ndarray],
) -> jax.Array:
    """A tensor split over `axes`, each slice read once, cast, sent to its devices and dropped before the next is
    read.
    """
    sharding = mesh.sharding(*axes)
    devices_of: dict[tuple[tuple[int, int], ...], list[Any]] = {}
    for device, index in sharding.addressable_devices_indices_map(shape).items():
        bounds = tuple(cut.indices(size)[:2] for cut, size in zip(index or (), shape, strict=True))
        devices_of.setdefault(bounds, []).append(device)
    parts = []
    for bounds, devices in devices_of.items():
        parts += _send(read(tuple(slice(*ends) for ends in bounds)).astype(dtype, copy=False), devices)
    return jax.make_array_from_single_device_arrays(shape, sharding, parts, dtype=np.dtype(dtype))


def _send(piece: np.ndarray, devices: list[Any]) -> list[jax.Array]:
    """The piece on every device, once it is there: the caller's memory is free again."""
    return jax.block_until_ready([jax.device_put(piece, device) for device in devices])


def whole_weight(name: str, held: Any, config: MuseConfig, mesh: BlockMesh) -> np.ndarray:
    """The whole tensor, in the shape of `load_layer`, of a held one (or of its gradient) that this process can read."""
    held = np.asarray(held)
    if name not in ("gate_up", "down"):
        return held
    slots = enumerate(expert_of_slot(config.num_experts, mesh.size("ep")))
    return held[[slot for slot, expert in slots if expert is not None]].reshape(weight_shapes(config)[name])


def _slots_reader(experts: np.ndarray, expert_of: list[int | None]) -> Callable[[Index], np.ndarray]:
    def read(index: Index) -> np.ndarray:
        wanted = expert_of[index[0]]
        rest = index[1:]
        kept = [expert for expert in wanted if expert is not None]
        part = experts[(slice(kept[0], kept[-1] + 1), *rest)]
        if len(kept) == len(wanted):
            return part
        unused = np.zeros((len(wanted) - len(kept), *part.shape[1:]), part.dtype)
        return np.concatenate([part, unused])

    return read
