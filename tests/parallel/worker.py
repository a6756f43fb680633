"""One process of several: the block of a checkpoint on meshes that cross them, and what happens when one is gone.

The folder holds run.json (what to do), checkpoint and x.npy; a process writes text{PROCESS}, found{PROCESS}.npz and
read{PROCESS}.json to it. Where run.json names a victim, that process leaves without a word while the others are inside
the block.
"""

import json
import os
import threading
import time
from pathlib import Path

import jax
import numpy as np
from jax.experimental import multihost_utils
from jax.sharding import AxisType, Mesh

from muse_jax.checkpoint import region
from muse_jax.parallel import ShardedMoE
from muse_jax.schedule import Schedule

VICTIM_EXIT = 17


def main(process: int, processes: int, port: int, folder: Path) -> None:
    """Run as `process` of `processes`, whose first listens on `port`."""
    with (folder / f"text{process}").open("wb") as text:
        os.dup2(text.fileno(), 1)
        os.dup2(text.fileno(), 2)
    os.environ.pop("XLA_FLAGS", None)
    run = json.loads((folder / "run.json").read_text())
    jax.config.update("jax_num_cpu_devices", run["devices"])
    jax.config.update("jax_cpu_collectives_implementation", "gloo")
    jax.config.update("jax_disable_most_optimizations", True)
    jax.config.update("jax_numpy_rank_promotion", "raise")
    jax.config.update("jax_numpy_dtype_promotion", "strict")
    jax.distributed.initialize(
        f"127.0.0.1:{port}",
        processes,
        process,
        initialization_timeout=60,
        heartbeat_timeout_seconds=10,
        shutdown_timeout_seconds=5,
    )
    schedule = Schedule(chunk_elements=run["chunk_elements"], scatter_min_tokens=run["scatter_min_tokens"])
    found, read = {}, []
    for number, case in enumerate(run["cases"]):
        mesh = mesh_of(case["mesh"], case["slowest_first"])
        with counting_reads() as counted:
            block = ShardedMoE.from_checkpoint(folder / "checkpoint", 0, mesh, dtype=np.float32, schedule=schedule)
        read.append({"read": sum(counted), "own": own_bytes(block.weights().values())})
        x = np.load(folder / "x.npy")[: case["tokens"]]
        found[str(number)] = multihost_utils.process_allgather(block(x), tiled=True)
    np.savez(folder / f"found{process}.npz", **found)
    (folder / f"read{process}.json").write_text(json.dumps(read))
    if run["victim"] is not None:
        leave_in_the_middle(block, x, process, run)


def mesh_of(shape: list[int], slowest_first: list[int]) -> Mesh:
    """dp, ep, tp over all devices, which JAX lists process by process: the axis named first crosses processes first."""
    devices = np.array(jax.devices()).reshape([shape[axis] for axis in slowest_first])
    return Mesh(devices.transpose(np.argsort(slowest_first)), ("dp", "ep", "tp"), axis_types=(AxisType.Explicit,) * 3)


class counting_reads(list):  # noqa: N801
    """The bytes of every read of a tensor's part; runs of any length are read by themselves, as long ones are."""

    def __enter__(self):
        self.kept = os.preadv, region.LONG_RUN
        region.LONG_RUN = 1
        os.preadv = self.preadv
        return self

    def preadv(self, *args):
        self.append(self.kept[0](*args))
        return self[-1]

    def __exit__(self, *_):
        os.preadv, region.LONG_RUN = self.kept


def own_bytes(arrays) -> int:
    """Bytes of this process's different slices; a slot without an expert is zeros, which no file holds."""
    slices = ({str(shard.index): shard.data for shard in array.addressable_shards} for array in arrays)
    return sum(int(np.count_nonzero(data)) * data.dtype.itemsize for own in slices for data in own.values())


def leave_in_the_middle(block, x, process: int, run: dict) -> None:
    """The victim exits while it computes; `idle` computes nothing and waits; the rest call the block on and on."""
    multihost_utils.sync_global_devices("all are here")
    if process == run["victim"]:
        threading.Timer(0.3, os._exit, [VICTIM_EXIT]).start()
    if process == run["idle"]:
        time.sleep(300)
    while True:
        block(x).block_until_ready()
