"""Random checkpoints: deterministic, complete, of sensible size, and there entirely or not at all."""

from __future__ import annotations

import dataclasses
import json

import numpy as np
import pytest
from safetensors import safe_open

from muse_jax.checkpoint import load_layer, small_config, synthetic, take_inventory, write_random_checkpoint
from muse_jax.config import MuseConfig
from tests.checkpoint.build import CONFIG, assert_same


@pytest.mark.parametrize("shards", [1, 2, 16])
@pytest.mark.parametrize("layout", ["consolidated", "per_expert"])
def test_written_checkpoints_are_complete_and_depend_on_the_seed_alone(tmp_path, layout, shards):
    folder = write_random_checkpoint(tmp_path / "deep" / "ckpt", config=CONFIG, seed=3, layout=layout, shards=shards)
    assert MuseConfig.from_checkpoint(folder) == CONFIG
    inventory = take_inventory(folder)
    assert inventory.faults == ()
    assert len(inventory.files) == shards
    assert {audit.layout for audit in inventory.layers} == {layout}
    assert_same(load_layer(folder, 1), synthetic.random_layer(CONFIG, 1, seed=3))
    with pytest.raises(AssertionError):
        assert_same(load_layer(folder, 1), synthetic.random_layer(CONFIG, 1, seed=4))
    with pytest.raises(AssertionError):
        assert_same(load_layer(folder, 1), synthetic.random_layer(CONFIG, 0, seed=3))


def test_other_readers_can_read_it(tmp_path):
    folder = write_random_checkpoint(tmp_path / "ckpt", config=CONFIG, dtype="float32")
    with safe_open(folder / "model.safetensors", "numpy") as file:
        assert file.metadata() == {"format": "pt"}
        down = file.get_tensor("model.language_model.layers.0.mlp.experts.down_proj")
    assert down.tobytes() == load_layer(folder, 0)["down"].tobytes()


def test_magnitudes():
    config = small_config(model_width=256, latent_width=128, expert_width=64, num_experts=32, routes_per_token=8)
    weights = synthetic.random_layer(config, 0, seed=0, dtype="float32")
    for name, scale in {
        "router_weight": 256**-0.5,
        "router_bias": 0.05,
        "pre_expert_proj": 256**-0.5,
        "pre_expert_norm": 0.1,
        "gate_up": 128**-0.5,
        "down": 64**-0.5,
        "post_expert_norm": 0.1,
        "post_expert_proj": 128**-0.5,
    }.items():
        # The sample deviation of n normal values is within 4 / sqrt(2 n) of the true one but for 1 draw in 16,000.
        assert np.std(weights[name]) == pytest.approx(scale, rel=4 / (2 * weights[name].size) ** 0.5), name


def test_small_config_follows_the_layer_pattern():
    config = small_config(num_layers=6)
    assert [index for index, kind in enumerate(config.attention_types) if kind == "full_attention"] == [1, 5]
    assert config.rope_thetas == (5e5, 0, 5e5, 5e5, 5e5, 0)
    assert MuseConfig.from_dict(json.loads(json.dumps(config.to_dict()))) == config


def test_dense_layers_are_left_out(tmp_path):
    config = dataclasses.replace(CONFIG, mlp_types=("dense", "sparse"))
    folder = write_random_checkpoint(tmp_path / "ckpt", config=config)
    assert len(take_inventory(folder).layers[0].tensors) == 0
    assert_same(load_layer(folder, 1), synthetic.random_layer(CONFIG, 1, seed=0))


def test_existing_folder_is_left_alone(tmp_path):
    (tmp_path / "ckpt").mkdir()
    write_random_checkpoint(tmp_path / "ckpt", config=CONFIG)
    before = sorted((file.name, file.read_bytes()) for file in (tmp_path / "ckpt").iterdir())
    with pytest.raises(FileExistsError, match="ckpt already exists"):
        write_random_checkpoint(tmp_path / "ckpt", config=CONFIG, seed=1)
    assert sorted((file.name, file.read_bytes()) for file in (tmp_path / "ckpt").iterdir()) == before


def test_a_failed_write_leaves_nothing(tmp_path, monkeypatch):
    def fail(tensors, file):
        file.write_bytes(b"half")
        raise OSError("disk full")

    monkeypatch.setattr(synthetic, "_save", fail)
    with pytest.raises(OSError, match="disk full"):
        write_random_checkpoint(tmp_path / "ckpt", config=CONFIG)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    "wrong, message",
    [
        ({"layout": "fused"}, "layout is 'fused'"),
        ({"shards": 0}, "shards is 0; expected 1 to 16"),
        ({"shards": 17}, "shards is 17; expected 1 to 16"),
        ({"dtype": "float16"}, "dtype is 'float16'"),
        ({"config": dataclasses.replace(CONFIG, scoring="softmax")}, "scoring 'softmax'"),
    ],
)
def test_wrong_arguments(tmp_path, wrong, message):
    with pytest.raises(ValueError, match=message):
        write_random_checkpoint(tmp_path / "ckpt", **{"config": CONFIG, **wrong})
    assert list(tmp_path.iterdir()) == []
