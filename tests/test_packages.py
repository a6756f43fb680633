"""Which package may import what, and what the extras install."""

import ast
import re
import tomllib
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
FILES = sorted((ROOT / "muse_jax").rglob("*.py")) + sorted((ROOT / "pallas_kernels").rglob("*.py"))


def imports(file: Path) -> set[str]:
    """Every dotted module that a file imports, relative imports included as they are written."""
    found = set()
    for node in ast.walk(ast.parse(file.read_text())):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            found |= {f"{node.module}.{alias.name}" for alias in node.names} | {str(node.module)}
    return found


def under(modules: set[str], package: str) -> set[str]:
    return {name for name in modules if name == package or name.startswith(package + ".")}


@pytest.mark.parametrize("file", FILES, ids=lambda file: str(file.relative_to(ROOT)))
def test_imports_go_one_way(file: Path) -> None:
    modules = imports(file)
    if "pallas_kernels" in file.parts:
        assert not under(modules, "muse_jax")
        assert not under(modules, "flax")
    elif "reference" in file.parts:
        assert not under(modules, "jax")
        assert not under(modules, "pallas_kernels")
        assert not {name for name in under(modules, "muse_jax") if not name.startswith("muse_jax.reference")}
    if "pallas_kernels" not in file.parts:
        assert not under(modules, "jax.experimental.pallas"), "kernels live in pallas_kernels"
    if file.name != "peers.py":  # torch is a peer to be timed beside, and nothing else
        assert not under(modules, "torch")


def test_pallas_call_has_one_caller() -> None:
    callers = [file.name for file in FILES if re.search(r"\bpl\.pallas_call\(", file.read_text())]
    assert callers == ["_pallas.py"]


def test_rocm_extra_resolves_to_the_plugin() -> None:
    """`jax[rocm]` is no extra of jax: pip warns, and installs a CPU JAX."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    assert project["optional-dependencies"]["rocm"] == ["jax[rocm7-local]>=0.11.2,<0.13"]
    assert "jax>=0.11.2,<0.13" in project["dependencies"]
