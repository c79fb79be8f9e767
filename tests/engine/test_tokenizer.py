"""Tokenizers from a model's folder: what its configuration says counts, and torch stays out of it."""

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from awkward_texts import random_texts
from tiny_llama import write_tokenizer

from corespan.engine.text.detokenizer import SlowStream
from corespan.engine.text.loading import get_tokenizer, load_tokenizer
from corespan.engine.text.transformers_tokenizer import TransformersTokenizer
from corespan.protocol.config import ModelConfig

MESSAGES = [{"role": "user", "content": "x"}]


def edit_config(folder: Path, **fields: Any) -> None:
    path = folder / "tokenizer_config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | fields))


def reference(folder: Path) -> Any:
    from transformers import AutoTokenizer

    (folder / "config.json").write_text('{"model_type": "llama"}')
    return AutoTokenizer.from_pretrained(str(folder))


@pytest.mark.parametrize(
    "fields",
    [
        {},
        {"add_bos_token": False},
        {"add_bos_token": True, "add_eos_token": True},
        {"bos_token": {"__type": "AddedToken", "content": "<s>", "lstrip": False, "special": True}},
        {"pad_token": "re"},
        {"pad_token": "[PAD]"},
        {"unk_token": "[not in the vocabulary]"},
    ],
)
def test_encoding_and_decoding_equal_transformers(tmp_path: Path, fields: dict[str, Any]) -> None:
    write_tokenizer(tmp_path)
    edit_config(tmp_path, **fields)
    ours, theirs = load_tokenizer(str(tmp_path)), reference(tmp_path)
    for text in random_texts(60, seed=3):
        token_ids = ours.encode(text)
        assert token_ids == theirs(text)["input_ids"], repr(text)
        assert ours.encode(text, add_special_tokens=False) == theirs(text, add_special_tokens=False)["input_ids"]
        for skip in (True, False):
            assert ours.decode(token_ids, skip_special_tokens=skip) == theirs.decode(
                token_ids, skip_special_tokens=skip
            )
    assert (ours.bos_token_id, ours.eos_token_id) == (theirs.bos_token_id, theirs.eos_token_id)
    assert (ours.bos_token, ours.eos_token) == (theirs.bos_token, theirs.eos_token)


def test_truncation_and_padding_kept_in_the_file_do_not_apply(tmp_path: Path) -> None:
    import tokenizers

    write_tokenizer(tmp_path)
    backend = tokenizers.Tokenizer.from_file(str(tmp_path / "tokenizer.json"))
    backend.enable_truncation(4)
    backend.enable_padding(length=6)
    backend.save(str(tmp_path / "tokenizer.json"))
    tokenizer = load_tokenizer(str(tmp_path))
    assert tokenizer.decode(tokenizer.encode("a rather long text, longer than four tokens")).endswith("four tokens")
    assert len(tokenizer.encode("a")) == 2


@pytest.mark.parametrize("text", ["\ud800", "ok \udfff ok", "\udc00" * 3])
def test_lone_surrogates_are_refused_with_their_place(tmp_path: Path, text: str) -> None:
    write_tokenizer(tmp_path)
    with pytest.raises(ValueError, match="surrogate"):
        load_tokenizer(str(tmp_path)).encode(text)


def test_a_damaged_tokenizer_file_is_named(tmp_path: Path) -> None:
    (tmp_path / "tokenizer.json").write_text('{"model": ')
    with pytest.raises(ValueError, match=r"tokenizer\.json"):
        load_tokenizer(str(tmp_path))


def test_an_engine_without_tokenizer_has_none() -> None:
    config = ModelConfig(model="/x", served_model_name="x", tokenizer=None, hf_config={}, max_model_len=8)
    assert get_tokenizer(config) is None


def test_neither_torch_nor_transformers_is_loaded(tmp_path: Path) -> None:
    write_tokenizer(tmp_path)
    edit_config(tmp_path, pad_token="</s>")
    script = (
        "import sys\n"
        "from corespan.engine.text.loading import load_tokenizer\n"
        "import corespan.engine.requests.input_processor, corespan.engine.outputs.output_processor\n"
        f"tokenizer = load_tokenizer({str(tmp_path)!r})\n"
        "tokenizer.apply_chat_template([{'role': 'user', 'content': 'hi'}])\n"
        "tokenizer(['a', 'b c'], padding='max_length', truncation=True, max_length=4, return_tensors='np')\n"
        "tokenizer.batch_decode([[5], [6]]), tokenizer.all_special_ids, tokenizer.get_added_vocab()\n"
        "print(sorted({'torch', 'transformers'} & set(sys.modules)))"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


@pytest.fixture
def byte_tokenizer(tmp_path: Path) -> TransformersTokenizer:
    """A class of transformers without a fast backend; its tokens are the bytes of the text."""
    (tmp_path / "config.json").write_text('{"model_type": "t5"}')
    (tmp_path / "tokenizer_config.json").write_text('{"tokenizer_class": "ByT5Tokenizer", "eos_token": "</s>"}')
    tokenizer = load_tokenizer(str(tmp_path))
    assert isinstance(tokenizer, TransformersTokenizer) and not tokenizer.is_fast
    return tokenizer


def test_a_folder_without_tokenizer_json_falls_back_on_transformers(byte_tokenizer: TransformersTokenizer) -> None:
    token_ids = byte_tokenizer.encode("ďá 日", add_special_tokens=False)
    assert byte_tokenizer.decode(token_ids) == "ďá 日"
    assert byte_tokenizer.eos_token_id == byte_tokenizer.encode("x")[-1]
    assert byte_tokenizer.max_token_id >= 258 and len(byte_tokenizer) > 258


def test_the_fallback_streams_whole_characters(byte_tokenizer: TransformersTokenizer) -> None:
    text = "ďábel 👩‍👩‍👧 日本 ok"
    token_stream = SlowStream(byte_tokenizer, [], skip_special_tokens=True)
    pieces = [token_stream.step(token) for token in byte_tokenizer.encode(text, add_special_tokens=False)]
    assert "".join(pieces) + token_stream.flush() == text
    assert all(not piece.endswith("\ufffd") for piece in pieces)
