"""The audit of one layer's tensors: each one that the MoE block needs, exactly once, with its shape and dtype.

expected = 6 whole tensors + gate_up and down, each whole or as one tensor an expert and projection (x its scale)
faults   = missing | duplicate (whole and per expert at once) | stray | wrong shape | wrong dtype
conflict = the format that the tensors have is not the one that config.json's quantization_config gives the layer
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass

from muse_jax.checkpoint.conflict import find_conflict
from muse_jax.checkpoint.formats import ExpertFormat, FoundFormat, find_format
from muse_jax.checkpoint.header import TensorEntry
from muse_jax.checkpoint.names import (
    DENSE_NAMES,
    EXPERT_WEIGHTS,
    ROUTER_WEIGHTS,
    WHOLE_NAMES,
    MlpName,
    expert_rest,
    full_name,
    name_list,
    parse,
    projection_shape,
    weight_shapes,
)
from muse_jax.checkpoint.quark import QuarkConfig
from muse_jax.config import MuseConfig

KINDS = ("missing", "duplicate", "stray", "wrong shape", "wrong dtype")

NamedTensor = tuple[MlpName, TensorEntry]


@dataclass(frozen=True, kw_only=True)
class Fault:
    """One thing wrong with one tensor: `kind` is one of KINDS, `detail` says where it is and what was expected."""

    kind: str
    name: str
    detail: str = ""

    def __str__(self) -> str:
        return f"{self.name!r}{self.detail}"


@dataclass(frozen=True, kw_only=True)
class LayerAudit:
    """What a layer holds and what is wrong with it.

    found is None for a dense MLP. layout says how the experts' weights are named: "consolidated", "per_expert",
    "mixed" (of the two) or "none". tensors pairs every name under the layer's mlp prefix with its entry. conflict: one
    sentence on how tensors and quantization_config disagree, None where they do not.
    """

    layer: int
    found: FoundFormat | None
    layout: str
    tensors: tuple[NamedTensor, ...]
    faults: tuple[Fault, ...]
    conflict: str | None = None

    @property
    def label(self) -> str:
        """A key of FORMATS, or "mixed", "unknown", "absent", "dense"."""
        return "dense" if self.found is None else self.found.label

    def faulty(self, kind: str) -> tuple[str, ...]:
        """The names of the tensors with a fault of this kind."""
        return tuple(fault.name for fault in self.faults if fault.kind == kind)


def describe(faults: Iterable[Fault]) -> str:
    """The faults by kind, each with its number and its first eight tensors: '2 missing tensors: a, b; 1 stray ...'."""
    faults = list(faults)
    parts = []
    for kind in KINDS:
        chosen = [str(fault) for fault in faults if fault.kind == kind]
        if chosen:
            parts.append(f"{len(chosen)} {kind} {'tensor' if len(chosen) == 1 else 'tensors'}: {name_list(chosen)}")
    return "; ".join(parts)


def tensors_by_layer(entries: Iterable[TensorEntry]) -> dict[int, list[NamedTensor]]:
    """Every tensor under some layer's mlp prefix, by layer; all others (attention, towers, ...) are left out."""
    layers: dict[int, list[NamedTensor]] = {}
    for entry in entries:
        name = parse(entry.name)
        if name is not None:
            layers.setdefault(name.layer, []).append((name, entry))
    return layers


