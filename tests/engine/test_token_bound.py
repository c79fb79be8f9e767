"""How few tokens a text can have: never more than it has, and known for the tokenizers that models come with."""

import json
import random
from pathlib import Path
from typing import Any

import pytest
from awkward_texts import random_texts
from tiny_llama import write_tokenizer

from corespan.engine.model_files.model_source import resolve_model
from corespan.engine.text.loading import load_tokenizer
from corespan.engine.text.tokenizer import Tokenizer

SPLIT = {"type": "Split", "pattern": {"Regex": r"\p{N}"}, "behavior": "Isolated", "invert": False}
BYTE_LEVEL = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": True}
SHRUNK_BY_NFC = ["\u1fbe\u0344" * 9, "\u03b1\u0313\u0300\u0345" * 9, "\u1112\u1175\u11c2" * 9, "\u212a\u1fef" * 9]


def changed(folder: Path, change: dict[str, Any]) -> Tokenizer:
    """The tiny model's tokenizer, longest token 12 bytes, with other parts."""
    write_tokenizer(folder)
    path = folder / "tokenizer.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | change))
    return load_tokenizer(str(folder))


def with_byte_fallback(folder: Path, **change: Any) -> Tokenizer:
    """A tokenizer of the sentencepiece kind: spaces are spelled out, unknown characters are byte tokens."""
    tokens = ["<unk>", *(f"<0x{byte:02X}>" for byte in range(256)), "\u2581", "a", "aa", "aaaa", "\u2581a"]
    model = {
        "type": "BPE",
        "unk_token": "<unk>",
        "fuse_unk": True,
        "byte_fallback": True,
        "vocab": {token: token_id for token_id, token in enumerate(tokens)},
        "merges": [["a", "a"], ["aa", "aa"], ["\u2581", "a"]],
    }
    replace = {"type": "Replace", "pattern": {"String": " "}, "content": "\u2581"}
    prepend = {"type": "Prepend", "prepend": "\u2581"}
    parts = {
        "normalizer": {"type": "Sequence", "normalizers": [prepend, replace]},
        "pre_tokenizer": None,
        "post_processor": None,
        "added_tokens": [],
        "model": model,
    }
    return changed(folder, {**parts, **change})


def check_bound(tokenizer: Tokenizer, texts: list[str]) -> None:
    for text in texts:
        assert tokenizer.fewest_tokens(text) <= len(tokenizer.encode(text, add_special_tokens=False)), text


@pytest.mark.parametrize(
    ("change", "expected"),
    [
        ({}, 100),
        ({"pre_tokenizer": {"type": "Sequence", "pretokenizers": [SPLIT, BYTE_LEVEL]}}, 100),
        ({"normalizer": {"type": "NFC"}}, 25),
    ],
)
def test_a_byte_level_text_has_a_token_for_each_length_of_the_longest(
    tmp_path: Path, change: dict[str, Any], expected: int
) -> None:
    tokenizer = changed(tmp_path, change)

    assert tokenizer.fewest_tokens("word " * 240) == expected
    check_bound(tokenizer, [*random_texts(60, seed=4), *SHRUNK_BY_NFC, *(token * 5 for token in tokenizer.get_vocab())])


def test_a_text_of_bytes_that_the_vocabulary_lacks_may_have_no_token() -> None:
    folder = resolve_model("smollm2-135m").tokenizer_dir
    assert folder is not None
    tokenizer = load_tokenizer(folder)
    lacking = "\x04\x06\x13"
    assert tokenizer.encode(lacking * 1000) == []

    assert tokenizer.fewest_tokens(lacking * 1000) == 0
    assert tokenizer.fewest_tokens("ab" + lacking * 1000) == 1
    assert tokenizer.fewest_tokens("word " * 200_000) > 12_000
    longest = sorted(tokenizer.get_vocab(), key=len)[-50:]
    spelled = [tokenizer.decode([token_id] * 3) for token_id in tokenizer.convert_tokens_to_ids(longest) if token_id]
    check_bound(tokenizer, [*spelled, *random_texts(60, seed=5), lacking, *random.Random(6).choices(spelled, k=9)])


def test_a_text_with_byte_fallback_has_a_token_for_each_length_of_the_longest(tmp_path: Path) -> None:
    tokenizer = with_byte_fallback(tmp_path)

    assert tokenizer.fewest_tokens("a" * 60) == 10  # the longest spelling is that of a byte, <0x0A>
    check_bound(tokenizer, [*random_texts(60, seed=7), "a" * 60, " a" * 40, "\u2581" * 40])


@pytest.mark.parametrize(
    "change",
    [
        {"normalizer": {"type": "Strip", "strip_left": True, "strip_right": True}},
        {"normalizer": {"type": "Sequence", "normalizers": [{"type": "NFC"}, {"type": "Lowercase"}]}},
        {"normalizer": {"type": "Replace", "pattern": {"String": "aa"}, "content": "a"}},
        {"normalizer": {"type": "Replace", "pattern": {"Regex": " +"}, "content": " "}},
        {"pre_tokenizer": {"type": "Whitespace"}},
        {"pre_tokenizer": {"type": "Sequence", "pretokenizers": [{**SPLIT, "behavior": "Removed"}, BYTE_LEVEL]}},
    ],
)
def test_nothing_is_known_where_text_may_be_dropped(tmp_path: Path, change: dict[str, Any]) -> None:
    for name, make in (
        ("byte-level", changed),
        ("fallback", lambda folder, parts: with_byte_fallback(folder, **parts)),
    ):
        (folder := tmp_path / name).mkdir()
        assert make(folder, change).fewest_tokens("word " * 1000) == 0
