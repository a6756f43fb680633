"""`--mesh`: what commands run over several devices, and what they refuse."""

import json

import numpy as np
import pytest

from muse_jax import cli
from muse_jax.cli.mesh import axis_sizes
from muse_jax.compare import read_dump
from tests.golden import DATA, HF_F32, LAYERS, VLLM_BF16, golden_checkpoint, golden_tensors
from tests.quark import LAYER, QUARK, RUNS, quark_run
from tests.reference.checks import row_errors

CKPT = str(golden_checkpoint())


def dump(tmp_path, capsys, *argv, layer=0, file=HF_F32, checkpoint=CKPT):
    out = tmp_path / "dump.safetensors"
    words = ("dump", checkpoint, "--layer", layer, "--input", DATA / file, "--out", out, *argv)
    code = cli.main([str(word) for word in words])
    shown = capsys.readouterr()
    return code, out, shown


@pytest.mark.parametrize("mesh", ["ep=2,tp=4", "dp=2,ep=2,tp=2", "ep=3", "tp=8", "dp=8"])
def test_float32_is_transformers(tmp_path, capsys, mesh):
    code, out, _ = dump(tmp_path, capsys, "--mesh", mesh)
    assert code == 0
    assert cli.main(["compare", str(out), str(DATA / HF_F32), "--layer", "0"]) == 0


def test_bfloat16_over_dp_is_vllm_on_one_device(tmp_path, capsys):
    """Other meshes round more often: tests/parallel/test_golden.py holds those to what vLLM's ranks computed."""
    code, out, _ = dump(tmp_path, capsys, "--mesh", "dp=2", "--dtype", "bfloat16", file=VLLM_BF16)
    assert code == 0
    assert cli.main(["compare", str(out), str(DATA / VLLM_BF16), "--layer", "0"]) == 0


@pytest.mark.parametrize("run, mesh", [("fp8", "ep=2,tp=4"), ("mxfp4_rceil", "dp=2,tp=3")])
def test_float32_is_quarks_block(tmp_path, capsys, run, mesh):
    (form, rule), file = RUNS[run], QUARK / f"moe_{run}.safetensors"
    argv = ("--mesh", mesh, *(("--activation-rule", rule) if rule else ()))
    code, out, _ = dump(tmp_path, capsys, *argv, layer=LAYER, file=file, checkpoint=QUARK / f"checkpoint-{form}")
    assert code == 0
    ours = read_dump(out).layers[LAYER]
    for name, value in quark_run(run).items():
        if name == "topk_ids":
            np.testing.assert_array_equal(ours[name], value)
        else:
            assert np.max(row_errors(ours[name], value)) <= 2e-6, name


@pytest.mark.parametrize("golden", ["tp2_f32", "tp4_f32", "ep2_f32", "ep3_f32", "tp4_bf16", "ep4_bf16"])
def test_reference_rounds_as_vllm_ranks(tmp_path, capsys, golden):
    """Over all layers, as one: a tie in one sum moves one token of one layer."""
    reduce_dtype = "float32" if golden.endswith("f32") else "bfloat16"
    argv = ("--mesh", f"{golden[:2]}={golden[2]}", "--reduce-dtype", reduce_dtype)
    argv += ("--dtype", "bfloat16", "--implementation", "reference")
    equal = []
    for layer in LAYERS:
        code, out, _ = dump(tmp_path, capsys, *argv, layer=layer, file=VLLM_BF16)
        assert code == 0
        equal.append(read_dump(out).layers[layer]["out"] == golden_tensors(VLLM_BF16, layer)[f"{golden}.out"])
    assert np.mean(equal) >= 0.995


def test_metadata_says_the_mesh(tmp_path, capsys):
    code, _, shown = dump(tmp_path, capsys, "--mesh", "ep=2", "--reduce-dtype", "bfloat16", "--json")
    found = json.loads(shown.out)
    assert code == 0
    assert (found["mesh"], found["reduce_dtype"]) == ("ep=2", "bfloat16")


@pytest.mark.parametrize(
    "mesh, sentence",
    [
        ("tp=16", "--mesh tp=16 needs 16 devices and this cpu backend has 8"),
        ("tp=5", "tp is 5 and the block has E=16 experts of width F=96; tp can be 1, 2, 3, 4, 6, 8"),
        ("pp=2", "--mesh is 'pp=2'; expected axes dp, ep, tp once each with their sizes"),
        ("ep=2,ep=2", "expected axes dp, ep, tp once each"),
        ("ep=0", "expected axes dp, ep, tp once each"),
        ("ep", "expected axes dp, ep, tp once each"),
    ],
)
def test_bad_meshes(tmp_path, capsys, mesh, sentence):
    code, out, shown = dump(tmp_path, capsys, "--mesh", mesh)
    assert code == 2
    assert sentence in shown.err
    assert not out.exists()


def test_axis_sizes():
    assert axis_sizes("ep=2,tp=4") == {"ep": 2, "tp": 4}


def test_bench(capsys):
    small = ["bench", "--sizes", "8", "2", "32", "48", "64", "--tokens", "5", "--dtype", "float32", "--json"]
    assert cli.main([*small, "--mesh", "ep=2,tp=2"]) == 0
    [time] = json.loads(capsys.readouterr().out)["times"]
    assert time["path"] == "ep=2,tp=2"
    assert time["block_us"] > 0
