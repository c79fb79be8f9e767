"""A GGUF file's tokenizer, converted without transformers, gives the ids that transformers gives."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tokenizers
from awkward_texts import random_texts
from gguf_files import byte_level_vocabulary, gemma_vocabulary, sentencepiece_vocabulary, write_gguf

from corespan.engine.model_files.gguf_tokenizer import convert_gguf_tokenizer
from corespan.engine.text.loading import load_tokenizer
from corespan.engine.text.tokenizer import Tokenizer

DIGITS_APART = tokenizers.pre_tokenizers.Sequence(
    [
        tokenizers.pre_tokenizers.Digits(individual_digits=True),
        tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False),
    ]
)


def converted(gguf_path: str | Path, folder: Path) -> Tokenizer:
    convert_gguf_tokenizer(gguf_path, folder)
    return load_tokenizer(str(folder))


def reference(gguf_path: str | Path) -> Any:
    from transformers import AutoTokenizer

    return AutoTokenizer.from_pretrained(str(Path(gguf_path).parent), gguf_file=Path(gguf_path).name)


@pytest.fixture(scope="module")
def smollm2_folder(smollm2_gguf: str, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("smollm2")
    convert_gguf_tokenizer(smollm2_gguf, folder)
    return folder


@pytest.fixture(scope="module")
def smollm2(smollm2_folder: Path) -> Tokenizer:
    return load_tokenizer(str(smollm2_folder))


@pytest.fixture(scope="module")
def smollm2_reference(smollm2_gguf: str) -> Any:
    """transformers' conversion, which leaves out of the original's pipeline that digits stand alone."""
    theirs = reference(smollm2_gguf)
    theirs.backend_tokenizer.pre_tokenizer = DIGITS_APART
    return theirs


def test_smollm2_ids_equal_transformers_on_2000_texts(smollm2: Tokenizer, smollm2_reference: Any) -> None:
    for text in random_texts(2000):
        assert smollm2.encode(text) == smollm2_reference(text)["input_ids"], repr(text)


def test_smollm2_decodes_as_transformers_does(smollm2: Tokenizer, smollm2_reference: Any) -> None:
    rng = np.random.default_rng(0)
    for _ in range(300):
        ids = rng.integers(0, len(smollm2), size=12).tolist()
        for skip in (True, False):
            expected = smollm2_reference.decode(ids, skip_special_tokens=skip)
            assert smollm2.decode(ids, skip_special_tokens=skip) == expected


def test_smollm2_special_tokens_and_template_are_those_of_the_file(smollm2: Tokenizer, smollm2_reference: Any) -> None:
    theirs = smollm2_reference
    assert (smollm2.bos_token_id, smollm2.eos_token_id) == (theirs.bos_token_id, theirs.eos_token_id)
    assert smollm2.chat_template == theirs.chat_template
    assert len(smollm2) == len(theirs)


def test_transformers_reads_the_converted_folder(smollm2_folder: Path, smollm2: Tokenizer) -> None:
    from transformers import AutoTokenizer

    (smollm2_folder / "config.json").write_text(json.dumps({"model_type": "llama"}))
    theirs = AutoTokenizer.from_pretrained(str(smollm2_folder))
    for text in random_texts(100, seed=2):
        assert smollm2.encode(text) == theirs(text)["input_ids"]


@pytest.mark.parametrize(
    ("text", "pieces"),
    [
        ("in 2024", ["in", "Ġ", "2", "0", "2", "4"]),
        ("a  1", ["a", "ĠĠ", "1"]),
        ("\n\n42.5%", ["ĊĊ", "4", "2", ".", "5", "%"]),
        ("x١٢", ["x", "Ù¡", "Ù¢"]),
    ],
)
def test_smollm2_takes_digits_one_by_one(smollm2: Tokenizer, text: str, pieces: list[str]) -> None:
    (backend,) = [value for value in vars(smollm2).values() if isinstance(value, tokenizers.Tokenizer)][:1]
    assert [piece for piece, _ in backend.pre_tokenizer.pre_tokenize_str(text)] == pieces


CUT = "Hi, wörld  204!\r\n  中文ab μ. it's "
LIKE_STARCODER = ["Hi", ",", " wörld", "  ", "2", "0", "4", "!", "\r\n ", " 中文ab", " μ", ".", " it", "'s", " "]
LIKE_CODER = ["Hi", ",", " wörld", "  ", "2", "0", "4", "!", "\r", "\n", " ", " ", "中文", "ab", " μ", ".", " it"]


@pytest.mark.parametrize(
    ("pre", "pieces"),
    [
        *((pre, LIKE_STARCODER) for pre in ("starcoder", "refact", "command-r", "smollm")),
        ("deepseek-coder", [*LIKE_CODER, "'", "s", " "]),
        # Its class of punctuation holds the letters of ASCII, and cuts words at others.
        ("deepseek-llm", ["Hi", ",", " w", "ö", "rld", *LIKE_CODER[3:10], "  ", *LIKE_CODER[12:], "'", "s", " "]),
    ],
)
def test_text_is_cut_as_the_original_tokenizer_cuts_it(pre: str, pieces: list[str], tmp_path: Path) -> None:
    path = write_gguf(tmp_path / "tiny.gguf", "llama", byte_level_vocabulary(pre), {})
    convert_gguf_tokenizer(path, tmp_path / "converted")
    backend = tokenizers.Tokenizer.from_file(str(tmp_path / "converted" / "tokenizer.json"))
    assert backend.pre_tokenizer is not None
    cut = [CUT[start:end] for _, (start, end) in backend.pre_tokenizer.pre_tokenize_str(CUT)]
    assert cut == pieces


def test_command_r_gives_the_ids_of_its_own_class(tmp_path: Path) -> None:
    from transformers import CohereTokenizer

    vocabulary = byte_level_vocabulary("command-r")
    path = write_gguf(tmp_path / "tiny.gguf", "llama", vocabulary, {})
    ours = converted(path, tmp_path / "converted")
    theirs = CohereTokenizer(
        vocab={token: index for index, token in enumerate(vocabulary["tokenizer.ggml.tokens"])},
        merges=[tuple(merge.split(" ")) for merge in vocabulary["tokenizer.ggml.merges"]],
        add_bos_token=False,
    )
    for text in [*random_texts(400, seed=1), "e\u0301te\u0301"]:
        if "<" in text:
            continue  # that may be a special token, which theirs was not told of
        assert ours.encode(text) == theirs.backend_tokenizer.encode(text, add_special_tokens=False).ids, repr(text)


VOCABULARIES = {
    "sentencepiece with merges": ("llama", sentencepiece_vocabulary(with_merges=True)),
    "sentencepiece by scores": ("llama", sentencepiece_vocabulary(with_merges=False)),
    "gemma": ("gemma3", gemma_vocabulary()),
    "qwen2": ("qwen2", byte_level_vocabulary("qwen2")),
    "llama3": ("llama", byte_level_vocabulary("llama-bpe", **{"tokenizer.ggml.add_bos_token": True})),
    "tekken": ("llama", byte_level_vocabulary("tekken", **{"tokenizer.ggml.add_eos_token": True})),
    "default": ("llama", byte_level_vocabulary("default")),
}


@pytest.mark.parametrize("name", VOCABULARIES)
def test_other_vocabularies_give_transformers_ids(name: str, tmp_path: Path) -> None:
    architecture, vocabulary = VOCABULARIES[name]
    rows = np.zeros((len(vocabulary["tokenizer.ggml.tokens"]), 16), dtype=np.float32)
    path = write_gguf(tmp_path / "tiny.gguf", architecture, vocabulary, {"token_embd.weight": rows})
    ours, theirs = converted(path, tmp_path / "converted"), reference(path)
    for text in [*random_texts(400, seed=1), "the  world\n\n<start_of_turn>the<s> <b>▁▁", "<mask>  \n   <eos>"]:
        assert ours.encode(text) == theirs(text)["input_ids"], repr(text)
    assert ours.all_special_ids == theirs.all_special_ids
    if theirs.chat_template is not None:
        chat = [{"role": "user", "content": " the  world "}, {"role": "assistant", "content": "er\n"}]
        for tokenize in (False, True):
            options = {"add_generation_prompt": True, "tokenize": tokenize, "return_dict": False}
            assert ours.apply_chat_template(chat, **options) == theirs.apply_chat_template(chat, **options)
    rng = np.random.default_rng(0)
    for _ in range(50):
        ids = rng.integers(0, len(ours), size=12).tolist()
        for skip in (True, False):
            assert ours.decode(ids, skip_special_tokens=skip) == theirs.decode(ids, skip_special_tokens=skip), ids


def test_every_named_chat_template_is_kept(tmp_path: Path) -> None:
    vocabulary = byte_level_vocabulary("qwen2")
    vocabulary["tokenizer.chat_template"] = "plain"
    vocabulary["tokenizer.chat_templates"] = ["tool_use"]
    vocabulary["tokenizer.chat_template.tool_use"] = "with tools"
    path = write_gguf(tmp_path / "tiny.gguf", "qwen2", vocabulary, {})
    assert converted(path, tmp_path / "converted").chat_template == {"default": "plain", "tool_use": "with tools"}


def test_a_kind_of_tokenizer_that_is_not_built_is_refused_by_name(tmp_path: Path) -> None:
    path = write_gguf(tmp_path / "tiny.gguf", "llama", {"tokenizer.ggml.model": "bert"}, {})
    with pytest.raises(ValueError, match="'bert'"):
        convert_gguf_tokenizer(path, tmp_path / "converted")


@pytest.mark.parametrize(
    ("kind", "change", "message"),
    [
        (
            "gpt2",
            {"tokenizer.ggml.pre": "chatglm-bpe"},
            "tokenizer.ggml.pre is 'chatglm-bpe'.* known are default, gpt-2",
        ),
        ("gpt2", {"tokenizer.ggml.merges": None}, "it has no tokenizer.ggml.merges"),
        ("gpt2", {"tokenizer.ggml.merges": ["ab"]}, "tokenizer.ggml.merges holds 'ab'"),
        ("gpt2", {"tokenizer.ggml.tokens": None}, "it has no tokenizer.ggml.tokens"),
        ("gpt2", {"tokenizer.ggml.tokens": [1, 2]}, "tokenizer.ggml.tokens is not a list of texts"),
        ("gpt2", {"tokenizer.ggml.token_type": [1, 1]}, "tokenizer.ggml.token_type has 2 entries"),
        ("gpt2", {"tokenizer.ggml.eos_token_id": 2**32 - 1}, "tokenizer.ggml.eos_token_id is 4294967295"),
        ("llama", {"tokenizer.ggml.tokens": None}, "it has no tokenizer.ggml.tokens"),
        ("llama", {"tokenizer.ggml.scores": None}, "it has neither tokenizer.ggml.merges nor tokenizer.ggml.scores"),
        ("llama", {"tokenizer.ggml.scores": [0.5]}, "it has neither tokenizer.ggml.merges nor tokenizer.ggml.scores"),
    ],
)
def test_a_vocabulary_that_cannot_be_converted_is_refused_by_its_key(
    tmp_path: Path, kind: str, change: dict[str, Any], message: str
) -> None:
    whole = byte_level_vocabulary("qwen2") if kind == "gpt2" else sentencepiece_vocabulary(with_merges=False)
    vocabulary = {key: value for key, value in (whole | change).items() if value is not None}
    path = write_gguf(tmp_path / "tiny.gguf", "llama", vocabulary, {})
    with pytest.raises(ValueError, match=rf"tiny\.gguf: {message}"):
        convert_gguf_tokenizer(path, tmp_path / "converted")


def test_a_file_that_does_not_say_how_to_cut_text_is_warned_of(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    vocabulary = byte_level_vocabulary("default")
    del vocabulary["tokenizer.ggml.pre"]
    path = write_gguf(tmp_path / "tiny.gguf", "llama", vocabulary, {})
    assert converted(path, tmp_path / "converted").encode("the") != []
    assert "does not say how text is cut into words (tokenizer.ggml.pre)" in caplog.text
