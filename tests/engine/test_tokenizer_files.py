"""Special tokens, added tokens and chat templates are found wherever transformers finds them."""

from pathlib import Path
from typing import Any

import pytest
from tiny_llama import write_tokenizer
from tokenizer_folders import add_to_tokenizer_json, added, both, edit

from corespan.engine.text.loading import load_tokenizer

MESSAGES = [{"role": "user", "content": "Hi there"}]
TEXTS = ["plain text", "a<|im_end|>b <new> c", "<image>x<video> <pad>", "re[PAD] <|endoftext|>", "</s> <unk> <extra_1>"]
CONFIG, MAP, ADDED = "tokenizer_config.json", "special_tokens_map.json", "added_tokens.json"
KINDS = ("bos", "eos", "unk", "pad", "sep", "cls", "mask")
AS_OBJECT = {"__type": "AddedToken", **added("<|im_end|>")}
UNTYPED = {key: value for key, value in added("<|im_end|>").items() if key != "special"}
LISTED = {"0": added("<s>"), "1": added("</s>"), "2": added("<|im_start|>"), "3": added("<|im_end|>")}

# Each case: what is written into which file, and what is dropped from tokenizer_config.json.
SPECIAL_TOKENS: dict[str, tuple[dict[str, dict[str, Any]], tuple[str, ...]]] = {
    "nothing but tokenizer.json's own": ({}, ("bos_token", "eos_token")),
    "the map alone": ({MAP: {"eos_token": "<|im_end|>", "pad_token": "</s>"}}, ("eos_token",)),
    "the map over the config": ({MAP: {"eos_token": "<|im_end|>"}}, ()),
    "the map with an object": ({MAP: {"eos_token": UNTYPED}}, ()),
    "the map beside a list of added tokens does not count": (
        {MAP: {"eos_token": "<|im_start|>"}, CONFIG: {"added_tokens_decoder": LISTED}},
        (),
    ),
    "null in the config": ({CONFIG: {"bos_token": None}}, ()),
    "an object in the config": ({CONFIG: {"eos_token": AS_OBJECT}}, ()),
    "new tokens in the list": (
        {CONFIG: {"added_tokens_decoder": {**LISTED, "512": added("<new>"), "513": added("<image>", special=False)}}},
        (),
    ),
    "flags in the list": ({CONFIG: {"added_tokens_decoder": {**LISTED, "3": added("<|im_end|>", lstrip=True)}}}, ()),
    "added_tokens.json": ({ADDED: {"<new>": 512, "<image>": 513}, CONFIG: {"pad_token": "<new>"}}, ()),
    "added_tokens.json beside a list does not count": (
        {ADDED: {"<new>": 512}, CONFIG: {"added_tokens_decoder": LISTED}},
        (),
    ),
    "extra tokens in a list": ({CONFIG: {"extra_special_tokens": ["<|im_end|>", "<new>"]}}, ()),
    "extra tokens as objects": ({CONFIG: {"extra_special_tokens": [AS_OBJECT, "<new>"]}}, ()),
    "extra tokens by name": ({CONFIG: {"extra_special_tokens": {"image_token": "<image>", "end": "<|im_end|>"}}}, ()),
    "extra tokens under their former name": ({CONFIG: {"additional_special_tokens": ["<|im_start|>", "<new>"]}}, ()),
    "both names": (
        {CONFIG: {"additional_special_tokens": ["<new>"], "extra_special_tokens": ["<|im_end|>"]}},
        (),
    ),
    "extra tokens in the map": ({MAP: {"additional_special_tokens": ["<|im_start|>", "<new>"]}}, ()),
    "extra tokens in both files": (
        {MAP: {"additional_special_tokens": ["<new>"]}, CONFIG: {"additional_special_tokens": ["<|im_end|>"]}},
        (),
    ),
    "extra tokens by name in the map": ({MAP: {"extra_special_tokens": {"image_token": "<image>"}}}, ()),
    "extra tokens in lists of both files": (
        {MAP: {"extra_special_tokens": ["<new>", "<image>"]}, CONFIG: {"extra_special_tokens": ["<new>"]}},
        (),
    ),
    "a token under a name of the model's own": ({CONFIG: {"image_token": "<image>", "add_bos_token": True}}, ()),
    "a plain word as a special token": ({CONFIG: {"pad_token": "re"}}, ()),
    "a token outside the vocabulary": ({CONFIG: {"pad_token": "[PAD]"}}, ()),
    "an unknown token": ({CONFIG: {"unk_token": "<unk>"}}, ()),
    "special tokens split": ({CONFIG: {"split_special_tokens": True}}, ()),
    "sides and lengths": (
        {CONFIG: {"padding_side": "left", "truncation_side": "left", "model_max_length": 77}},
        (),
    ),
    "a former name of the length": ({CONFIG: {"max_len": 99}}, ("model_max_length",)),
    "no length": ({}, ("model_max_length",)),
    "input names": ({CONFIG: {"model_input_names": ["input_ids", "token_type_ids", "attention_mask"]}}, ()),
    "no configuration": ({}, ("bos_token", "eos_token", "model_max_length", "tokenizer_class", "chat_template")),
}


