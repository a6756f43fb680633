"""The sum over tp of a chunk can run under the GEMM of the next: neither waits for the other, and nothing for the sum.

A CPU's collectives are blocking, so what is looked at is who needs whom in the compiled program. Which of it a GPU's
compiler then does at the same time is shown by scripts/gpu_schedule.py (docs/parallel.md).
"""

import re

import jax.numpy as jnp
import pytest

from muse_jax import parallel
from muse_jax.experts import expert_rows
from muse_jax.schedule import Schedule
from tests.parallel import hlo
from tests.parallel.cases import CHUNKED, K_H, compiled

SHAPE = (1, 2, 4)
GEMM = re.compile(r' dot\(.*op_name="[^"]*expert_rows')
COLLECTIVE = re.compile(r" (all-reduce|reduce-scatter|all-gather)\(")
SUM_OVER_TP = re.compile(r"\[\d+,\d+,\d+\]\S* (all-reduce|reduce-scatter)\(")
SCHEDULES = {"scattered": CHUNKED, "all-reduced": Schedule(chunk_elements=260 * K_H, scatter_min_tokens=10**6)}


def loop_of_chunks(text):
    """The computation, other than the entry, that has collectives of its own: the loop's body."""
    bodies, entry = hlo.computations(text)
    names = [name for name, lines in bodies.items() if name != entry and any(map(COLLECTIVE.search, lines))]
    return hlo.Computation(text, names[0])


def faults(body):
    """What keeps a step's sum and its GEMM from running at the same time."""
    gemms, sums, collectives = (body.doing(pattern) for pattern in (GEMM, SUM_OVER_TP, COLLECTIVE))
    assert gemms
    assert sums
    found = []
    if body.needed_by(gemms) & collectives:
        found.append("a GEMM waits for a collective")
    if body.needed_by(collectives) & gemms:
        found.append("a collective waits for a GEMM")
    if any(body.needed_by({name}) & sums for name in (gemms | collectives) - sums):
        found.append("what the step computes waits for the sum")
    return found


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_a_step_of_the_loop(schedule):
    """1100 tokens are 4 chunks of 260 and 60 more: two steps of the loop, and the rest after it."""
    _, program = compiled(SHAPE, 1100, schedule=SCHEDULES[schedule])
    assert faults(loop_of_chunks(program.as_text())) == []


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_chunks_outside_the_loop(schedule):
    """The first two chunks' GEMMs and that of the rest need no collective either."""
    text = compiled(SHAPE, 1100, schedule=SCHEDULES[schedule])[1].as_text()
    entry = hlo.Computation(text, hlo.computations(text)[1])
    gemms = entry.doing(GEMM) - entry.doing(COLLECTIVE)
    assert len(gemms) >= 3
    assert not entry.needed_by(gemms) & entry.doing(COLLECTIVE)


def test_chunks_one_after_the_other_are_told_apart(monkeypatch):
    def one_by_one(weights, found, local_ids, settings):
        chunks = settings.schedule.chunks(local_ids.shape[0], K_H, 4)
        names = found["expert_input"], found["topk_weights"], local_ids
        stacked = [value[:1040].reshape(4, 260, *value.shape[1:]) for value in names]

        def step(carry, chunk):
            inputs, topk_weights, ids = chunk
            _, rows = expert_rows(inputs, ids, weights["gate_up"], weights["down"], implementation="xla")
            return carry, parallel._finalize(weights, rows, topk_weights, ids, chunks[0], settings)

        done = parallel.lax.scan(step, 0, tuple(stacked))[1].reshape(1040, -1)
        return jnp.pad(done, ((0, 60), (0, 0)))

    monkeypatch.setattr(parallel, "_combined", one_by_one)
    _, program = compiled.__wrapped__(SHAPE, 1100)
    assert "a collective waits for a GEMM" in faults(loop_of_chunks(program.as_text()))
