"""The block over a mesh: one `jax.shard_map`, each device its slice of the experts and of the tokens.

    dp   a rank has T / dp tokens and does everything for them
    tp   a rank has F / tp of every expert: its rows are partial sums, and the norm is not linear, so
             rows = sum over tp of rows_r            [C, K, H], eight times the usual traffic, before the norm
    ep   a rank has E / ep whole experts: its rows are complete, routes to other ranks are left out, and
             combined = sum over ep of combined_r    [C, H]
Router, projections and norms are whole on every rank, so routing is the same on all and nothing else is sent. With ep
and tp both sums happen, in this order. Every rank enters every collective, whatever its routes. Source: spec e.
Quantized experts: each rank quantizes the columns that it has, to the codes of one device. A block of columns with one
scale lies on one rank; the scale of a whole FP8 row is found over tp (in vLLM each rank finds its own: spec f.1):
             largest = max over tp of max|activation_r|      [T, K], once a call, before any row travels
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jax import lax
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec
from jax.typing import DTypeLike
from jaxtyping import Array, Float

from muse_jax.block import before_experts, combine, normed_rows, project
from muse_jax.boundaries import BOUNDARIES
from muse_jax.checkpoint.names import EXPERT_WEIGHTS
from muse_jax.checkpoint.sharded import load_sharded_layer, local_flavour
from muse_jax.config import MuseConfig
from muse_jax.experts import down_rows, expert_activation, expert_rows
from muse_jax.quantization.array import Format, QuantizedArray
from muse_jax.quantization.fp8 import to_fnuz
from muse_jax.quantization.inputs import ActivationRule, check_rule, check_scales, finds_row_scales
from muse_jax.schedule import Chunk, Schedule
from muse_jax.sharding import (
    HELD,
    Axis,
    BlockMesh,
    columns_per_scale,
    experts_of_ranks,
    held_shapes,
    place_weights,
    scale_axes,
    weight_shape,
)
from pallas_kernels.dispatch import Implementation, resolve
from pallas_kernels.expert_gemm import wraps
from pallas_kernels.formats import round_to
from pallas_kernels.quantize import largest_magnitudes

Found = dict[str, Any]


class ShardedMoE(nnx.Module):
    """The block on a mesh: [..., D] in, [..., D] out, a drop-in for `MuseMoE` under `jax.jit`, `jax.grad` and nnx.

    x is split over dp along its first axis that dp divides; where there is none (7 tokens over dp=2) x is padded and
    the output is whole on every device. Parameters have the names of `load_layer` and the shapes of `held_shapes`.
    """

    def __init__(
        self,
        config: MuseConfig,
        held: Mapping[str, jax.Array | QuantizedArray],
        mesh: BlockMesh,
        *,
        schedule: Schedule | None = None,
        activation_rule: ActivationRule | None = None,
        implementation: Implementation | None = None,
    ):
        """Args:
        held: the layer's arrays as the mesh holds them, from `place_weights`, `load_sharded_layer` or `restore_layer`;
          codes of quantized experts become the parameter of their name, scales those of it and `_scales`,
          `_input_scale`.
        mesh: a mesh with its rules.
        schedule: reduce dtype and chunks; None for the defaults.
        activation_rule: how MXFP4 experts have their inputs quantized; None is "even".
        implementation: "pallas" (interpreted on a CPU, no gradient), "xla", or None for the best here.
        """
        mesh.check(config, columns_per_scale(held["down"]))
        resolve(implementation)
        for name, shape in held_shapes(config, mesh).items():
            if weight_shape(held[name]) != shape:
                raise ValueError(f"held[{name!r}] is {weight_shape(held[name])}; expected {shape}")
        formats: list[Format | None] = [_format(held[name]) for name in EXPERT_WEIGHTS]
        if formats[0] != formats[1]:
            words = " and ".join(form or "unquantized" for form in formats)
            raise ValueError(f"gate_up and down are {words}; expected one format")
        check_rule(activation_rule, held["down"])
        for name in EXPERT_WEIGHTS:
            check_scales(name, held[name], jnp.result_type(held["pre_expert_proj"]), implementation)
        self.config = config
        self.mesh = mesh
        self.schedule = schedule or Schedule()
        self.activation_rule: ActivationRule | None = activation_rule
        self.implementation: Implementation | None = implementation
        self.format: Format | None = formats[0]
        for name in HELD:
            value = held[name]
            if isinstance(value, QuantizedArray):
                value = _held(name, value, mesh)
                setattr(self, f"{name}_scales", nnx.Param(value.scales))
                if value.input_scale is not None:
                    setattr(self, f"{name}_input_scale", nnx.Param(value.input_scale))
                value = value.values
            setattr(self, name, nnx.Param(value))

    @classmethod
    def from_weights(
        cls,
        config: MuseConfig,
        weights: Mapping[str, Any],
        mesh: Mesh | BlockMesh,
        *,
        dtype: DTypeLike = jnp.bfloat16,
        schedule: Schedule | None = None,
        activation_rule: ActivationRule | None = None,
        implementation: Implementation | None = None,
    ) -> ShardedMoE:
        """A block of whole arrays (`load_layer`, or `MuseMoE.weights()`), cast to `dtype` but for the router.

        Quantized experts keep their codes; on a chip whose FP8 is E4M3FNUZ they are converted.
        Raises ValueError where a name is missing, a shape is not the configuration's, or the mesh does not fit.
        """
        mesh = mesh if isinstance(mesh, BlockMesh) else BlockMesh(mesh=mesh)
        held = place_weights(weights, config, mesh, dtype)
        if local_flavour() == "e4m3fnuz":
            held = {
                name: to_fnuz(value) if isinstance(value, QuantizedArray) and value.format == "fp8" else value
                for name, value in held.items()
            }
        return cls(
            config, held, mesh, schedule=schedule, activation_rule=activation_rule, implementation=implementation
        )

    @classmethod
    def from_checkpoint(
        cls,
        path: str | Path,
        layer: int,
        mesh: Mesh | BlockMesh,
        *,
        dtype: DTypeLike = jnp.bfloat16,
        schedule: Schedule | None = None,
        activation_rule: ActivationRule | None = None,
        implementation: Implementation | None = None,
    ) -> ShardedMoE:
        """A layer of a checkpoint, each device's slice read by itself; errors as `load_sharded_layer`."""
        mesh = mesh if isinstance(mesh, BlockMesh) else BlockMesh(mesh=mesh)
        config = MuseConfig.from_checkpoint(path)
        held = load_sharded_layer(path, layer, mesh, config, dtype=dtype)
        return cls(
            config, held, mesh, schedule=schedule, activation_rule=activation_rule, implementation=implementation
        )

    def weights(self) -> dict[str, jax.Array | QuantizedArray]:
        """The parameters as the mesh holds them."""
        found: dict[str, jax.Array | QuantizedArray] = {name: getattr(self, name)[...] for name in HELD}
        if self.format is not None:
            for name in EXPERT_WEIGHTS:
                scale = getattr(self, f"{name}_input_scale", None)
                found[name] = QuantizedArray(
                    values=found[name],
                    scales=getattr(self, f"{name}_scales")[...],
                    format=self.format,
                    input_scale=None if scale is None else scale[...],
                )
        return found

    def __call__(self, x: Float[Array, "*batch D"]) -> Float[Array, "*batch D"]:
        """The block's output for x, whose dtype must be that of the parameters."""
        return _run(self.weights(), x, self._settings(), ("out",))["out"]

    def boundaries(self, x: Float[Array, "T D"]) -> Found:
        """Every boundary of the block by name, whole again over ep and tp.

        `expert_rows` is the sum that the norm reads, so it has the reduce dtype where tp is above 1; activations and
        rows are computed beside those that `combined` and `out` come from.
        """
        return _run(self.weights(), x, self._settings(), BOUNDARIES)

    def _settings(self) -> _Settings:
        return _Settings(
            config=self.config,
            mesh=self.mesh,
            schedule=self.schedule,
            activation_rule=self.activation_rule,
            implementation=self.implementation,
        )


