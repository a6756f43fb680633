"""One file or shards with an index: which is read, and the words when index and shards disagree."""

from __future__ import annotations

import shutil

import pytest

from muse_jax.checkpoint.header import read_header
from muse_jax.checkpoint.index import INDEX_NAME, SINGLE_NAME, open_checkpoint
from tests.checkpoint.build import HF_TINY, build, edit_json, pack


@pytest.fixture
def sharded(tmp_path):
    return build(tmp_path / "ckpt", shards=3)


def first_of(file):
    return next(iter(read_header(file)))


def test_folder_file_and_shards_hold_the_same(tmp_path, sharded):
    single = build(tmp_path / "single")
    whole = open_checkpoint(single)
    assert whole.files == (single / SINGLE_NAME,)
    assert open_checkpoint(str(single / SINGLE_NAME)).entries == whole.entries
    split = open_checkpoint(sharded)
    assert split.source == sharded / INDEX_NAME
    assert len(split.files) == 3
    assert {(name, entry.shape) for name, entry in split.entries.items()} == {
        (name, entry.shape) for name, entry in whole.entries.items()
    }


def test_golden_checkpoint(tmp_path):
    checkpoint = open_checkpoint(HF_TINY)
    assert len(checkpoint.files) == 14
    assert sum(entry.nbytes for entry in checkpoint.entries.values()) == 3210224


def test_missing_shards_are_named(sharded):
    (sharded / "model-00002-of-00003.safetensors").unlink()
    with pytest.raises(ValueError, match=r"index\.json names shards that do not exist: model-00002-of-00003"):
        open_checkpoint(sharded)


def test_tensor_in_the_index_but_not_in_its_shard(sharded):
    edit_json(sharded / INDEX_NAME, lambda index: index["weight_map"].update(ghost="model-00001-of-00003.safetensors"))
    with pytest.raises(ValueError, match=r"shards do not hold: 'ghost' in model-00001-of-00003\.safetensors"):
        open_checkpoint(sharded)


def test_tensor_in_two_shards(sharded):
    one, two = (sharded / f"model-0000{i}-of-00003.safetensors" for i in (1, 2))
    name = first_of(one)
    shutil.copy(one, two)
    with pytest.raises(ValueError, match=rf"'{name}' in {one.name} and {two.name}"):
        open_checkpoint(sharded)


def test_tensor_in_a_shard_but_not_in_the_index(sharded):
    name = first_of(sharded / "model-00001-of-00003.safetensors")
    edit_json(sharded / INDEX_NAME, lambda index: index["weight_map"].pop(name))
    with pytest.raises(ValueError, match=rf"does not list .*: '{name}' in model-00001-of-00003"):
        open_checkpoint(sharded)


def test_tensor_in_another_shard_than_the_index_says(sharded):
    name = first_of(sharded / "model-00001-of-00003.safetensors")
    other = "model-00002-of-00003.safetensors"
    edit_json(sharded / INDEX_NAME, lambda index: index["weight_map"].update({name: other}))
    with pytest.raises(ValueError, match=rf"wrong shard: '{name}' in model-00001-of-00003.safetensors, not {other}"):
        open_checkpoint(sharded)


def test_truncated_shard_is_named(sharded):
    shard = sharded / "model-00003-of-00003.safetensors"
    shard.write_bytes(shard.read_bytes()[:-1])
    with pytest.raises(ValueError, match=r"model-00003-of-00003\.safetensors is truncated"):
        open_checkpoint(sharded)


def test_neither_and_both(tmp_path, sharded):
    (tmp_path / "empty").mkdir()
    with pytest.raises(ValueError, match=f"neither {SINGLE_NAME} nor {INDEX_NAME}"):
        open_checkpoint(tmp_path / "empty")
    (sharded / SINGLE_NAME).write_bytes(pack("{}"))
    with pytest.raises(ValueError, match=f"both {SINGLE_NAME} and {INDEX_NAME}"):
        open_checkpoint(sharded)


def test_paths_that_are_no_checkpoint(tmp_path):
    with pytest.raises(FileNotFoundError, match="nowhere does not exist"):
        open_checkpoint(tmp_path / "nowhere")
    (tmp_path / "weights.bin").write_bytes(b"")
    with pytest.raises(ValueError, match=r"weights\.bin is not a \.safetensors file"):
        open_checkpoint(tmp_path / "weights.bin")


@pytest.mark.parametrize(
    "text, message",
    [
        ("{", "not valid JSON"),
        ("[]", "holds a JSON list"),
        ("{}", "no weight_map"),
        ('{"weight_map": {}}', "no weight_map"),
        ('{"weight_map": {"a": 3}}', "'a' in 3"),
        ('{"weight_map": {"a": "../x.safetensors"}}', "plain name"),
        ('{"weight_map": {"a": "/x.safetensors"}}', "plain name"),
        ('{"weight_map": {"a": "x\\u0000.safetensors"}}', "plain name"),
        ('{"weight_map": {"a": "x.bin"}}', "plain name"),
        ('{"weight_map": {"a": "x.safetensors", "a": "y.safetensors"}}', "'a' appears twice"),
    ],
)
def test_malformed_index(tmp_path, text, message):
    (tmp_path / INDEX_NAME).write_text(text)
    with pytest.raises(ValueError, match=message) as error:
        open_checkpoint(tmp_path)
    assert INDEX_NAME in str(error.value)
