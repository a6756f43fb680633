"""The block on meshes that cross processes: 2 and 4 of them on a CPU, each with several devices and its own reads.

All of it is asked of one run for each number of processes: a run starts them, checks meshes, and ends with a death.
"""

from __future__ import annotations

import dataclasses
import json
import multiprocessing
import socket
import time
from pathlib import Path

import jax
import numpy as np
import pytest

from muse_jax.checkpoint import load_layer
from muse_jax.checkpoint.synthetic import write_random_checkpoint
from muse_jax.moe import MuseMoE
from tests.parallel import worker
from tests.parallel.cases import CONFIG, FLOAT32, K_H, tokens
from tests.reference.checks import row_errors

DP, EP, TP = range(3)
# 38 tokens over dp=2 are 8 + 8 scattered and 3 all-reduced on every rank; 7 do not divide.
RUNS = {
    2: {
        "devices": 4,
        "cases": [
            {"mesh": [2, 2, 2], "slowest_first": [TP, EP, DP], "tokens": 38},  # tp crosses
            {"mesh": [2, 4, 1], "slowest_first": [EP, DP, TP], "tokens": 7},  # ep crosses
        ],
        "victim": 0,
        "idle": None,
    },
    4: {
        "devices": 2,
        "cases": [
            {"mesh": [2, 2, 2], "slowest_first": [TP, EP, DP], "tokens": 38},  # tp and ep cross
        ],
        "victim": 3,
        "idle": 1,
    },
}
# Seconds from a death to the end of the last process. Heartbeats are missed after 10 and the processes wait 5 for each
# other at the end; the rest is a busy machine.
PATIENCE = 30


@dataclasses.dataclass(kw_only=True)
class Ended:
    """Exit codes (None: had to be killed) and texts by process, and the seconds that the others outlived the victim."""

    codes: list[int | None]
    texts: list[str]
    folder: Path
    outlived: float


@pytest.mark.parametrize("count", RUNS)
def test_processes(count, tmp_path):
    """One run answers all three questions: starting processes is what takes time here."""
    ended = start(count, tmp_path)
    check_answers(ended)
    check_reads(ended)
    check_death(ended)


def start(count: int, folder: Path) -> Ended:
    run = RUNS[count]
    write_random_checkpoint(folder / "checkpoint", config=CONFIG, seed=3, dtype="float32")
    np.save(folder / "x.npy", tokens(38))
    (folder / "run.json").write_text(json.dumps(run | {"chunk_elements": 8 * K_H, "scatter_min_tokens": 8}))
    return run_processes(count, run["victim"], folder)


def run_processes(count: int, victim: int, folder: Path) -> Ended:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    # A server that has imported the worker, and JAX with it but none of its backends, starts them all.
    server = multiprocessing.get_context("forkserver")
    server.set_forkserver_preload([worker.__name__])
    processes = [server.Process(target=worker.main, args=(process, count, port, folder)) for process in range(count)]
    try:
        for process in processes:
            process.start()
        processes[victim].join(timeout=120)
        died = time.monotonic()
        for process in processes:
            process.join(timeout=max(0.1, PATIENCE + died - time.monotonic()))
        outlived = time.monotonic() - died
        codes = [process.exitcode for process in processes]
    finally:
        for process in processes:
            process.kill()
    texts = [(folder / f"text{process}").read_text(errors="replace") for process in range(count)]
    return Ended(codes=codes, texts=texts, folder=folder, outlived=outlived)


def check_answers(ended: Ended) -> None:
    """Every process has the answer of one device."""
    cases = RUNS[len(ended.codes)]["cases"]
    one = MuseMoE.from_weights(CONFIG, load_layer(ended.folder / "checkpoint", 0), dtype=FLOAT32)
    for number, case in enumerate(cases):
        want = np.asarray(jax.jit(one)(tokens(38)[: case["tokens"]]))
        for process in range(len(ended.codes)):
            found = np.load(ended.folder / f"found{process}.npz")[str(number)]
            assert np.max(row_errors(found, want)) < 2e-6, (case, process)


def check_reads(ended: Ended) -> None:
    """Bytes read are those of the slices its devices hold, each once, and less than the layer's."""
    whole = sum(value.nbytes for value in load_layer(ended.folder / "checkpoint", 0).values())
    for process in range(len(ended.codes)):
        for counted in json.loads((ended.folder / f"read{process}.json").read_text()):
            assert counted["read"] == counted["own"] < whole


def check_death(ended: Ended) -> None:
    """A survivor raises out of a collective or is ended by JAX's service: never with success, never silent or late."""
    victim = RUNS[len(ended.codes)]["victim"]
    assert ended.codes[victim] == worker.VICTIM_EXIT
    for process, (code, text) in enumerate(zip(ended.codes, ended.texts, strict=True)):
        if process != victim:
            assert code not in (0, None), text
            assert ("Gloo" in text and "failed" in text) or "another task died" in text, text
    assert ended.outlived < PATIENCE
