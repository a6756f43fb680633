"""`muse-jax doctor` on a CPU, and its verdict on machines this one is not."""

import json

import pytest

from muse_jax.cli import main
from muse_jax.cli.doctor import kernels_verdict


def test_json(capsys) -> None:
    assert main(["doctor", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["backend"] == "cpu"
    assert found["architecture"] is None
    assert found["default_implementation"] == "xla"
    assert found["versions"]["jax"]
    assert found["kernels"].startswith("no; ")


def test_table(capsys) -> None:
    assert main(["doctor"]) == 0
    out = capsys.readouterr().out
    assert "default implementation" in out
    assert "jaxlib" in out


@pytest.mark.parametrize(
    "backend, architecture, plugin, words",
    [
        ("cpu", None, None, "install `muse-jax[rocm]`: `jax[rocm]` does not exist"),
        ("cpu", None, "0.12.0", "The ROCm plugin 0.12.0 is installed but found no GPU"),
        (
            "gpu",
            "gfx942",
            "0.12.0",
            "yes; MI300X (gfx942), with tiles that compile without spills and have not been timed",
        ),
        ("gpu", "sm_90", None, "yes; H200 (sm_90)"),
        ("gpu", "gfx90a", "0.12.0", "perhaps; gfx90a is none of gfx942, gfx950, sm_90"),
    ],
)
def test_verdict(backend, architecture, plugin, words) -> None:
    assert words in kernels_verdict(backend, architecture, plugin)
