"""The route map: every live route in exactly one block of its own expert, in order, whatever the routing."""

from __future__ import annotations

import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pallas_kernels import route_map as package
from pallas_kernels.route_map import UNUSED, RouteMap, max_blocks
from tests.one_program import one_program
from tests.pallas_kernels.cases import CASES, Case

route_map = one_program(package.route_map)


def check_map(ids: np.ndarray, experts: int, routes: RouteMap) -> None:
    """Raises AssertionError unless `routes` is a map of `ids`: complete, sorted, nothing twice, masked routes apart."""
    rows, group = np.asarray(routes.rows), np.asarray(routes.group)
    flat = ids.reshape(-1)
    seen = []
    for block_rows, expert in zip(rows, group, strict=True):
        if expert == UNUSED:
            continue
        live = block_rows[block_rows < flat.size]
        assert live.size > 0, "a used block holds no route"
        assert (block_rows[live.size :] == flat.size).all(), "empty rows must point past the array"
        of_block = np.where((flat[live] < 0) | (flat[live] >= experts), experts, flat[live])
        expert = expert if 0 <= expert < experts else experts
        assert (of_block == expert).all(), "a route sits in another expert's block"
        seen.append(live)
    order = np.concatenate(seen) if seen else np.zeros(0, np.int32)
    assert sorted(order.tolist()) == list(range(flat.size)), "a route is missing or twice in the map"


@pytest.mark.parametrize("block_rows", [1, 8, 24])
@pytest.mark.parametrize("case", CASES, ids=lambda c: c.name)
@pytest.mark.parametrize("implementation", ["xla", "pallas"])
def test_every_route_once(case: Case, block_rows: int, implementation) -> None:
    ids = case.ids()
    routes = route_map(jnp.asarray(ids), num_experts=case.experts, block_rows=block_rows, implementation=implementation)
    check_map(ids, case.experts, routes)


@pytest.mark.parametrize("block_rows", [4, 16])
def test_both_implementations_agree(block_rows: int) -> None:
    case = Case("agree", 130, 4, 9, 1, 1, masked=0.2)
    ids = jnp.asarray(case.ids())
    xla, pallas = (
        route_map(ids, num_experts=9, block_rows=block_rows, implementation=name) for name in ("xla", "pallas")
    )
    used = np.asarray(xla.group) >= 0
    np.testing.assert_array_equal(xla.group, pallas.group)
    np.testing.assert_array_equal(np.asarray(xla.rows)[used], np.asarray(pallas.rows)[used])


def test_more_ids_than_one_chunk() -> None:
    case = Case("chunks", 700, 4, 6, 1, 1, masked=0.1)  # 2,800 ids: three chunks of the Pallas kernels
    routes = route_map(jnp.asarray(case.ids()), num_experts=6, block_rows=16, implementation="pallas")
    check_map(case.ids(), 6, routes)


@settings(deadline=None, max_examples=25)
@given(
    st.integers(1, 12),
    st.sampled_from([1, 2, 16]),
    st.lists(st.lists(st.integers(-2, 13), min_size=3, max_size=3), min_size=0, max_size=40),
)
def test_blocks_never_run_out(experts: int, block_rows: int, ids: list[list[int]]) -> None:
    array = np.asarray(ids, np.int32).reshape(len(ids), 3)
    routes = route_map(jnp.asarray(array), num_experts=experts, block_rows=block_rows, implementation="xla")
    assert routes.group.shape[0] == max_blocks(array.size, experts, block_rows) or len(ids) == 1
    check_map(array, experts, routes)


@pytest.mark.parametrize("broken", ["route_twice", "other_expert", "route_dropped"])
def test_check_fails_for_broken_maps(broken: str) -> None:
    case = Case("broken", 20, 2, 6, 1, 1)
    ids = case.ids()
    routes = route_map(jnp.asarray(ids), num_experts=6, block_rows=8, implementation="xla")
    rows, group = np.asarray(routes.rows).copy(), np.asarray(routes.group).copy()
    if broken == "route_twice":
        rows[0, 1] = rows[0, 0]
    elif broken == "other_expert":
        group[0] += 1
    else:
        rows[0, np.sum(rows[0] < ids.size) - 1] = ids.size
    with pytest.raises(AssertionError):
        check_map(ids, 6, RouteMap(rows, group))