def _format(weight: jax.Array | QuantizedArray) -> Format | None:
    return weight.format if isinstance(weight, QuantizedArray) else None


def _held(name: str, weight: QuantizedArray, mesh: BlockMesh) -> QuantizedArray:
    """The weight as kernels read it, each device's own part made there where that differs."""
    spec = _spec(name, weight, mesh)
    shard = mesh.sharding(*HELD[name]).shard_shape(weight.values.shape)
    own = jax.ShapeDtypeStruct(shard, weight.values.dtype)
    if own.dtype == jnp.uint16 or (weight.format == "fp8" and not wraps(own)):
        return weight
    return jax.jit(jax.shard_map(QuantizedArray.held, mesh=mesh.mesh, in_specs=(spec,), out_specs=spec))(weight)


@dataclass(frozen=True, kw_only=True)
class _Settings:
    """What is known when the block is traced."""

    config: MuseConfig
    mesh: BlockMesh
    schedule: Schedule
    activation_rule: ActivationRule | None
    implementation: Implementation | None


@functools.partial(jax.jit, static_argnames=("settings", "names"))
def _run(weights: Found, x: jax.Array, settings: _Settings, names: tuple[str, ...]) -> Found:
    """The boundaries `names` of x [..., D]."""
    mesh = settings.mesh
    batch = x.shape[:-1]
    split = next((axis for axis, size in enumerate(batch) if size % mesh.size("dp") == 0), None)
    x_axes: list[Axis | None] = ["dp" if axis == split else None for axis in range(x.ndim)]
    x_spec = mesh.spec(*x_axes)
    if mesh.has_explicit_axes:
        x = jax.reshard(x, NamedSharding(mesh.mesh, _explicit_part(x_spec, mesh.mesh)))
    tokens: Axis | None = None if split is None else "dp"
    out_specs = {name: mesh.spec(tokens, None, "tp") if name == "activation" else mesh.spec(tokens) for name in names}
    if names == ("out",):
        out_specs = {"out": x_spec}
    body = functools.partial(_own_part, settings=settings, names=names, is_split=split is not None)
    in_specs = ({name: _spec(name, value, mesh) for name, value in weights.items()}, x_spec)
    return jax.shard_map(body, mesh=mesh.mesh, in_specs=in_specs, out_specs=out_specs, check_vma=True)(weights, x)


