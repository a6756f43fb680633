"""`--mesh dp=1,ep=2,tp=4`: the mesh a command runs on, of real devices or of as many CPU devices as it asks for."""

from __future__ import annotations

import argparse
import contextlib
import math
from typing import get_args

import jax
from jax.sharding import AxisType, Mesh

from muse_jax.schedule import ReduceDtype, Schedule
from muse_jax.sharding import Axis


def add_mesh_options(parser: argparse.ArgumentParser) -> None:
    """Add --mesh and --reduce-dtype."""
    parser.add_argument("--mesh", metavar="AXES", help="run over a mesh such as ep=2,tp=4 (axes dp, ep, tp)")
    parser.add_argument(
        "--reduce-dtype",
        choices=get_args(ReduceDtype),
        default="float32",
        help="what sums over ep and tp are computed in; default: float32",
    )


def axis_sizes(text: str) -> dict[str, int]:
    """{"ep": 2, "tp": 4} of "ep=2,tp=4"; raises ValueError for other axes than dp, ep, tp or sizes below 1."""
    sizes: dict[str, int] = {}
    for part in text.split(","):
        name, _, size = part.partition("=")
        if name not in get_args(Axis) or name in sizes or not size.isdecimal() or int(size) < 1:
            raise ValueError(
                f"--mesh is {text!r}; expected axes dp, ep, tp once each with their sizes, such as ep=2,tp=4"
            )
        sizes[name] = int(size)
    return sizes


def open_mesh(text: str) -> Mesh:
    """The mesh, over the first devices of the backend; a CPU that JAX has not started yet is split into enough."""
    sizes = axis_sizes(text)
    count = math.prod(sizes.values())
    with contextlib.suppress(RuntimeError):  # JAX has started: its devices are what there is
        jax.config.update("jax_num_cpu_devices", count)
    devices = jax.devices()
    if len(devices) < count:
        raise ValueError(
            f"--mesh {text} needs {count} devices and this {devices[0].platform} backend has {len(devices)}"
        )
    return jax.make_mesh(
        tuple(sizes.values()),
        tuple(sizes),
        axis_types=(AxisType.Auto,) * len(sizes),
        devices=devices[:count],
    )


def schedule_of(args: argparse.Namespace) -> Schedule:
    """The schedule that the options ask for."""
    return Schedule(reduce_dtype=args.reduce_dtype)
