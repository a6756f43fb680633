"""The header reader: what it accepts, what it refuses and with which words, and that nothing else escapes it."""

from __future__ import annotations

import json
import re
from pathlib import Path

import ml_dtypes
import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from safetensors import safe_open

from muse_jax.checkpoint import header as header_module
from muse_jax.checkpoint.header import read_header, read_into
from tests.checkpoint.build import HF_TINY, pack


def one(dtype="F32", shape=(2,), offsets=(0, 8)):
    return {"dtype": dtype, "shape": list(shape), "data_offsets": list(offsets)}


@pytest.mark.parametrize("file", sorted(HF_TINY.glob("*.safetensors")), ids=lambda file: file.stem)
def test_agrees_with_the_safetensors_package(file):
    entries = read_header(file)
    with safe_open(file, "numpy") as theirs:
        assert set(entries) == set(theirs.keys())
        for name, entry in entries.items():
            ours = np.empty(entry.shape, header_module.NUMPY_DTYPES[entry.dtype])
            read_into([(entry, ours)])
            assert ours.tobytes() == theirs.get_tensor(name).tobytes()


def test_accepts_what_the_format_allows(tmp_path):
    file = tmp_path / "a.safetensors"
    file.write_bytes(
        pack(
            json.dumps(
                {
                    "late": one("F8_E4M3", (3,), (4, 7)),
                    "empty": one("F32", (0, 5), (4, 4)),
                    "__metadata__": {"format": "pt"},
                    "scalar": {**one("F32", (), (0, 4)), "note": "unknown keys are ignored"},
                }
            )
            + "   ",
            bytes(7),
        )
    )
    entries = read_header(file)
    assert list(entries) == ["scalar", "empty", "late"]
    assert entries["scalar"].elements == 1
    assert entries["empty"].elements == 0
    assert entries["late"].start == file.stat().st_size - 3
    file.write_bytes(pack("{}"))
    assert read_header(file) == {}


MALFORMED = {
    "empty file": (b"", "is 0 bytes long"),
    "seven bytes": (b"\0" * 7, "is 7 bytes long"),
    "header beyond the file": (pack("{}", length=3), "header of 3 bytes, but only 2 bytes follow"),
    "huge length": (pack("{}", length=2**64 - 1), "only 2 bytes follow"),
    "zero-length header": (pack(""), "does not start with '{'"),
    "leading space": (pack(" {}"), "does not start with '{'"),
    "a list": (pack("[]"), "does not start with '{'"),
    "broken JSON": (pack('{"a": '), "not valid JSON"),
    "two values": (pack("{}{}"), "not valid JSON"),
    "not UTF-8": (pack(b'{"\xff": 1}'), "not UTF-8"),
    "deep nesting": (pack('{"a":' + "[" * 100_000), "nested too deeply|not valid JSON"),
    "name twice": (pack(f'{{"a": {json.dumps(one())}, "a": {json.dumps(one())}}}', bytes(8)), "'a' appears twice"),
    "key twice": (pack('{"a": {"dtype": "F32", "dtype": "F32"}}'), "'dtype' appears twice"),
    "metadata no map": (pack({"__metadata__": [1]}), "__metadata__"),
    "metadata with numbers": (pack({"__metadata__": {"a": 1}}), "__metadata__"),
    "escape code in a name": (pack({"\x1b[2J": one()}, bytes(8)), "unprintable"),
    "surrogate in a name": (pack('{"\\ud800": {}}'), "unprintable"),
    "entry no object": (pack({"a": 3}), "'a' .* described by a int"),
    "no dtype": (pack({"a": {"shape": [], "data_offsets": [0, 0]}}), "'a' .* dtype None"),
    "unknown dtype": (pack({"a": one("F31")}, bytes(8)), "'a' .* dtype 'F31'"),
    "shape no list": (pack({"a": {**one(), "shape": 2}}, bytes(8)), "'a' .* shape 2"),
    "negative shape": (pack({"a": one(shape=(-2,))}, bytes(8)), "'a' .* shape"),
    "float shape": (pack({"a": one(shape=(2.0,))}, bytes(8)), "'a' .* shape"),
    "bool shape": (pack({"a": one(shape=(True, 2))}, bytes(8)), "'a' .* shape"),
    "three offsets": (pack({"a": one(offsets=(0, 8, 8))}, bytes(8)), "'a' .* data_offsets"),
    "offsets turned": (pack({"a": one(shape=(0,), offsets=(8, 0))}, bytes(8)), "'a' .* data_offsets"),
    "offset NaN": (pack('{"a": {"dtype": "F32", "shape": [1], "data_offsets": [NaN, 4]}}', bytes(4)), "data_offsets"),
    "too few bytes": (pack({"a": one(offsets=(0, 4))}, bytes(4)), "'a' .* 8 bytes, but its data_offsets hold 4"),
    "odd half byte": (pack({"a": one("F4", (3,), (0, 1))}, bytes(1)), "1.5 bytes"),
    "overlap": (pack({"a": one(), "b": one(offsets=(4, 12))}, bytes(12)), "'b' .* overlaps"),
    "same place": (pack({"a": one(), "b": one()}, bytes(8)), "'b' .* overlaps"),
    "gap": (pack({"a": one(), "b": one(offsets=(12, 20))}, bytes(20)), "'b' .* gap"),
    "gap at the start": (pack({"a": one(offsets=(4, 12))}, bytes(12)), "'a' .* gap"),
    "truncated data": (pack({"a": one()}, bytes(7)), "truncated.*'a'"),
    "bytes at the end": (pack({"a": one()}, bytes(9)), "1 bytes after its last tensor"),
}


