"""Reads and writes the JSON objects of a model's folder. Used by whoever reads a model's files."""

import json
import os
from pathlib import Path
from typing import Any


def read_json(path: Path) -> dict[str, Any]:
    """Raises OSError, or ValueError naming the file, where it does not hold a JSON object."""
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise ValueError(f"{path} is not valid JSON: {error}") from error
    if not isinstance(content, dict):
        raise ValueError(f"{path} must hold a JSON object, not {type(content).__name__}")
    return content


def read_json_if_there(path: Path) -> dict[str, Any]:
    """The same; an empty dict where there is no such file."""
    return read_json(path) if path.is_file() else {}


def write_json(path: Path, content: dict[str, Any]) -> None:
    path.write_text(json.dumps(content, indent=2) + os.linesep, encoding="utf-8")