def assert_same_tokenizer(ours: Any, theirs: Any) -> None:
    for name in (
        "special_tokens_map",
        "all_special_tokens",
        "all_special_ids",
        "extra_special_tokens",
        "chat_template",
        "padding_side",
        "truncation_side",
        "model_max_length",
        "model_input_names",
        "vocab_size",
        "added_tokens_encoder",
        *(f"{kind}_token" for kind in KINDS),
        *(f"{kind}_token_id" for kind in KINDS),
    ):
        assert getattr(ours, name) == getattr(theirs, name), name
    assert {i: repr(token) for i, token in ours.added_tokens_decoder.items()} == {
        i: repr(token) for i, token in theirs.added_tokens_decoder.items()
    }
    assert len(ours) == len(theirs) and ours.get_vocab() == theirs.get_vocab()
    for name in theirs.special_tokens_map:
        assert getattr(ours, name) == getattr(theirs, name)
        assert getattr(ours, f"{name}_id") == theirs.convert_tokens_to_ids(getattr(theirs, name))
    for text in TEXTS:
        token_ids = theirs.encode(text)
        assert ours.encode(text) == token_ids, text
        for skip in (True, False):
            assert ours.decode(token_ids, skip) == theirs.decode(token_ids, skip)


@pytest.mark.parametrize("case", SPECIAL_TOKENS)
def test_special_tokens_are_those_of_transformers(tmp_path: Path, case: str) -> None:
    files, dropped = SPECIAL_TOKENS[case]
    write_tokenizer(tmp_path)
    edit(tmp_path / CONFIG, dropped)
    for name, fields in files.items():
        edit(tmp_path / name, **fields)
    assert_same_tokenizer(*both(tmp_path))


def test_added_tokens_of_tokenizer_json_count(tmp_path: Path) -> None:
    write_tokenizer(tmp_path)
    add_to_tokenizer_json(tmp_path, added("<new>"), added("<image>", special=False))
    assert_same_tokenizer(*both(tmp_path))


def test_padding_and_truncation_of_tokenizer_json_give_sides_and_pad_token(tmp_path: Path) -> None:
    import tokenizers

    write_tokenizer(tmp_path)
    backend = tokenizers.Tokenizer.from_file(str(tmp_path / "tokenizer.json"))
    backend.enable_truncation(4, direction="left")
    backend.enable_padding(direction="left", pad_id=3, pad_token="<|im_end|>")
    backend.save(str(tmp_path / "tokenizer.json"))
    assert_same_tokenizer(*both(tmp_path))


