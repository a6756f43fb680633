"""What a GPU is to these kernels: its name, its local memory, its matrix formats, and the rates that floors are made
of.
"""

from __future__ import annotations

import dataclasses
import re
from typing import Literal

import jax


@dataclasses.dataclass(frozen=True, kw_only=True)
class Target:
    """One GPU architecture.

    Attributes:
      name: "gfx942", "gfx950" or "sm_90".
      chip: products that have it.
      platform: what JAX calls its platform when lowering, "rocm" or "cuda".
      lds_bytes: local (shared) memory a workgroup can have.
      wavefront: lanes that run together.
      fp8: the 8-bit float format its matrix units multiply natively.
      mxfp4: whether its matrix units multiply MXFP4.
      bytes_per_second, bf16_flops: memory and matrix rates for floors.
      rates_are: "datasheet", or "measured" (a device-to-device copy and an 8192^3 product).
    """

    name: str
    chip: str
    platform: Literal["rocm", "cuda"]
    lds_bytes: int
    wavefront: int
    fp8: Literal["e4m3fn", "e4m3fnuz"]
    mxfp4: bool
    bytes_per_second: float
    bf16_flops: float
    rates_are: Literal["datasheet", "measured"]


TARGETS = {
    target.name: target
    for target in (
        Target(
            name="gfx942",
            chip="MI300X",
            platform="rocm",
            lds_bytes=65_536,
            wavefront=64,
            fp8="e4m3fnuz",
            mxfp4=False,
            bytes_per_second=5.3e12,
            bf16_flops=1307e12,
            rates_are="datasheet",
        ),
        Target(
            name="gfx950",
            chip="MI355X",
            platform="rocm",
            lds_bytes=163_840,
            wavefront=64,
            fp8="e4m3fn",
            mxfp4=True,
            bytes_per_second=8e12,
            bf16_flops=2517e12,
            rates_are="datasheet",
        ),
        Target(
            name="sm_90",
            chip="H200",
            platform="cuda",
            lds_bytes=232_448,
            wavefront=32,
            fp8="e4m3fn",
            mxfp4=False,
            bytes_per_second=4.3e12,
            bf16_flops=790e12,
            rates_are="measured",
        ),
    )
}


def architecture(compute_capability: object) -> str:
    """The architecture's name in what JAX reports: "gfx942:sramecc+:xnack-" -> "gfx942", "9.0" -> "sm_90"."""
    text = str(compute_capability)
    if re.fullmatch(r"\d+\.\d+", text):
        return "sm_" + text.replace(".", "")
    return text.split(":")[0]


def find_target(name: str) -> Target:
    """The target of an architecture's name, with or without feature flags. Raises ValueError for one not known here."""
    found = TARGETS.get(architecture(name))
    if found is None:
        raise ValueError(f"target is {name!r}; expected one of {', '.join(TARGETS)}")
    return found


def current_architecture() -> str | None:
    """The architecture that is being compiled for: one of `TARGETS` that a mesh without devices names, or else that of
    the first GPU of the default backend; None without one.
    """
    named = getattr(jax.sharding.get_abstract_mesh(), "abstract_device", None)
    if named is not None and named.device_kind in TARGETS:
        return named.device_kind
    if jax.default_backend() != "gpu":
        return None
    return architecture(jax.devices()[0].compute_capability)


def on_nvidia() -> bool:
    """Whether kernels are being compiled for an NVIDIA GPU."""
    return (current_architecture() or "").startswith("sm_")


def current_target() -> Target | None:
    """The target of the first GPU, None without one or where it is not one of `TARGETS`."""
    return TARGETS.get(current_architecture() or "")
