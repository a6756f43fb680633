"""`muse-jax doctor`: what JAX runs on here, which versions, and whether the kernels will run and why not."""

from __future__ import annotations

import argparse
import json
import platform
from importlib import metadata
from typing import Any, get_args

import jax

from muse_jax.cli.table import print_table
from muse_jax.deployment import Precision, service
from pallas_kernels.dispatch import resolve
from pallas_kernels.target import TARGETS, current_architecture

_PACKAGES = ("muse-jax", "jax", "jaxlib", "flax", "numpy", "triton")
_PLUGINS = ("jax-rocm7-plugin", "jax-rocm7-pjrt", "jax-cuda13-plugin", "jax-cuda12-plugin")
_WORDS = {"device_memory_gib": "device memory (GiB)"}
EPILOG = """\
example:
  muse-jax doctor
"""


def add_parser(subparsers: argparse._SubParsersAction) -> None:
    """Add the subcommand `doctor`."""
    parser = subparsers.add_parser(
        "doctor",
        help="backend, device, versions, and whether the kernels run here",
        description="Say what JAX runs on here and whether the kernels will run.",
        epilog=EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--json", action="store_true", help="print one JSON object instead of a table")
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """Print what was found; always 0."""
    found = examine()
    if args.json:
        print(json.dumps(found, indent=2))
        return 0
    versions, formats = found.pop("versions"), found.pop("formats")
    print_table(
        ("what", "found"),
        [
            (_WORDS.get(name, name.replace("_", " ")), "none" if value is None else str(value))
            for name, value in found.items()
        ],
    )
    print()
    print_table(("experts", "here", "because"), [(name, *said.values()) for name, said in formats.items()])
    print()
    print_table(("package", "version"), list(versions.items()))
    return 0


def examine() -> dict[str, Any]:
    """The facts as JSON-ready values: backend, devices, architecture, kernels, default implementation, how experts of
    each format are served here, versions.
    """
    devices = jax.devices()
    stats = devices[0].memory_stats() or {}
    architecture = current_architecture()
    return {
        "backend": jax.default_backend(),
        "device": devices[0].device_kind,
        "devices": len(devices),
        "device_memory_gib": round(stats["bytes_limit"] / 2**30, 1) if "bytes_limit" in stats else None,
        "architecture": architecture,
        "kernels": kernels_verdict(jax.default_backend(), architecture, _version("jax-rocm7-plugin")),
        "default_implementation": resolve(None),
        "formats": {
            precision: dict(zip(("service", "reason"), service(precision, architecture or "cpu"), strict=True))
            for precision in get_args(Precision)
        },
        "versions": {"python": platform.python_version()}
        | {name: version for name in (*_PACKAGES, *_PLUGINS) if (version := _version(name))},
    }


def kernels_verdict(backend: str, architecture: str | None, rocm_plugin: str | None) -> str:
    """Whether the Pallas kernels run compiled on this backend and architecture, in a sentence, and why not."""
    if backend != "gpu":
        reason = "no; this backend has no GPU, so XLA paths run and kernels are only interpreted, for checking"
        if backend == "cpu" and rocm_plugin is None:
            reason += ". On an AMD machine install `muse-jax[rocm]`: `jax[rocm]` does not exist and installs a CPU JAX"
        elif backend == "cpu":
            reason += f". The ROCm plugin {rocm_plugin} is installed but found no GPU; check `rocminfo` and /dev/kfd"
        return reason
    target = TARGETS.get(architecture or "")
    if target is None:
        return f"perhaps; {architecture} is none of {', '.join(TARGETS)}, for which the tiles were chosen"
    if target.platform == "cuda":
        return f"yes; {target.chip} ({architecture}) takes the same Triton lowering as AMD; bfloat16 tiles timed on it"
    return f"yes; {target.chip} ({architecture}), with tiles that compile without spills and have not been timed on it"


def _version(package: str) -> str | None:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return None