@pytest.mark.parametrize("declared", ["LlamaTokenizerFast", "GPT2Tokenizer", "PreTrainedTokenizerFast", None])
@pytest.mark.parametrize("model_type", ["llama", "qwen2", "qwen3", "mistral"])
def test_a_class_brings_its_tokens_where_the_files_name_none(
    tmp_path: Path, declared: str | None, model_type: str
) -> None:
    write_tokenizer(tmp_path)
    edit(tmp_path / CONFIG, ("eos_token", "tokenizer_class"))
    if declared is not None:
        edit(tmp_path / CONFIG, tokenizer_class=declared)
    ours, theirs = both(tmp_path, model_type)
    assert ours.special_tokens_map == theirs.special_tokens_map
    assert ours.all_special_ids == theirs.all_special_ids
    assert len(ours) == len(theirs) and ours.padding_side == theirs.padding_side


def test_a_class_on_sentencepiece_brings_its_tokens_and_its_side(tmp_path: Path) -> None:
    from text_pipeline import byte_fallback_tokenizer

    byte_fallback_tokenizer(tmp_path)
    folder = tmp_path / "converted"
    edit(folder / CONFIG, ("bos_token", "eos_token", "unk_token"), tokenizer_class="LlamaTokenizer")
    ours, theirs = both(folder)
    assert ours.special_tokens_map == theirs.special_tokens_map and ours.padding_side == theirs.padding_side == "left"


def test_the_file_for_the_newest_version_counts(tmp_path: Path) -> None:
    write_tokenizer(tmp_path)
    (tmp_path / "tokenizer.4.0.0.json").write_text((tmp_path / "tokenizer.json").read_text())
    add_to_tokenizer_json(tmp_path, added("<new>"))
    for name in ("tokenizer.3.1.0.json", "tokenizer.99.0.json"):
        (tmp_path / name).write_text("{}")
    listed = ["tokenizer.json", "tokenizer.3.1.0.json", "tokenizer.4.0.0.json", "tokenizer.99.0.json"]
    edit(tmp_path / CONFIG, fast_tokenizer_files=listed)
    ours, theirs = both(tmp_path)
    assert len(ours) == len(theirs) == 512


@pytest.mark.parametrize(
    ("name", "fields", "reason"),
    [
        (CONFIG, {"eos_token": 5}, "eos_token must be a token's text .*got 5"),
        (CONFIG, {"extra_special_tokens": "<new>"}, "extra_special_tokens must hold tokens in a list .*'<new>'"),
        (CONFIG, {"extra_special_tokens": [7]}, r"extra_special_tokens\[0\] must be a token's text .*got 7"),
        (CONFIG, {"added_tokens_decoder": {"5": None}}, r"added_tokens_decoder\['5'\] must be .*got None"),
        (CONFIG, {"padding_side": "up"}, "padding_side must be 'left' or 'right', got 'up'"),
        (CONFIG, {"chat_template": 5}, "chat_template must be text or a list of named templates, got 5"),
        (CONFIG, {"chat_template": [{"name": "x"}]}, "needs a 'name' and a 'template'"),
        (MAP, {"eos_token": ["</s>"]}, "eos_token must be a token's text"),
    ],
)
def test_what_is_no_setting_is_refused_by_file_and_field(
    tmp_path: Path, name: str, fields: dict[str, Any], reason: str
) -> None:
    write_tokenizer(tmp_path, chat_template=None)
    edit(tmp_path / name, **fields)
    with pytest.raises(ValueError, match=f"{name}.*{reason}"):
        load_tokenizer(str(tmp_path))


