"""Every kernel and tile config compiles to gfx942 and gfx950 code: no spills, local memory that fits, the right
MFMA.
"""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
import pytest

from pallas_kernels import aot, expert_gemm
from pallas_kernels.expert_gemm import Tile
from pallas_kernels.expert_gemm.tiles import entries
from pallas_kernels.route_map import RouteMap
from pallas_kernels.target import find_target


@functools.cache
def checked(target: str) -> dict[str, list[list[str]]]:
    """Case -> faults of each of its kernels; one process compiles all of a target's."""
    found: dict[str, list[list[str]]] = {}
    for report, faults in aot.check([target]):
        found.setdefault(report.case, []).append(faults)
    return found


# One group a target, so that one worker compiles it once.
CASES = [
    pytest.param(target, case.name, marks=pytest.mark.xdist_group(f"aot-{target}"))
    for target in ("gfx942", "gfx950")
    for case in aot.cases(target)
]


@pytest.mark.parametrize(("target", "case"), CASES)
def test_kernels_fit_the_chip(target: str, case: str) -> None:
    kernels = checked(target)[case]
    assert kernels == [[]] * len(kernels)


def lowered(tile: Tile, block_rows: int, target: str) -> list[aot.LoweredKernel]:
    shape = jax.ShapeDtypeStruct
    routes = RouteMap(shape((64, block_rows), jnp.int32), shape((64,), jnp.int32))
    case = aot.AotCase(
        "probe",
        lambda x, w, r: expert_gemm.gate_up(
            x, w, r, routes_per_token=8, implementation="pallas", tile=tile, interpret=False
        ),
        (shape((512, 4096), jnp.bfloat16), shape((8, 8192, 4096), jnp.bfloat16), routes),
    )
    return aot.lower(case, find_target(target))


@pytest.mark.xdist_group("aot-gfx942")
def test_a_tile_too_large_is_reported() -> None:
    spilling = Tile(cols=256, depth=64, num_warps=4, num_stages=2)
    crowded = Tile(cols=128, depth=128, num_warps=8, num_stages=3)
    kernels = lowered(spilling, 128, "gfx942") + lowered(crowded, 64, "gfx942")
    first, second = aot.compile_kernels(kernels, find_target("gfx942"))
    assert any("spills" in fault for fault in aot.faults(first))
    assert any("bytes of LDS, the chip has 65536" in fault for fault in aot.faults(second))
    assert any("has no opcode like" in fault for fault in aot.faults(first, mfma="v_mfma_f32_16x16x32_fp8_fp8"))


@pytest.mark.parametrize("target", ["gfx942", "gfx950"])
def test_every_entry_of_the_table_is_a_case(target: str) -> None:
    names = [case.name for case in aot.cases(target)]
    for number, entry in enumerate(entries(target)):
        of_entry = [name for name in names if f"entry {number}," in name]
        assert {name.split()[0] for name in of_entry} == {"gate_up", "down"}
        assert all(entry.dtype in name for name in of_entry)


def test_other_targets_are_refused() -> None:
    with pytest.raises(NotImplementedError, match="only gfx942 and gfx950 are compiled ahead of time"):
        aot.lower(next(aot.cases("gfx942")), find_target("sm_90"))
    with pytest.raises(ValueError, match="target is 'gfx90a'; expected one of gfx942, gfx950, sm_90"):
        find_target("gfx90a")
