"""The commands end to end, on golden files: what they print, write and return."""

import json
import re

import numpy as np
import pytest

from muse_jax import cli
from muse_jax.checkpoint import small_config, write_random_checkpoint
from muse_jax.compare import read_dump, write_dump
from tests.golden import DATA, HF_BF16, HF_F32, VLLM_BF16, golden_checkpoint

CKPT = str(golden_checkpoint())


def run(capsys, *argv):
    """(exit code, stdout, stderr) of one command."""
    code = cli.main([str(word) for word in argv])
    shown = capsys.readouterr()
    return code, shown.out, shown.err


@pytest.mark.parametrize("implementation", ["xla", "pallas", "reference"])
def test_dump_float32_is_transformers(capsys, tmp_path, implementation):
    out = tmp_path / "dump.safetensors"
    code, said, warned = run(
        capsys, "dump", CKPT, "--layer", 2, "--input", DATA / HF_F32, "--out", out, "--implementation", implementation
    )
    assert code == 0
    assert "expert_rows" in said
    assert ("interpret mode" in warned) == (implementation == "pallas")
    assert {value.dtype.name for value in read_dump(out).layers[2].values()} == {"float32", "int32"}
    code, said, _ = run(capsys, "compare", out, DATA / HF_F32, "--layer", 2)
    assert code == 0
    assert "all boundaries agree" in said


@pytest.mark.parametrize("layer", range(4))
def test_hf_profile_chained(capsys, tmp_path, layer):
    out = tmp_path / "dump.safetensors"
    chosen = ("--dtype", "bfloat16", "--implementation", "reference", "--profile", "hf")
    assert run(capsys, "dump", CKPT, "--layer", layer, "--input", DATA / HF_BF16, "--out", out, *chosen)[0] == 0
    assert run(capsys, "compare", out, DATA / HF_BF16, "--layer", layer, "--bits", 0.98)[0] == 0


@pytest.mark.parametrize("profile, file", [("hf", HF_BF16), ("vllm", VLLM_BF16), ("exact", HF_F32)])
def test_replay_fits(capsys, profile, file):
    code, said, _ = run(capsys, "compare", DATA / file, "--replay", profile, "--checkpoint", CKPT)
    assert code == 0, said
    assert said.count("all boundaries agree") == 4


def test_replay_of_another_profile_parts(capsys):
    code, said, _ = run(capsys, "compare", DATA / VLLM_BF16, "--replay", "hf", "--checkpoint", CKPT, "--json")
    found = json.loads(said)
    assert code == 1
    assert found["parted"]
    assert found["ignored_tensors"] > 0
    assert [layer["parted"] for layer in found["layers"]] == ["expert_input"] * 4
    assert {"name", "status", "limit", "distance", "note"} == set(found["layers"][0]["boundaries"][0])


def test_two_frameworks_are_told_apart(capsys):
    """transformers and vLLM part where the first rounds its gain, and the profiles that fit are named."""
    tight = ("--layer", 1, "--bits", 1.0, "--checkpoint", CKPT)
    code, said, _ = run(capsys, "compare", DATA / HF_BF16, DATA / VLLM_BF16, *tight)
    assert code == 1
    assert "first boundary that parts: expert_input" in said
    assert re.search(r"A at expert_input.*: hf 100", said)
    assert re.search(r"B at expert_input.*: vllm 100", said)


def test_json_has_no_nan_and_says_what_was_not_compared(capsys, tmp_path):
    layer = {name: value.copy() for name, value in read_dump(DATA / HF_BF16).layers[1].items() if name != "latent"}
    layer["combined"][3, 0] = np.nan
    write_dump(tmp_path / "a.safetensors", {1: layer}, {})
    files = ("compare", tmp_path / "a.safetensors", DATA / HF_BF16)
    code, said, _ = run(capsys, *files, "--bits", 0.9, "--json")

    def refuse(constant):
        raise AssertionError(f"{constant} is not JSON")

    found = json.loads(said, parse_constant=refuse)
    assert code == 1
    assert found["layers"][0]["parted"] == "combined"
    assert found["layers_not_compared"] == [0, 2, 3]
    assert "in one file only: layers 0, 2, 3" in run(capsys, *files)[1]
    del layer["combined"]
    write_dump(tmp_path / "a.safetensors", {1: layer}, {})
    code, said, _ = run(capsys, *files)
    assert code == 0
    assert "9 boundaries agree; 2 are in one file only and were not compared" in said


def test_plot(capsys, tmp_path):
    assert run(capsys, "compare", DATA / HF_F32, DATA / HF_F32, "--layer", 0, "--plot", tmp_path / "p")[0] == 0
    assert [path.name for path in (tmp_path / "p").iterdir()] == ["layer_0.png"]


def test_demo(capsys):
    code, said, _ = run(capsys, "demo", "--json")
    runs = json.loads(said)["runs"]
    assert code == 0
    assert len(runs) == 19
    assert all(one["parted"] is None for one in runs)
    assert {one["implementation"] for one in runs} == {"xla", "pallas"}
    assert sum(one["mesh"] != "one device" for one in runs) == 7