def audit_layer(
    layer: int, tensors: Iterable[NamedTensor], config: MuseConfig, quantization: QuarkConfig | None
) -> LayerAudit:
    """Hold a layer's tensors to what `config` says the layer is, to the format that its experts follow, and that format
    to what `quantization` says.

    Raises ValueError where quantization gives the layer a scheme that is not served.
    """
    tensors = tuple(tensors)
    if config.mlp_types[layer] == "dense":
        return _audit_dense(layer, tensors)
    found = find_format(tensors, config.num_experts)
    known = {name.rest: (name, entry) for name, entry in tensors if _is_expected(name, config, found.format)}
    whole = {name.weight for name, _ in known.values() if name.expert is None}
    split = {name.weight for name, _ in known.values() if name.expert is not None}
    wanted = _expected_rests(config, found.format, whole, split)
    faults = [Fault(kind="missing", name=full_name(layer, rest)) for rest in wanted if rest not in known]
    faults += _strays(tensors, known)
    for name, entry in known.values():
        if name.expert is not None and name.weight is not None and name.weight in whole:
            detail = f"{_file(entry)}, which {full_name(layer, WHOLE_NAMES[name.weight])!r} holds as well"
            faults.append(Fault(kind="duplicate", name=entry.name, detail=detail))
        faults.extend(_misfits(name, entry, config, found.format))
    return LayerAudit(
        layer=layer,
        found=found,
        layout=_layout(whole, split),
        tensors=tensors,
        faults=tuple(faults),
        conflict=find_conflict(layer, found, config, quantization),
    )


def _audit_dense(layer: int, tensors: tuple[NamedTensor, ...]) -> LayerAudit:
    known = {name.rest: entry for name, entry in tensors if name.rest in DENSE_NAMES}
    faults = [Fault(kind="missing", name=full_name(layer, rest)) for rest in DENSE_NAMES if rest not in known]
    faults += _strays(tensors, known)
    return LayerAudit(layer=layer, found=None, layout="none", tensors=tensors, faults=tuple(faults))


def _strays(tensors: Iterable[NamedTensor], known: Iterable[str]) -> Iterator[Fault]:
    return (
        Fault(kind="stray", name=entry.name, detail=_file(entry)) for name, entry in tensors if name.rest not in known
    )


def _is_expected(name: MlpName, config: MuseConfig, form: ExpertFormat) -> bool:
    if name.weight is None:
        return False
    if name.expert is None:
        return name.weight not in EXPERT_WEIGHTS or not form.scale_dtypes
    return name.expert < config.num_experts and name.part in form.parts


def _expected_rests(
    config: MuseConfig, form: ExpertFormat, whole: set[str | None], split: set[str | None]
) -> Iterator[str]:
    for weight, rest in WHOLE_NAMES.items():
        per_expert = weight in EXPERT_WEIGHTS and weight not in whole and (weight in split or form.scale_dtypes)
        if not per_expert:
            yield rest
            continue
        for expert in range(config.num_experts):
            for projection in EXPERT_WEIGHTS[weight]:
                yield from (expert_rest(expert, projection, part) for part in form.parts)


def _misfits(name: MlpName, entry: TensorEntry, config: MuseConfig, form: ExpertFormat) -> Iterator[Fault]:
    if name.weight is None:
        return
    if name.projection is None:
        shapes = (weight_shapes(config)[name.weight],)
    else:
        shapes = form.shapes(name.part, *projection_shape(config, name.projection))
    if entry.shape not in shapes:
        detail = f"{_file(entry)} is {list(entry.shape)}, expected {' or '.join(str(list(shape)) for shape in shapes)}"
        yield Fault(kind="wrong shape", name=entry.name, detail=detail)
    if name.weight in ROUTER_WEIGHTS:
        dtypes = ("F32",)
    else:
        dtypes = form.dtypes(name.part) if name.weight in EXPERT_WEIGHTS else (form.plain_dtype,)
    if entry.dtype not in dtypes:
        detail = f"{_file(entry)} is {entry.dtype}, expected {' or '.join(dtypes)}"
        yield Fault(kind="wrong dtype", name=entry.name, detail=detail)


def _layout(whole: set[str | None], split: set[str | None]) -> str:
    forms = [word for word, held in (("consolidated", whole), ("per_expert", split)) if held & set(EXPERT_WEIGHTS)]
    return "mixed" if len(forms) == 2 else "".join(forms) or "none"


def _file(entry: TensorEntry) -> str:
    return f" in {entry.file.name}"
