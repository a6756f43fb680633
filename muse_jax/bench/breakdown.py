"""Where the time of a call goes on a GPU: device time of each kernel, from JAX's own profiler."""

from __future__ import annotations

import statistics
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import jax


def kernel_times(
    call: Callable[..., Any], arguments: Sequence[tuple[Any, ...]], repeats: int
) -> tuple[dict[str, float], float]:
    """({kernel: its microseconds in one call}, microseconds from the first kernel of a call to its last).

    Medians over calls queued back to back, kernels in the order they first run. Raises NotImplementedError where the
    profiler sees no GPU.
    """
    jax.block_until_ready([call(*one) for one in arguments])
    with tempfile.TemporaryDirectory() as folder:
        with jax.profiler.trace(folder):
            jax.block_until_ready([call(*arguments[i % len(arguments)]) for i in range(repeats)])
        events = _gpu_events(next(Path(folder).rglob("*.xplane.pb")))
    if not events:
        raise NotImplementedError("the profiler saw no GPU; kernels are timed on one")
    durations: dict[str, list[float]] = {}
    for _, name, duration in events:
        durations.setdefault(name, []).append(duration)
    start, last = events[0][0], events[-1]
    span = (last[0] + last[2] - start) / repeats
    return {name: statistics.median(each) * len(each) / repeats for name, each in durations.items()}, span


def _gpu_events(file: Path) -> list[tuple[float, str, float]]:
    """(start, kernel, duration) in microseconds of everything on the GPUs' streams, in order."""
    return sorted(
        (event.start_ns / 1e3, event.name, event.duration_ns / 1e3)
        for plane in jax.profiler.ProfileData.from_file(str(file)).planes
        if "GPU" in plane.name
        for line in plane.lines
        if "Stream" in line.name
        for event in line.events
    )
