"""JSON objects read strictly: UTF-8, one object at the top, no key given twice."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any


def parse_object(data: bytes, where: str) -> dict[str, Any]:
    """The JSON object in `data`; ValueError naming `where` when it is not UTF-8, not JSON, no object, or repeats a key.

    Python's extensions NaN and Infinity parse to floats: whoever reads a number checks that it is one.
    """
    try:
        value = json.loads(data.decode("utf-8"), object_pairs_hook=_unique_keys)
    except UnicodeDecodeError as error:
        raise ValueError(
            f"{where} is not UTF-8 text: byte {error.start} is {error.object[error.start]:#04x}"
        ) from error
    except RecursionError as error:
        raise ValueError(f"{where} is nested too deeply to be read") from error
    except ValueError as error:
        raise ValueError(f"{where} is not valid JSON: {error}") from error
    if not isinstance(value, dict):
        raise ValueError(f"{where} holds a JSON {type(value).__name__}; expected an object")
    return value


def read_object(path: Path) -> dict[str, Any]:
    """The JSON object in the file at `path`; OSError when it cannot be read, otherwise as `parse_object`."""
    return parse_object(path.read_bytes(), str(path))


def _unique_keys(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    result: dict[str, Any] = {}
    for key, value in pairs:
        if key in result:
            raise ValueError(f"the key {key!r} appears twice")
        result[key] = value
    return result
