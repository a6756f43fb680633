"""Tuning on no GPU: what is worth timing, where results go, and the refusal."""

import pytest

from muse_jax.bench.tune import add_entries, bucket_of_rows, candidates
from muse_jax.cli import main
from pallas_kernels.expert_gemm import GemmConfig
from pallas_kernels.expert_gemm.tiles import Entry, read_table
from pallas_kernels.target import TARGETS


@pytest.mark.parametrize("target", TARGETS)
@pytest.mark.parametrize("rows", [0.03, 2, 16, 128, 512])
def test_candidates_fit(target: str, rows: float) -> None:
    for halves in (1, 2):
        for kind in ("bfloat16", "fp8", "mxfp4"):
            found = list(candidates(TARGETS[target], rows, kind, halves=halves))
            assert len(found) > 10
            for block_rows, tile in found:
                GemmConfig(block_rows=block_rows, gate_up=tile, down=tile)


def test_entries_replace_their_like(tmp_path) -> None:
    file = tmp_path / "tiles.json"
    (_, first), (_, second), *_ = candidates(TARGETS["sm_90"], 2, "bfloat16", halves=2)
    make = lambda tile, rows: Entry(
        dtype="bfloat16", max_rows=rows, config=GemmConfig(block_rows=16, gate_up=tile, down=tile)
    )
    add_entries(file, "sm_90", [make(first, 2.0), make(first, 4.0)])
    add_entries(file, "sm_90", [make(second, 2.0)])
    assert [one.config.gate_up for one in read_table(file)[1]] == [second, first]
    with pytest.raises(ValueError, match=r"tiles\.json is a table for sm_90; expected gfx942, name another file"):
        add_entries(file, "gfx942", [])


def test_buckets_of_rows() -> None:
    assert [bucket_of_rows(rows) for rows in (0.03, 0.25, 2, 16, 17)] == [0.03125, 0.25, 2, 16, 32]


def test_no_gpu_is_said(capsys, tmp_path) -> None:
    assert main(["bench", "--tune", str(tmp_path / "tiles.json")]) == 2
    assert "--tune times tiles on a GPU" in capsys.readouterr().err
    assert not list(tmp_path.iterdir())