NAMED = [{"name": name, "template": f"{{{{ 'the {name} one' }}}}"} for name in ("default", "rag")]
TEMPLATES: dict[str, tuple[dict[str, str], Any]] = {
    "none": ({}, None),
    "text in the config": ({}, "{{ 'config' }}"),
    "a list in the config": (
        {},
        [{"name": name, "template": f"{{{{ 'the {name} one' }}}}"} for name in ("default", "rag")],
    ),
    "a list without a default": ({}, NAMED[1:]),
    "a file": ({"chat_template.jinja": "{{ 'file' }}"}, None),
    "a file over the config": ({"chat_template.jinja": "{{ 'file' }}"}, "{{ 'config' }}"),
    "a file and named ones": (
        {"chat_template.jinja": "{{ 'file' }}", "additional_chat_templates/tool_use.jinja": "{{ 'tools' }}"},
        None,
    ),
    "named ones over the config": ({"additional_chat_templates/rag.jinja": "{{ 'the rag one' }}"}, "{{ 'config' }}"),
    "named ones with a default": ({"additional_chat_templates/default.jinja": "{{ 'named' }}"}, None),
}


@pytest.mark.parametrize("case", TEMPLATES)
def test_templates_are_those_of_transformers(tmp_path: Path, case: str) -> None:
    files, configured = TEMPLATES[case]
    write_tokenizer(tmp_path, chat_template=configured)
    (tmp_path / "additional_chat_templates").mkdir()
    for name, text in files.items():
        (tmp_path / name).write_text(text)
    ours, theirs = both(tmp_path)
    assert ours.chat_template == theirs.chat_template
    for name in (None, "default", "tool_use", "rag"):
        for tools in (None, [{"type": "function"}]):
            try:
                expected = theirs.apply_chat_template(MESSAGES, tools, chat_template=name, tokenize=False)
            except ValueError:
                expected = None
            if expected == name:  # transformers takes the name of a template that is not there for its text
                expected = None
                if name == "default" and isinstance(theirs.chat_template, str):
                    expected = theirs.apply_chat_template(MESSAGES, tools, tokenize=False)
            if expected is not None:
                assert ours.apply_chat_template(MESSAGES, tools, chat_template=name, tokenize=False) == expected
                continue
            with pytest.raises(ValueError, match="chat_template"):
                ours.apply_chat_template(MESSAGES, tools, chat_template=name, tokenize=False)


def test_a_processors_template_counts_where_there_is_no_other(tmp_path: Path) -> None:
    write_tokenizer(tmp_path, chat_template=None)
    edit(tmp_path / "chat_template.json", chat_template="{{ 'processor' }}")
    assert load_tokenizer(str(tmp_path)).apply_chat_template(MESSAGES, tokenize=False) == "processor"
    edit(tmp_path / CONFIG, chat_template="{{ 'config' }}")
    assert load_tokenizer(str(tmp_path)).apply_chat_template(MESSAGES, tokenize=False) == "config"


def test_a_template_may_be_named_by_its_files_path(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_tokenizer(tmp_path)
    file = tmp_path / "own.jinja"
    file.write_text("{{ messages[0].content }}!")
    tokenizer = load_tokenizer(str(tmp_path))
    monkeypatch.setenv("HOME", str(tmp_path))
    for path in (file, str(file), "~/own.jinja"):
        assert tokenizer.apply_chat_template(MESSAGES, chat_template=path, tokenize=False) == "Hi there!"
    file.write_bytes(b"\xff\xfe")
    with pytest.raises(ValueError, match=r"own\.jinja is not UTF-8"):
        tokenizer.apply_chat_template(MESSAGES, chat_template=file)


@pytest.mark.parametrize("wrong", ["missing.jinja", "/no/such/template", "tool_use", "", "x" * 5000])
def test_a_path_or_name_that_is_not_there_never_becomes_the_prompt(tmp_path: Path, wrong: str) -> None:
    write_tokenizer(tmp_path)
    tokenizer = load_tokenizer(str(tmp_path))
    with pytest.raises(ValueError, match=r"neither a template's text nor the path of a file.*\['default'\]"):
        tokenizer.apply_chat_template(MESSAGES, chat_template=wrong)
