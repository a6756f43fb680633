"""Floors by hand, route sets that are what they say, and the command on small sizes."""

import json

import numpy as np
import pytest

from muse_jax.bench.peers import make_peer
from muse_jax.bench.work import Rates, Sizes, floor_us, route_sets
from muse_jax.cli import main

FULL = Sizes(experts=256, routes_per_token=8, h=4096, f=4096, d=8192)
H200 = Rates(bytes_per_second=4.3e12, flops=790e12, source="test")


def test_floor_of_one_token_is_eight_experts_bytes():
    ids = route_sets(FULL, 1, "uniform", 4)
    assert floor_us(FULL, ids, H200, 2) == pytest.approx(8 * 3 * 4096**2 * 2 / 4.3e6)


def test_floor_of_many_tokens_is_their_operations():
    ids = np.broadcast_to(np.arange(8, dtype=np.int32), (1, 16384, 8))
    assert floor_us(FULL, ids, H200, 2) == pytest.approx(16384 * 8 * 6 * 4096**2 / 790e6)


@pytest.mark.parametrize("routing", ["uniform", "zipf", "hot", "few"])
def test_route_sets(routing):
    ids = route_sets(FULL, 40, routing, 3)
    assert ids.shape == (3, 40, 8)
    assert all(len(set(token)) == 8 for one in ids.tolist() for token in one)
    if routing == "hot":
        assert (ids == 0).any(-1).all()
    if routing == "few":
        assert ids.max() == 7
    if routing == "zipf":
        assert np.mean(ids < 16) > 0.3
    if routing == "uniform":
        assert {0, 127, 128, 255} <= set(ids[2, 0].tolist())


def test_command(capsys):
    small = ["bench", "--sizes", "8", "2", "32", "48", "64", "--tokens", "1", "9", "--dtype", "float32", "--json"]
    assert main([*small, "--peers", "ragged_dot", "tokamax"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert {(time["tokens"], time["path"]) for time in found["times"]} == {
        (tokens, path) for tokens in (1, 9) for path in ("xla", "ragged_dot")
    }
    assert all(time["error"] < 2e-6 for time in found["times"] if time["path"] == "xla")
    assert all(time["ratio"] == pytest.approx(time["rows_us"] / time["floor_us"]) for time in found["times"])
    assert found["notes"][0] == "tokamax: tokamax is not installed"


def test_bad_input(capsys):
    assert main(["bench", "--sizes", "4", "8", "32", "48", "64"]) == 2
    assert "expected positive numbers with K at most E" in capsys.readouterr().err
    with pytest.raises(ValueError, match="peer is 'x'; expected torch, ragged_dot or tokamax"):
        make_peer("x", np.zeros((1, 2, 1)), np.zeros((1, 1, 1)))
