"""config.json's quantization_config as AMD Quark writes it: which scheme, if any, each projection is quantized by.

    scheme(module) = none                         where `exclude` names it
                     layer_quant_config[pattern]  where a pattern matches it
                     global_quant_config          otherwise

A module is a projection's name without `.weight`. An entry of `exclude` names it exactly, is a module that it lies in,
has wildcards (`*`, `?`, `[...]`), or is a regular expression after `re:`. Nothing is inferred from a layer's number.
Schemes served (weights; inputs of the projection):
    fp8           one scale a row; each token or route finds its own
    fp8_tensor    one scale a tensor; one stored input_scale
    fp8_block     one scale a 128 x 128 block; each 128 columns of a row find their own
    mxfp4         one exponent a block of 32 columns; the same
"""

from __future__ import annotations

import re
import reprlib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from fnmatch import fnmatchcase
from functools import cached_property
from pathlib import Path
from typing import Any

from muse_jax.strict_json import read_object
from pallas_kernels.block_sizes import FP8_BLOCK, MX_BLOCK

_FP8 = {"dtype": "fp8_e4m3"}
_FP4 = {"dtype": "fp4", "qscheme": "per_group", "group_size": MX_BLOCK, "scale_format": "e8m0"}
# What a scheme asks of a projection's `weight` and `input_tensors`; other keys do not change what is stored.
SCHEMES: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "fp8": (
        _FP8 | {"qscheme": "per_channel", "ch_axis": 0, "is_dynamic": False},
        _FP8 | {"qscheme": "per_channel", "ch_axis": 1, "is_dynamic": True},
    ),
    "fp8_tensor": (
        _FP8 | {"qscheme": "per_tensor", "is_dynamic": False},
        _FP8 | {"qscheme": "per_tensor", "is_dynamic": False},
    ),
    "fp8_block": (
        _FP8 | {"qscheme": "per_block", "block_size": [FP8_BLOCK, FP8_BLOCK], "is_dynamic": False},
        _FP8 | {"qscheme": "per_group", "group_size": FP8_BLOCK, "is_dynamic": True},
    ),
    "mxfp4": (_FP4 | {"is_dynamic": False}, _FP4 | {"is_dynamic": True}),
}
_SHOWN = ("dtype", "qscheme", "ch_axis", "group_size", "block_size", "scale_format", "is_dynamic")


@dataclass(frozen=True, kw_only=True)
class QuarkConfig:
    """A quantization_config; `source` names its file in messages."""

    source: str
    settings: Mapping[str, Any]

    def scheme(self, module: str) -> str | None:
        """The key of SCHEMES that the projection `module` is quantized by, None where it is not.

        Raises ValueError, naming the module and its settings, for a scheme that is not served.
        """
        if self.excludes(module):
            return None
        settings = self._settings_of(module)
        parts = [settings.get(key) for key in ("weight", "input_tensors")]
        if parts == [None, None]:
            return None
        for name, wanted in SCHEMES.items():
            if all(_agrees(part, asked) for part, asked in zip(parts, wanted, strict=True)):
                return name
        weight, inputs = map(_words, parts)
        raise ValueError(
            f"{self.source} quantizes {module!r} with weight {weight} and input_tensors {inputs}; "
            f"the schemes served are {', '.join(SCHEMES)}"
        )

    def excludes(self, module: str) -> bool:
        """Whether an entry of `exclude` covers the projection."""
        names, patterns = self._exclude
        return not names.isdisjoint(_ancestors(module)) or any(pattern(module) for pattern in patterns)

    @cached_property
    def _exclude(self) -> tuple[set[str], list[Any]]:
        entries = self.settings.get("exclude") or []
        names, patterns = set(), []
        for entry in entries:
            if entry.startswith("re:"):
                patterns.append(re.compile(entry[3:]).match)
            elif any(sign in entry for sign in "*?["):
                patterns.append(lambda module, entry=entry: fnmatchcase(module, entry))
            else:
                names.add(entry)
        return names, patterns

    def _settings_of(self, module: str) -> Mapping[str, Any]:
        own = [
            (pattern, settings)
            for pattern, settings in (self.settings.get("layer_quant_config") or {}).items()
            if pattern in _ancestors(module) or fnmatchcase(module, pattern)
        ]
        if not own:
            return self.settings["global_quant_config"]
        if any(settings != own[0][1] for _, settings in own):
            patterns = ", ".join(repr(pattern) for pattern, _ in own)
            raise ValueError(f"{self.source} has several layer_quant_config entries for {module!r}: {patterns}")
        if not isinstance(own[0][1], Mapping):
            raise ValueError(
                f"{self.source}: layer_quant_config[{own[0][0]!r}] is {reprlib.repr(own[0][1])}, no object"
            )
        return own[0][1]


