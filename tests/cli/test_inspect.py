"""`muse-jax inspect`: the table, the JSON, the exit code, and the sentence when something is wrong."""

from __future__ import annotations

import json
import shlex
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from muse_jax import cli
from tests.checkpoint.build import HF_TINY, MLP, QUARK_MXFP4, build

ROOT = Path(__file__).parents[2]


@pytest.fixture
def inspect(monkeypatch, capsys):
    monkeypatch.setattr(cli, "COMMANDS", ("inspect",))

    def call(*args):
        code = cli.main(["inspect", *map(str, args)])
        out, err = capsys.readouterr()
        return code, out, err

    return call


def test_complete_checkpoint(inspect):
    code, out, err = inspect(HF_TINY)
    assert (code, err) == (0, "")
    assert "D=128 H=64 F=96 E=16 K=4" in out
    assert "1,588,600 BF16, 8,256 F32" in out
    assert out.count("[16, 192, 64]") == out.count("[16, 64, 96]") == 4


def test_quantized_checkpoint(inspect):
    code, out, err = inspect(QUARK_MXFP4)
    assert (code, err) == (0, "")
    rows = [line.split() for line in out.splitlines() if line[:1].isdigit() and "expert" in line]
    assert [(row[1], row[2]) for row in rows] == [
        ("sliding", "bf16"),
        ("sliding", "mxfp4"),
        ("sliding", "mxfp4"),
        ("full", "bf16"),
    ]
    assert "32 of [96, 32]" in out


def test_json(inspect):
    code, out, err = inspect(QUARK_MXFP4, "--json")
    value = json.loads(out)
    assert (code, err) == (0, "")
    assert value["config"]["model_width"] == 128
    assert [layer["format"] for layer in value["layers"]] == ["bf16", "mxfp4", "mxfp4", "bf16"]
    assert value["complete"] is True


@pytest.mark.parametrize("options", [(), ("--json",)])
def test_incomplete_checkpoint_is_shown_then_refused(inspect, tmp_path, options):
    def edit(tensors):
        del tensors[MLP.format(1) + "gate.weight"]
        tensors[MLP.format(0) + "extra[red]"] = np.zeros(2, np.float32)
        tensors[MLP.format(9) + "gate.weight"] = np.zeros(2, np.float32)

    code, out, err = inspect(build(tmp_path / "ckpt", edit=edit), *options)
    assert code == 2
    for name in (MLP.format(1) + "gate.weight", MLP.format(0) + "extra[red]", MLP.format(9) + "gate.weight"):
        assert name in out
    assert err.count("\n") == 1
    assert "model.safetensors has tensors that are not as its config.json asks: 1 missing, 2 stray" in err


@pytest.mark.parametrize("wrong", ["no folder", "no tensors", "no config", "truncated"])
def test_unreadable_checkpoints_are_one_sentence(inspect, tmp_path, wrong):
    folder = build(tmp_path / "ckpt")
    file = folder / "model.safetensors"
    if wrong == "no folder":
        folder = tmp_path / "nowhere"
    elif wrong == "no tensors":
        file.unlink()
    elif wrong == "no config":
        (folder / "config.json").unlink()
    else:
        file.write_bytes(file.read_bytes()[:-1])
    code, out, err = inspect(folder)
    assert (code, out) == (2, "")
    assert err.startswith("muse-jax inspect: ")
    assert str(folder) in err
    assert err.count("\n") == 1


def test_drawn_table_on_a_terminal(inspect, monkeypatch):
    monkeypatch.setenv("COLUMNS", "100")
    monkeypatch.setattr("sys.stdout.isatty", lambda: True)
    code, out, _ = inspect(HF_TINY)
    assert code == 0
    assert "───" in out
    assert out.count("consolidated") == 4


def test_help_ends_with_an_example_that_works(inspect, capsys):
    with pytest.raises(SystemExit) as stop:
        cli.main(["inspect", "--help"])
    assert stop.value.code == 0
    example = shlex.split(capsys.readouterr().out.splitlines()[-1])
    assert example[0] == "muse-jax"
    program = "import sys; from muse_jax import cli; cli.COMMANDS = ('inspect',); sys.exit(cli.main(sys.argv[1:]))"
    done = subprocess.run([sys.executable, "-c", program, *example[1:]], cwd=ROOT, capture_output=True, text=True)
    assert (done.returncode, done.stderr) == (0, "")


def test_jax_is_not_imported():
    program = "import sys, muse_jax.cli.inspect; sys.exit('jax' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", program], cwd=ROOT, check=False).returncode == 0
