"""Quantized checkpoints on the command line: inspect names formats and conflicts, dump computes Quark's blocks."""

import json

import numpy as np
import pytest
from safetensors.numpy import load_file

from muse_jax import cli
from tests.checkpoint.build import QUARK_FP8, QUARK_MXFP4, quark_copy
from tests.quark import LAYER, QUARK, RUNS, quark_run
from tests.reference.checks import row_errors

FOLDERS = {"fp8": QUARK_FP8, "mxfp4": QUARK_MXFP4}


@pytest.fixture
def command(capsys):
    def call(*args):
        code = cli.main([*map(str, args)])
        out, err = capsys.readouterr()
        return code, out, err

    return call


@pytest.mark.parametrize("run", RUNS)
@pytest.mark.parametrize("implementation", ["reference", "xla", "pallas"])
def test_dump_is_quarks_block(command, tmp_path, run, implementation):
    form, rule = RUNS[run]
    source, out = QUARK / f"moe_{run}.safetensors", tmp_path / "out.safetensors"
    options = ["--activation-rule", rule] if rule else []
    code, _, err = command(
        *("dump", FOLDERS[form], "--layer", LAYER, "--input", source, "--out", out),
        *("--implementation", implementation, *options),
    )
    assert code == 0, err
    ours, golden = load_file(out), quark_run(run)
    for name, value in golden.items():
        if name == "topk_ids":
            np.testing.assert_array_equal(ours[f"{LAYER}.topk_ids"], value)
        else:
            assert row_errors(ours[f"{LAYER}.{name}"], value).max() <= 2e-6, name


@pytest.mark.parametrize(
    "form, options, message",
    [
        ("fp8", ["--activation-rule", "even"], "activation_rule is 'even' and the weights are fp8"),
        ("mxfp4", ["--profile", "hf", "--dtype", "bfloat16"], "profile is 'hf' and the weights are quantized"),
    ],
)
def test_dump_refuses_in_one_sentence(command, tmp_path, form, options, message):
    source = QUARK / "moe_fp8.safetensors"
    code, _, err = command(
        *("dump", FOLDERS[form], "--layer", LAYER, "--input", source, "--out", tmp_path / "out.safetensors"),
        *("--implementation", "reference", *options),
    )
    assert code == 2
    assert message in err
    assert err.count("\n") == 1


def test_inspect_names_the_layers_that_conflict(command, tmp_path):
    settings = json.loads((QUARK / "config-variants" / "fp8_fused_source.json").read_text())
    folder = quark_copy(tmp_path / "ckpt", QUARK_FP8, edit_quantization=lambda old: (old.clear(), old.update(settings)))
    code, out, err = command("inspect", folder)
    assert code == 2
    assert "layer 3's experts are stored in BF16 (weights BF16), but quantization_config of" in out
    assert "has 2 layers whose tensors and quantization_config disagree: layer 0's experts" in err
    assert err.count("\n") == 1
    code, out, err = command("inspect", folder, "--json")
    layers = json.loads(out)["layers"]
    assert code == 2
    assert [layer["format"] for layer in layers] == ["bf16", "fp8", "fp8", "bf16"]
    assert [layer["conflict"] is None for layer in layers] == [False, True, True, False]


def test_inspect_refuses_another_quantizer(command, tmp_path):
    folder = quark_copy(tmp_path / "ckpt", QUARK_FP8, edit_quantization=lambda old: old.update(quant_method="gptq"))
    code, _, err = command("inspect", folder)
    assert code == 2
    assert "has quant_method 'gptq'; only AMD Quark's checkpoints, 'quark', can be loaded quantized" in err


def test_compare_replays_a_quantized_layer(command, tmp_path):
    source, out = QUARK / "moe_fp8.safetensors", tmp_path / "out.safetensors"
    dump = ("dump", QUARK_FP8, "--layer", LAYER, "--input", source, "--out", out, "--implementation", "reference")
    assert command(*dump)[0] == 0
    code, _, err = command("compare", out, source, "--checkpoint", QUARK_FP8)
    assert (code, err) == (0, "")
    code, _, err = command("compare", out, "--replay", "exact", "--checkpoint", QUARK_FP8)
    assert (code, err) == (0, "")
