"""What runs at the same time on GPUs: the block compiled for eight of them, none needed, and the order of its steps.

    python scripts/gpu_schedule.py --mesh tp=8 --tokens 4096

prints, for the loop over chunks and for the program around it, kernels and collectives in the order in which XLA queues
them. What stands between a `-start` and its `-done` runs while the collective does; a collective without them runs
alone. XLA's CUDA compiler does this for an H100, on any Linux machine, with two wheels of the installed JAX's version:

    pip install --no-deps jax-cuda13-pjrt jax-cuda13-plugin

The ROCm plugin cannot do it without ROCm's libraries. Nothing is run, so nothing here is a time.
"""

from __future__ import annotations

import argparse
import os
import re

os.environ["JAX_SKIP_CUDA_CONSTRAINTS_CHECK"] = "1"  # no cuDNN is needed to compile
os.environ["JAX_PLATFORMS"] = ""
os.environ["XLA_FLAGS"] = f"{os.environ.get('XLA_FLAGS', '')} --xla_gpu_autotune_level=0"

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental import topologies
from jax.sharding import AxisType, Mesh

from muse_jax import parallel
from muse_jax.checkpoint import small_config
from muse_jax.cli.mesh import axis_sizes
from muse_jax.schedule import Schedule
from muse_jax.sharding import HELD, BlockMesh, held_shapes

H100 = """
gpu_device_info {
  threads_per_block_limit: 1024 threads_per_warp: 32 shared_memory_per_block: 49152 shared_memory_per_core: 233472
  threads_per_core_limit: 2048 core_count: 132 fpus_per_core: 128 block_dim_limit_x: 2147483647
  block_dim_limit_y: 65535 block_dim_limit_z: 65535 memory_bandwidth: 3352320000000 l2_cache_size: 52428800
  clock_rate_ghz: 1.98 device_memory_size: 84978434048 shared_memory_per_block_optin: 232448
  cuda_compute_capability { major: 9 } registers_per_core_limit: 65536 registers_per_block_limit: 65536
}
platform_name: "CUDA" dnn_version_info { major: 9 minor: 12 } runtime_version { major: 13 }
device_description_str: "NVIDIA H100 80GB HBM3"
"""
FULL = small_config(
    model_width=8192,
    latent_width=4096,
    expert_width=4096,
    num_experts=256,
    routes_per_token=8,
    output_multiplier=2**-2.5,
)
STEP = re.compile(r" (all-reduce|reduce-scatter|all-gather|while|custom-call)(-start|-done)?\(")


def compiled_text(mesh: BlockMesh, tokens: int, schedule: Schedule) -> str:
    """The scheduled program of the block at full size in bfloat16, with its Pallas kernels."""
    settings = parallel._Settings(
        config=FULL, mesh=mesh, schedule=schedule, activation_rule=None, implementation="pallas"
    )
    weights = {
        name: jax.ShapeDtypeStruct(
            shape, jnp.float32 if name.startswith("router_") else jnp.bfloat16, sharding=mesh.sharding(*HELD[name])
        )
        for name, shape in held_shapes(FULL, mesh).items()
    }
    x = jax.ShapeDtypeStruct((tokens, FULL.model_width), jnp.bfloat16, sharding=mesh.sharding("dp"))
    compiled = parallel._run.lower(weights, x, settings=settings, names=("out",)).compile()
    return compiled.as_text() or ""


def print_steps(text: str) -> None:
    """The order of the steps in every computation that has a collective."""
    name, lines = "", {}
    for line in text.splitlines():
        header = re.match(r"(ENTRY )?%?([\w.\-]+) .*\{$", line)
        if header:
            name = "the program" if header[1] else f"a loop's step, {header[2]}"
        lines.setdefault(name, []).append(line)
    for name, own in lines.items():
        if not any(re.search(r" (all-reduce|reduce-scatter|all-gather)", line) for line in own):
            continue
        print(f"\n{name}")
        for line in own:
            step = STEP.search(line)
            if step:
                kernel = re.search(r"/(muse_\w+)/", line)
                shape = re.search(r"= \(*(\w+\[[\d,]*\])", line)
                print(
                    f"  {kernel[1] if kernel else step[1] + (step[2] or ''):<22} {shape[1] if shape else ''}".rstrip()
                )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--mesh", default="tp=8", help="axes dp, ep, tp over 8 GPUs; default: tp=8")
    parser.add_argument("--tokens", type=int, default=4096, metavar="T")
    args = parser.parse_args()
    sizes = axis_sizes(args.mesh)
    devices = topologies.get_topology_desc(platform="cuda", target_config=H100, topology="1x1x8").devices
    # Kernels are lowered and tiled for these GPUs, not interpreted.
    jax.default_backend, jax.devices = lambda: "gpu", lambda: devices
    mesh = Mesh(np.array(devices).reshape(*sizes.values()), tuple(sizes), axis_types=(AxisType.Auto,) * len(sizes))
    print(f"{args.mesh}, {args.tokens} tokens, {devices[0].device_kind}, jax {jax.__version__}")
    print_steps(compiled_text(BlockMesh(mesh=mesh), args.tokens, Schedule()))


if __name__ == "__main__":
    main()
