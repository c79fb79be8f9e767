"""Tokenizer folders written as people have them, and transformers' tokenizer of the same folder beside ours."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

from tiny_llama import write_tokenizer

from corespan.engine.text.loading import load_tokenizer
from corespan.engine.text.tokenizer import Tokenizer

Write = Callable[[Path], None]


def edit(path: Path, drop: tuple[str, ...] = (), **fields: Any) -> None:
    """Changes a JSON object in a file, or begins one."""
    content = json.loads(path.read_text()) if path.is_file() else {}
    path.write_text(json.dumps({key: value for key, value in (content | fields).items() if key not in drop}))


def both(folder: Path, model_type: str | None = "llama", with_file: bool = True) -> tuple[Tokenizer, Any]:
    """Our tokenizer of the folder and transformers'. `model_type`: what its config.json says. `with_file`: write a
    tokenizer.json where there is none."""
    from transformers import AutoTokenizer

    if with_file and not (folder / "tokenizer.json").is_file():
        write_tokenizer(folder)
    edit(folder / "config.json", model_type=model_type)
    return load_tokenizer(str(folder)), AutoTokenizer.from_pretrained(str(folder))


def added(content: str, **flags: Any) -> dict[str, Any]:
    """A token as `added_tokens_decoder` lists it."""
    defaults = {"lstrip": False, "rstrip": False, "single_word": False, "normalized": False, "special": True}
    return {"content": content, **defaults, **flags}


def add_to_tokenizer_json(folder: Path, *tokens: dict[str, Any]) -> None:
    path = folder / "tokenizer.json"
    content = json.loads(path.read_text())
    first = len(content["model"]["vocab"])
    content["added_tokens"] += [{"id": first + n, **token} for n, token in enumerate(tokens)]
    path.write_text(json.dumps(content))
