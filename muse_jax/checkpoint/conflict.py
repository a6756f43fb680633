"""Where a layer's tensors and its quantization_config do not say the same; such a layer is refused, never guessed.

    scheme = what quantization_config gives every expert projection of the layer: all the same, or none of them
    format = what the tensors are                                        (`muse_jax.checkpoint.formats`)
A conflict is a scheme of some projections only, scheme != format, or widths that the format cannot hold.
"""

from __future__ import annotations

from collections.abc import Iterator

from muse_jax.checkpoint.formats import FORMATS, FoundFormat
from muse_jax.checkpoint.names import EXPERT_WEIGHTS, expert_rest, full_name, name_list
from muse_jax.checkpoint.quark import QuarkConfig
from muse_jax.config import MuseConfig

FORMAT_WORDS = {
    "bf16": "BF16",
    "f32": "F32",
    "fp8": "FP8",
    "fp8_tensor": "FP8 with one scale a tensor",
    "fp8_block": "FP8 with one scale a 128 x 128 block",
    "mxfp4": "MXFP4",
    "mixed": "a mix of formats",
    "unknown": "an unknown format",
}


def find_conflict(layer: int, found: FoundFormat, config: MuseConfig, quantization: QuarkConfig | None) -> str | None:
    """One sentence on the layer's conflict, None without one. Raises ValueError for a scheme that is not served."""
    if found.label not in FORMATS:
        return None  # its tensors alone are reason enough to refuse it
    have = f"layer {layer}'s experts are stored in {FORMAT_WORDS[found.label]} ({found.dtypes})"
    quantized = bool(FORMATS[found.label].scale_dtypes)
    if quantization is None:
        return f"{have}, but config.json has no quantization_config that says so" if quantized else None
    schemes: dict[str | None, list[str]] = {}
    for module in _modules(layer, config.num_experts):
        schemes.setdefault(quantization.scheme(module), []).append(module)
    if len(schemes) > 1:
        parts = [f"{name or 'not quantized'}: {name_list(map(repr, names))}" for name, names in schemes.items()]
        return f"{quantization.source} gives layer {layer}'s experts several schemes, {'; '.join(parts)}"
    (scheme,) = schemes
    if scheme is None and quantized:
        return f"{have}, but {quantization.source} excludes them"
    if scheme is not None and scheme != found.label:
        first = next(_modules(layer, config.num_experts))
        return (
            f"{have}, but {quantization.source} says {FORMAT_WORDS[scheme]}: "
            f"neither its exclude list nor its layer_quant_config makes an exception of {first!r}"
        )
    unit = FORMATS[found.label].scale_block[1] or 1  # both widths of an expert are columns of a weight
    for name in ("latent_width", "expert_width"):
        if getattr(config, name) % unit:
            return f"{have}, but {name} is {getattr(config, name)}; this format needs a multiple of {unit}"
    return None


def _modules(layer: int, num_experts: int) -> Iterator[str]:
    for expert in range(num_experts):
        for projections in EXPERT_WEIGHTS.values():
            for projection in projections:
                yield full_name(layer, expert_rest(expert, projection)).removesuffix(".weight")