@pytest.mark.parametrize("case", MALFORMED)
def test_refuses_malformed_files_by_name(tmp_path, case):
    data, message = MALFORMED[case]
    file = tmp_path / "bad.safetensors"
    file.write_bytes(data)
    with pytest.raises(ValueError, match=message) as error:
        read_header(file)
    assert re.search(r"bad\.safetensors", str(error.value))


def test_header_over_the_formats_limit_is_refused_unread(tmp_path):
    file = tmp_path / "big.safetensors"
    with file.open("wb") as stream:
        stream.write((100_000_001).to_bytes(8, "little"))
        stream.truncate(8 + 100_000_001)
    with pytest.raises(ValueError, match="the format allows 100000000"):
        read_header(file)


def test_missing_file_is_an_os_error(tmp_path):
    with pytest.raises(FileNotFoundError, match=r"none\.safetensors"):
        read_header(tmp_path / "none.safetensors")


def test_file_cut_after_its_header_was_read(tmp_path):
    file = tmp_path / "a.safetensors"
    file.write_bytes(pack({"a": one()}, bytes(8)))
    entry = read_header(file)["a"]
    file.write_bytes(file.read_bytes()[:-3])
    with pytest.raises(ValueError, match=r"a\.safetensors ended 3 bytes early"):
        read_into([(entry, np.empty(2, np.float32))])


@pytest.mark.parametrize(
    "array",
    [np.empty(3, np.float32), np.empty(2, np.int32), np.empty(4, np.float32)[::2], np.empty((2, 1), np.float32)],
    ids=["shape", "dtype", "strided", "rank"],
)
def test_reading_into_an_array_that_does_not_fit(tmp_path, array):
    file = tmp_path / "a.safetensors"
    file.write_bytes(pack({"a": one()}, bytes(8)))
    with pytest.raises(ValueError, match=r"'a' in a\.safetensors is F32 \[2\]"):
        read_into([(read_header(file)["a"], array)])


def test_bf16_bits_survive(tmp_path):
    bits = np.arange(2**16, dtype=np.uint16)
    file = tmp_path / "a.safetensors"
    file.write_bytes(pack({"a": one("BF16", (2**16,), (0, 2**17))}, bits.tobytes()))
    values = np.empty(2**16, ml_dtypes.bfloat16)
    read_into([(read_header(file)["a"], values)])
    assert np.array_equal(values.view(np.uint16), bits)


def survives(data: bytes, folder: Path) -> None:
    file = folder / "fuzz.safetensors"
    file.write_bytes(data)
    try:
        entries = read_header(file)
    except (ValueError, OSError):
        return
    assert sum(entry.nbytes for entry in entries.values()) < len(data)


fuzz = settings(max_examples=200, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text() | st.sampled_from(["F32", "BF16", "F4"]),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3),
    max_leaves=8,
)


@fuzz
@given(data=st.binary(max_size=64), length=st.integers(0, 80) | st.integers(0, 2**64 - 1))
def test_random_bytes_raise_nothing_else(tmp_path, data, length):
    survives(data, tmp_path)
    survives(length.to_bytes(8, "little") + data, tmp_path)


@fuzz
@given(header=json_values, entry=json_values, data=st.binary(max_size=16))
def test_random_json_raises_nothing_else(tmp_path, header, entry, data):
    survives(pack(json.dumps(header), data), tmp_path)
    survives(pack(json.dumps({"a": entry, "b": one()}), data), tmp_path)


@fuzz
@given(
    field=st.sampled_from(["dtype", "shape", "data_offsets"]),
    value=json_values | st.lists(st.integers(-1, 2**70), max_size=3),
)
def test_random_fields_raise_nothing_else(tmp_path, field, value):
    survives(pack(json.dumps({"a": {**one(), field: value}, "b": one(offsets=(8, 16))}), bytes(16)), tmp_path)


@fuzz
@given(edits=st.lists(st.tuples(st.integers(0, 200), st.integers(0, 255)), min_size=1, max_size=4), cut=st.integers(0))
def test_flipped_and_cut_files_raise_nothing_else(tmp_path, edits, cut):
    data = bytearray(pack({"__metadata__": {"a": "b"}, "a": one(), "b": one("BF16", (2, 2), (8, 16))}, bytes(16)))
    for position, value in edits:
        data[position % len(data)] = value
    survives(bytes(data), tmp_path)
    survives(bytes(data[: cut % len(data)]), tmp_path)