def _own_part(weights: Found, x: jax.Array, *, settings: _Settings, names: tuple[str, ...], is_split: bool) -> Found:
    """What one device computes: x is its own tokens, or all of them where dp does not divide any axis."""
    mesh = settings.mesh
    batch = x.shape[:-1]
    tokens = x.reshape(-1, x.shape[-1])
    given = tokens.shape[0]
    is_token = None
    if not is_split:
        tokens, is_token = _own_of_padded(tokens, mesh)
    # Rows F of gate and F of up lie one after the other on a device, as the experts want them.
    weights = weights | {"gate_up": _halves_joined(weights["gate_up"])}

    found = before_experts(weights, tokens, settings.config, implementation=settings.implementation)
    local_ids = _local_ids(found["topk_ids"], is_token, settings)
    found["combined"] = _combined(weights, found, local_ids, settings)
    found["out"] = project(weights, found["combined"], implementation=settings.implementation)
    if "expert_rows" in names:
        found |= _whole_rows(weights, found, local_ids, settings)

    if not is_split:
        found = {name: _gather(found[name], mesh.dp)[:given] for name in names}
    if names == ("out",):
        return {"out": found["out"].reshape(*batch, x.shape[-1])}
    return {name: found[name] for name in names}


def _spec(name: str, value: jax.Array | QuantizedArray, mesh: BlockMesh) -> PartitionSpec | QuantizedArray:
    if not isinstance(value, QuantizedArray):
        return mesh.spec(*HELD[name])
    return QuantizedArray(
        values=mesh.spec(*HELD[name]),
        scales=mesh.spec(*scale_axes(name, columns_per_scale(value) > 1)),
        format=value.format,
        input_scale=None if value.input_scale is None else mesh.spec(),
    )


def _halves_joined(gate_up: jax.Array | QuantizedArray) -> jax.Array | QuantizedArray:
    """[S, 2, rows, ...] as [S, 2 * rows, ...], of scales too."""
    join = lambda array: array.reshape(array.shape[0], -1, *array.shape[3:])
    if not isinstance(gate_up, QuantizedArray):
        return join(gate_up)
    return dataclasses.replace(gate_up, values=join(gate_up.values), scales=join(gate_up.scales))


