"""The tables of docs/parallel.md are what `muse_jax.communication` computes."""

import re
from pathlib import Path
from typing import get_args

import pytest

from muse_jax.checkpoint import small_config
from muse_jax.cli.mesh import axis_sizes
from muse_jax.communication import collectives, sent_bytes
from muse_jax.schedule import ReduceDtype, Schedule

PAGE = (Path(__file__).parents[2] / "docs" / "parallel.md").read_text(encoding="utf-8")
FULL = small_config(model_width=8192, latent_width=4096, expert_width=4096, num_experts=256, routes_per_token=8)
# What the first column says of when rows are scattered.
SCATTER_FROM = {"always all-reduced": 2**40, "always scattered": 1, "": Schedule().scatter_min_tokens}
GIGA = 10**9


def table(first_header):
    """The rows of the table that starts with this header, and the token counts of its T= columns."""
    header, _, *rows = re.search(rf"^\| {first_header} \|.*\n(?:\|.*\n)+", PAGE, re.M)[0].splitlines()
    cells = [[cell.strip() for cell in row.strip("|").split("|")] for row in (header, *rows)]
    return cells[1:], [int(cell.removeprefix("T=")) for cell in cells[0] if cell.startswith("T=")]


def sent(mesh, tokens, scatter_from, reduce_dtype):
    schedule = Schedule(reduce_dtype=reduce_dtype, scatter_min_tokens=scatter_from)
    return collectives(FULL, tokens, **axis_sizes(mesh), schedule=schedule)


BYTES, BYTES_TOKENS = table("mesh")
PLANS, PLAN_TOKENS = table("plan")


def test_the_page_has_the_rows_asked_for():
    assert BYTES_TOKENS == [1, 64, 4096]
    assert len(BYTES) >= 6
    assert len(PLANS) >= 6


@pytest.mark.parametrize("name, cells", [(row[0], row[1:]) for row in BYTES], ids=[row[0] for row in BYTES])
def test_bytes(name, cells):
    mesh, how = re.fullmatch(r"`(.*)`(?:, (.*))?", name).groups("")
    for tokens, cell in zip(BYTES_TOKENS, cells, strict=True):
        found = [sent_bytes(sent(mesh, tokens, SCATTER_FROM[how], dtype)) for dtype in get_args(ReduceDtype)]
        assert cell == " / ".join(f"{megabytes / 10**6:.3g}" for megabytes in found)


@pytest.mark.parametrize("mesh, links, cells", [(row[1], row[2], row[3:]) for row in PLANS], ids=[r[1] for r in PLANS])
def test_plans(mesh, links, cells):
    speed = {axis: float(rate) * GIGA for axis, rate in re.findall(r"(\w+) (\d+)", links)}
    for tokens, cell in zip(PLAN_TOKENS, cells, strict=True):
        found = []
        for dtype in get_args(ReduceDtype):
            parts = sent(mesh.strip("`"), tokens, Schedule().scatter_min_tokens, dtype)
            found.append(sum(part.sent_bytes / speed[part.axis] for part in parts))
        assert cell == " / ".join(f"{seconds * 1000:.3g}" for seconds in found)