def test_dump_json(capsys, tmp_path):
    argv = ("dump", CKPT, "--layer", 0, "--input", DATA / HF_F32, "--out", tmp_path / "d.safetensors", "--json")
    code, said, _ = run(capsys, *argv)
    found = json.loads(said)
    assert code == 0
    assert (found["layer"], found["profile"], found["implementation"]) == (0, "exact", "xla")
    assert found["boundaries"]["activation"] == {"shape": [33, 4, 96], "dtype": "float32"}


def test_no_tokens(capsys, tmp_path):
    write_dump(tmp_path / "x.safetensors", {None: {"x": np.zeros((0, 128), np.float32)}}, {})
    out = tmp_path / "out.safetensors"
    for implementation in ("xla", "pallas", "reference"):
        chosen = ("--dtype", "bfloat16", "--implementation", implementation)
        code = run(capsys, "dump", CKPT, "--layer", 0, "--input", tmp_path / "x.safetensors", "--out", out, *chosen)[0]
        assert code == 0
        assert read_dump(out).layers[0]["normed_rows"].shape == (0, 4, 64)
    assert run(capsys, "compare", out, out)[0] == 0


def test_other_widths_and_route_scale(capsys, tmp_path):
    config = small_config(
        model_width=72, latent_width=48, expert_width=40, num_experts=6, routes_per_token=3, route_scale=2.5
    )
    folder = write_random_checkpoint(tmp_path / "ckpt", config=config, layout="per_expert", shards=2)
    x = np.random.default_rng(0).standard_normal((19, 72)).astype(np.float32)
    write_dump(tmp_path / "x.safetensors", {None: {"x": x}}, {})
    for implementation in ("reference", "xla", "pallas"):
        chosen = ("--out", tmp_path / f"{implementation}.safetensors", "--implementation", implementation)
        assert run(capsys, "dump", folder, "--layer", 1, "--input", tmp_path / "x.safetensors", *chosen)[0] == 0
    for implementation in ("xla", "pallas"):
        files = (tmp_path / f"{implementation}.safetensors", tmp_path / "reference.safetensors")
        assert run(capsys, "compare", *files, "--checkpoint", folder)[0] == 0


@pytest.mark.parametrize(
    "argv, sentence",
    [
        (["dump", CKPT, "--layer", 9, "--input", DATA / HF_F32, "--out", "o"], "layer is 9; expected 0 to 3"),
        (["dump", CKPT, "--layer", 0, "--input", "none", "--out", "o"], "No such file or directory: 'none'"),
        (["dump", CKPT, "--layer", 0, "--input", DATA / HF_F32, "--out", "no/o"], "--out is no/o; its folder does not"),
        (
            ["dump", CKPT, "--layer", 0, "--input", DATA / HF_F32, "--out", "o", "--profile", "hf"],
            "profile is 'hf'; the default implementation in float32 computes 'exact' only",
        ),
        (
            [
                *("dump", CKPT, "--layer", 0, "--input", DATA / HF_F32, "--out", "o", "--profile", "hf"),
                *("--implementation", "reference"),
            ],
            "this profile goes with --dtype bfloat16",
        ),
        (["dump", DATA, "--layer", 0, "--input", DATA / HF_F32, "--out", "o"], "config.json does not exist"),
        (["compare", DATA / HF_F32], "give either a second dump B or --replay PROFILE"),
        (["compare", DATA / HF_F32, "--replay", "hf"], "needs the weights: give --checkpoint CKPT"),
        (
            ["compare", DATA / HF_F32, DATA / HF_F32, "--layer", 7],
            "layer 7 is not in both files; in common: 0, 1, 2, 3",
        ),
        (
            ["compare", DATA / HF_F32, DATA / HF_F32, "--tolerance", "rows=1"],
            "--tolerance names 'rows'; expected one of",
        ),
        (["compare", DATA / HF_F32, DATA / HF_F32, "--tolerance", "x"], "expected a number or boundary=number"),
        (["compare", DATA / HF_F32, DATA / HF_F32, "--bits", "99"], "--bits is 99.0; expected a share, 0 to 1"),
        (["compare", DATA / HF_F32, DATA / HF_F32, "--tolerance", "inf"], "expected a finite number, 0 or more"),
        (["compare", DATA / HF_F32, DATA / HF_F32, "--max-ulp", "-3"], "--max-ulp is -3; expected 0 or more"),
        (["compare", DATA / HF_F32, DATA / HF_F32, "--tie-gap", "nan"], "--tie-gap is nan; expected a finite number"),
    ],
)
def test_bad_input_is_one_sentence_and_exit_code_2(capsys, tmp_path, monkeypatch, argv, sentence):
    monkeypatch.chdir(tmp_path)
    code, _, said = run(capsys, *argv)
    assert code == 2
    assert sentence in said
    assert said.count("\n") == 1
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("command", cli.COMMANDS)
def test_help_ends_with_an_example(capsys, command):
    with pytest.raises(SystemExit) as stopped:
        cli.main([command, "--help"])
    assert stopped.value.code == 0
    assert re.search(r"example:\n  muse-jax " + command, capsys.readouterr().out)
