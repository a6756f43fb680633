"""Tables of tiles: which entry serves a problem, the user's own file first, and files that are not well formed."""

from __future__ import annotations

import json

import pytest

from pallas_kernels.expert_gemm import GemmConfig, Tile, choose_config
from pallas_kernels.expert_gemm.tiles import Entry, entries, read_entries, write_table
from pallas_kernels.target import TARGETS

TILE = Tile(cols=32, depth=64, num_warps=4, num_stages=2)
FULL = {"experts": 256, "h": 4096, "f": 4096}


def entry(block_rows: int = 16, **named) -> Entry:
    return Entry(dtype="bfloat16", config=GemmConfig(block_rows=block_rows, gate_up=TILE, down=TILE), **named)


@pytest.mark.parametrize("target", TARGETS)
@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
def test_every_problem_has_a_config(target: str, dtype: str) -> None:
    for rows in (1e-3, 0.03, 2, 16, 33, 128, 1e6):
        for h, f in ((4096, 4096), (4096, 512), (24, 40), (1000, 100)):
            config = choose_config(rows, dtype, experts=256, h=h, f=f, target=target)
            for tile, columns, depth in ((config.gate_up, f, h), (config.down, h, f)):
                assert tile.cols < 2 * max(columns, 16)
                assert tile.depth < 2 * max(depth, 16)


def test_amd_is_marked_untimed() -> None:
    for target in ("gfx942", "gfx950"):
        assert {one.config.timed for one in entries(target)} == {"untimed"}
        assert all(one.config.why for one in entries(target))


def test_the_nearest_entry_serves(tmp_path, monkeypatch) -> None:
    file = tmp_path / "tiles.json"
    named = [entry(32, max_rows=4, **FULL), entry(64, max_rows=16, **FULL), entry(128, max_rows=16)]
    write_table(file, "sm_90", named)
    monkeypatch.setenv("MUSE_JAX_TILES", str(file))
    choose = lambda rows, **sizes: choose_config(rows, "bfloat16", target="sm_90", **FULL | sizes).block_rows
    assert [choose(rows) for rows in (1, 4, 5, 16)] == [32, 32, 64, 64]
    assert choose(5, f=512) == 128  # an entry for any shape, and still the user's own
    monkeypatch.delenv("MUSE_JAX_TILES")
    assert choose(17) != 64
    assert choose_config(1, "bfloat16", target="gfx942", **FULL).block_rows == 16


def test_tables_survive_a_round_trip() -> None:
    for target in TARGETS:
        table = {"entries": [json.loads(json.dumps(one.to_json())) for one in entries(target)]}
        assert read_entries(table, "here") == entries(target)


@pytest.mark.parametrize(
    "change, message",
    [
        ({"block_rows": 144}, "a block of 144 rows; expected a power of two from 16 on, or a multiple of 64"),
        (
            {"gate_up": {"cols": 48, "depth": 64, "num_warps": 4, "num_stages": 2}},
            "cols is 48; expected a power of two",
        ),
        ({"down": {"cols": 64}}, "missing 3 required keyword-only arguments"),
        ({"crowded_from": 65}, "crowded and crowded_from go together"),
        ({"speed": 3}, "unexpected keyword argument 'speed'"),
    ],
)
def test_bad_entries_are_named(change: dict, message: str) -> None:
    item = entry().to_json()
    item["config"] |= change
    with pytest.raises(ValueError, match=r"entry 0 of tiles\.json is not a tile config: .*" + message):
        read_entries({"entries": [item]}, "tiles.json")


def test_bad_files_are_named(tmp_path, monkeypatch) -> None:
    file = tmp_path / "tiles.json"
    monkeypatch.setenv("MUSE_JAX_TILES", str(file))
    with pytest.raises(ValueError, match=r"tiles\.json is no table of tiles"):
        entries("sm_90")
    file.write_text("{")
    with pytest.raises(ValueError, match="`muse-jax bench --tune FILE` writes one"):
        entries("sm_90")
