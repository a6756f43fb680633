"""A folder that appears complete or not at all: filled beside its place under a hidden name, then renamed."""

from __future__ import annotations

import contextlib
import os
import shutil
import uuid
from collections.abc import Iterator
from pathlib import Path


@contextlib.contextmanager
def new_folder(path: str | Path) -> Iterator[Path]:
    """Gives an empty hidden folder beside `path`, which becomes `path` at the end and is removed upon an error.

    Raises FileExistsError when `path` exists (an empty folder is replaced).
    """
    path = Path(path)
    if path.exists() and not (path.is_dir() and not any(path.iterdir())):
        raise FileExistsError(f"{path} already exists; choose another folder or remove it")
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_name(f".{path.name}.{uuid.uuid4().hex}")
    temporary.mkdir()
    try:
        yield temporary
        os.rename(temporary, path)
    except BaseException:
        shutil.rmtree(temporary, ignore_errors=True)
        raise