def read_quantization(path: str | Path) -> QuarkConfig | None:
    """The quantization_config in the folder `path`, or beside the .safetensors file `path`; None where there is none.

    Raises ValueError, naming the file, for one that AMD Quark did not write, or whose parts are not as Quark has them.
    """
    path = Path(path)
    file = (path if path.is_dir() else path.parent) / "config.json"
    return find_quantization(read_object(file), str(file)) if file.is_file() else None


def find_quantization(config: Mapping[str, Any], source: str) -> QuarkConfig | None:
    """The quantization_config of a config.json, at its top or in its text_config; errors as `read_quantization`."""
    text = config.get("text_config")
    found = [part["quantization_config"] for part in (config, text) if isinstance(part, Mapping) and _given(part)]
    if not found:
        return None
    if any(other != found[0] for other in found):
        raise ValueError(f"{source} has two quantization_config, at its top and in text_config, that differ")
    settings, where = found[0], f"quantization_config of {source}"
    if not isinstance(settings, Mapping):
        raise ValueError(f"{where} is {reprlib.repr(settings)}; expected an object")
    if settings.get("quant_method") != "quark":
        raise ValueError(
            f"{where} has quant_method {reprlib.repr(settings.get('quant_method'))}; only AMD Quark's checkpoints, "
            "'quark', can be loaded quantized"
        )
    if not isinstance(settings.get("global_quant_config"), Mapping):
        raise ValueError(f"{where} has no global_quant_config; expected an object with weight and input_tensors")
    exclude = settings.get("exclude") or []
    if not isinstance(exclude, list) or not all(isinstance(entry, str) for entry in exclude):
        raise ValueError(f"{where}: exclude is {reprlib.repr(exclude)}; expected a list of module names")
    if not isinstance(settings.get("layer_quant_config") or {}, Mapping):
        raise ValueError(f"{where}: layer_quant_config is {reprlib.repr(settings['layer_quant_config'])}, no object")
    if settings.get("layer_type_quant_config"):
        raise ValueError(f"{where} has a layer_type_quant_config; only settings by module name are served")
    stored = (settings.get("export") or {}).get("weight_format", "real_quantized")
    if stored != "real_quantized":
        raise ValueError(f"{where} has export.weight_format {stored!r}; only 'real_quantized' holds codes and scales")
    return QuarkConfig(source=where, settings=settings)


def _given(part: Mapping[str, Any]) -> bool:
    return part.get("quantization_config") is not None


def _agrees(part: Any, asked: Mapping[str, Any]) -> bool:
    return isinstance(part, Mapping) and all(part.get(key) == value for key, value in asked.items())


def _words(part: Any) -> str:
    if not isinstance(part, Mapping):
        return "none" if part is None else reprlib.repr(part)
    return "{" + ", ".join(f"{key}: {part[key]}" for key in _SHOWN if part.get(key) is not None) + "}"


def _ancestors(module: str) -> Iterator[str]:
    """The module's own name, and that of every module it lies in."""
    while module:
        yield module
        module = module.rpartition(".")[0]