def _own_of_padded(tokens: jax.Array, mesh: BlockMesh) -> tuple[jax.Array, jax.Array]:
    """(this dp rank's share of the tokens padded to a multiple of dp, which of them are tokens)."""
    ranks = mesh.size("dp")
    own = -(-tokens.shape[0] // ranks)
    first = lax.axis_index(mesh.dp) * own
    padded = jnp.pad(tokens, ((0, own * ranks - tokens.shape[0]), (0, 0)))
    return lax.dynamic_slice_in_dim(padded, first, own), first + jnp.arange(own) < tokens.shape[0]


def _local_ids(topk_ids: jax.Array, is_token: jax.Array | None, settings: _Settings) -> jax.Array:
    """The slot of each route's expert on this device, -1 for an expert of another rank and for a row of padding."""
    mesh = settings.mesh
    ids = topk_ids
    if mesh.ep:
        ranks = experts_of_ranks(settings.config.num_experts, mesh.size("ep"))
        rank = lax.axis_index(mesh.ep)
        first = jnp.array([experts.start for experts in ranks], jnp.int32)[rank]
        end = jnp.array([experts.stop for experts in ranks], jnp.int32)[rank]
        ids = jnp.where((ids >= first) & (ids < end), ids - first, -1)
    if is_token is not None:
        ids = jnp.where(is_token[:, None], ids, -1)
    return ids


def _combined(weights: Found, found: Found, local_ids: jax.Array, settings: _Settings) -> jax.Array:
    """The boundary combined, the same on every rank of ep and tp.

    Three chunks are under way in a step: one is finished, the rows of the next are summed over tp, those of the one
    after are computed. Nothing in a step needs that sum, so it can take as long as the GEMM. Two chunks of rows are
    alive at a time.
    """
    config = settings.config
    inputs, topk_weights = found["expert_input"], found["topk_weights"]
    chunks = settings.schedule.chunks(
        local_ids.shape[0], config.routes_per_token * config.latent_width, settings.mesh.size("tp")
    )
    if len(chunks) == 1:
        _, rows = _partial_rows(weights, inputs, local_ids, settings)
        return _finalize(weights, rows, topk_weights, local_ids, chunks[0], settings)

    # The first GEMM takes all tokens at once and so reads its weights once; its output is 1 / tp as wide as F.
    options = _expert_options(settings)
    activation = expert_activation(inputs, local_ids, weights["gate_up"], **options)
    largest = _largest_over_tp(weights, activation, settings)
    size, whole = chunks[0].tokens, [chunk for chunk in chunks if chunk == chunks[0]]

    def cut(number: int) -> slice:
        return slice(number * size, number * size + chunks[number].tokens)

    def multiply(activation: jax.Array, ids: jax.Array, largest: jax.Array | None) -> jax.Array:
        return down_rows(activation, ids, weights["down"], largest=largest, **options)

    def multiply_chunk(number: int) -> jax.Array:
        return multiply(*jax.tree.map(lambda value: value[cut(number)], (activation, local_ids, largest)))

    def finish_chunk(sums: jax.Array, number: int) -> jax.Array:
        return _finish(weights, sums, topk_weights[cut(number)], local_ids[cut(number)], chunks[number], settings)

    def step(carry: tuple[jax.Array, ...], chunk: tuple[Any, ...]) -> tuple[tuple[jax.Array, ...], jax.Array]:
        sums, rows = carry
        first_weights, first_ids, third = chunk
        done = _finish(weights, sums, first_weights, first_ids, chunks[0], settings)
        return (_sum_over_tp(rows, chunks[0], settings), multiply(*third)), done

    parts = []
    sums, rows = _sum_over_tp(multiply_chunk(0), chunks[0], settings), multiply_chunk(1)
    if len(whole) > 2:
        stacked = jax.tree.map(
            lambda value: value[: len(whole) * size].reshape(len(whole), size, *value.shape[1:]),
            (topk_weights, local_ids, (activation, local_ids, largest)),
        )
        own_weights, ids, read = stacked
        third = jax.tree.map(lambda value: value[2:], read)
        (sums, rows), done = lax.scan(step, (sums, rows), (own_weights[:-2], ids[:-2], third))
        parts.append(done.reshape(-1, done.shape[2]))
    # What the loop leaves under way, and the rest, whose size may be another: the same steps one by one.
    last = len(chunks) - 1
    for number in range(max(0, len(whole) - 2), last):
        next_sums = _sum_over_tp(rows, chunks[number + 1], settings)
        next_rows = multiply_chunk(number + 2) if number + 2 <= last else rows
        parts.append(finish_chunk(sums, number))
        sums, rows = next_sums, next_rows
    parts.append(finish_chunk(sums, last))
    return jnp.concatenate(parts)


def _partial_rows(
    weights: Found, inputs: jax.Array, local_ids: jax.Array, settings: _Settings
) -> tuple[jax.Array, jax.Array]:
    """(activation, expert_rows) of this rank: its columns of the first, its part of the sum of the second."""
    gate_up, down, options = weights["gate_up"], weights["down"], _expert_options(settings)
    if not (settings.mesh.tp and finds_row_scales(down)):
        return expert_rows(inputs, local_ids, gate_up, down, **options)
    activation = expert_activation(inputs, local_ids, gate_up, **options)
    largest = _largest_over_tp(weights, activation, settings)
    return activation, down_rows(activation, local_ids, down, largest=largest, **options)


def _expert_options(settings: _Settings) -> dict[str, Any]:
    return {
        "spread_over": settings.config.num_experts,
        "activation_rule": settings.activation_rule,
        "implementation": settings.implementation,
    }


def _largest_over_tp(weights: Found, activation: jax.Array, settings: _Settings) -> jax.Array | None:
    """The largest magnitude of each route's whole activation [T, K]; None where down's inputs need none."""
    mesh = settings.mesh
    if not (mesh.tp and finds_row_scales(weights["down"])):
        return None
    return lax.pmax(largest_magnitudes(activation), mesh.tp)


def _finalize(
    weights: Found, rows: jax.Array, topk_weights: jax.Array, ids: jax.Array, chunk: Chunk, settings: _Settings
) -> jax.Array:
    """combined of one chunk from the partial rows of this rank."""
    return _finish(weights, _sum_over_tp(rows, chunk, settings), topk_weights, ids, chunk, settings)


def _sum_over_tp(rows: jax.Array, chunk: Chunk, settings: _Settings) -> jax.Array:
    """A chunk's rows, summed over tp: all of them, or where they are scattered this rank's share of the tokens."""
    mesh, reduce_dtype = settings.mesh, settings.schedule.reduce_dtype
    if chunk.scatter:
        rows = _pad_tokens(rows, chunk, mesh)
        return lax.psum_scatter(_cast(rows, reduce_dtype), mesh.tp, scatter_dimension=0, tiled=True)
    return lax.psum(_cast(rows, reduce_dtype), mesh.tp) if mesh.tp else rows


def _finish(
    weights: Found, rows: jax.Array, topk_weights: jax.Array, ids: jax.Array, chunk: Chunk, settings: _Settings
) -> jax.Array:
    """combined of one chunk from the rows of `_sum_over_tp`: norm and weights, sum over ep, every token again."""
    mesh, reduce_dtype = settings.mesh, settings.schedule.reduce_dtype
    dtype = weights["post_expert_norm"].dtype
    if chunk.scatter:
        first = lax.axis_index(mesh.tp) * rows.shape[0]
        topk_weights, ids = (
            lax.dynamic_slice_in_dim(_pad_tokens(value, chunk, mesh, fill), first, rows.shape[0])
            for value, fill in ((topk_weights, 0), (ids, -1))
        )
    combined = combine(
        weights,
        rows,
        topk_weights,
        ids,
        settings.config,
        out_dtype=dtype,
        implementation=settings.implementation,
    )
    if mesh.ep:
        combined = _cast(lax.psum(_cast(combined, reduce_dtype), mesh.ep), dtype)
    return _gather(combined, mesh.tp)[: chunk.tokens] if chunk.scatter else combined


def _pad_tokens(value: jax.Array, chunk: Chunk, mesh: BlockMesh, fill: int = 0) -> jax.Array:
    """value [C, ...] of a chunk with rows of `fill` after it, so that tp divides its tokens."""
    padding = -chunk.tokens % mesh.size("tp")
    return jnp.pad(value, ((0, padding), *[(0, 0)] * (value.ndim - 1)), constant_values=fill)


def _whole_rows(weights: Found, found: Found, local_ids: jax.Array, settings: _Settings) -> Found:
    """activation (this tp rank's columns), expert_rows and normed_rows, whole over ep."""
    mesh = settings.mesh
    activation, rows = _partial_rows(weights, found["expert_input"], local_ids, settings)
    is_mine = (local_ids >= 0)[:, :, None]
    activation, rows = (jnp.where(is_mine, value, jnp.zeros_like(value)) for value in (activation, rows))
    if mesh.ep:
        # One rank has the route and the others add zeros, so these sums are exact in any dtype.
        activation, rows = lax.psum(activation, mesh.ep), lax.psum(rows, mesh.ep)
    if mesh.tp:
        rows = lax.psum(_cast(rows, settings.schedule.reduce_dtype), mesh.tp)
    return {
        "activation": activation,
        "expert_rows": rows,
        "normed_rows": normed_rows(weights, rows, settings.config),
    }


def _cast(value: jax.Array, dtype: DTypeLike) -> jax.Array:
    """value rounded once to `dtype`."""
    dtype = jnp.dtype(dtype)
    return round_to(value.astype(jnp.float32), dtype).astype(dtype)


def _gather(value: jax.Array, axes: tuple[str, ...]) -> jax.Array:
    """The ranks' rows one after the other, the same on all of them."""
    return lax.all_gather(value, axes, axis=0, tiled=True, to="invarying")


def _explicit_part(spec: PartitionSpec, mesh: Mesh) -> PartitionSpec:
    """The spec without Auto axes, which no type can carry."""
    explicit = {name for name, kind in zip(mesh.axis_names, mesh.axis_types, strict=True) if kind == AxisType.Explicit}
    names_of = ((names,) if isinstance(names, str) else names or () for names in spec)
    return PartitionSpec(*(names if names and explicit.issuperset(names) else None for names in names_of))
