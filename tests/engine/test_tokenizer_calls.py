"""Our tokenizer answers every call that people make as transformers' does, or refuses it by name."""

import copy
import json
import pickle
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tiny_llama import write_tokenizer
from tokenizer_folders import add_to_tokenizer_json, added, both, edit

from corespan.engine.text.tokenizer import Tokenizer

MESSAGES = [{"role": "user", "content": "Hi there"}, {"role": "assistant", "content": "Yes, 3.14"}]
TOOLS = [{"type": "function", "function": {"name": "f", "parameters": {}}}]
SHORT, LONG = (
    "The quick brown fox",
    "Once upon a time there was a little engine which could count: <|im_start|>x<new> y",
)
TEMPLATE = (
    "{{ bos_token }}{{ tools | length if tools }}{{ documents }}{% for message in messages %}{{ message.content }}"
    "{{ eos_token }}{% endfor %}{% if add_generation_prompt %}>{% endif %}"
)
BATCH = [SHORT, LONG, ""]
Call = Callable[[Any], Any]


def plus_tools(folder: Path) -> None:
    write_tokenizer(folder, chat_template=TEMPLATE)


def plus_added(folder: Path) -> None:
    write_tokenizer(folder)
    add_to_tokenizer_json(folder, added("<new>"), added("<image>", special=False, lstrip=True))
    edit(folder / "tokenizer_config.json", pad_token="<new>", unk_token="<|im_end|>", padding_side="left")


def plus_later(folder: Path) -> None:
    write_tokenizer(folder, add_bos=False)
    tokens = {"extra_special_tokens": ["<new>"], "image_token": "<image>", "pad_token": "[PAD]"}
    options = {"truncation_side": "left", "model_input_names": ["input_ids", "token_type_ids", "attention_mask"]}
    edit(folder / "tokenizer_config.json", ("model_max_length",), **tokens, **options)


@pytest.fixture(scope="module", params=["plain", "tools", "added", "later", "sentencepiece", "smollm2"])
def pair(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[Tokenizer, Any]:
    """Our tokenizer and transformers' of one folder."""
    folder = tmp_path_factory.mktemp(request.param)
    if request.param == "sentencepiece":
        from text_pipeline import byte_fallback_tokenizer

        byte_fallback_tokenizer(folder)
        edit(folder / "converted" / "tokenizer_config.json", chat_template=TEMPLATE)
        return both(folder / "converted", model_type="mistral")
    if request.param == "smollm2":
        from corespan.engine.model_files.gguf_tokenizer import convert_gguf_tokenizer

        convert_gguf_tokenizer(request.getfixturevalue("smollm2_gguf"), folder)
        return both(folder)
    writers = {"plain": write_tokenizer, "tools": plus_tools, "added": plus_added, "later": plus_later}
    writers[request.param](folder)
    return both(folder)


def ids(tokenizer: Any) -> list[int]:
    return [0, 5, 1, 40, 41, 2, 300, 3]


CALLS: dict[str, Call] = {
    # calling it
    "one text": lambda t: t(SHORT),
    "a batch": lambda t: t(BATCH),
    "a batch of one": lambda t: t([LONG]),
    "no special tokens": lambda t: t(BATCH, add_special_tokens=False),
    "a pair": lambda t: t(SHORT, LONG),
    "pairs": lambda t: t([SHORT, LONG], [LONG, SHORT]),
    "words": lambda t: t(["The", "quick"], is_split_into_words=True),
    "word lists": lambda t: t([["The", "quick"], ["fox"]], is_split_into_words=True),
    "cut": lambda t: t(BATCH, truncation=True, max_length=5),
    "cut by max_length alone": lambda t: t(LONG, max_length=4),
    "cut to the model's length": lambda t: t(LONG * 100, truncation=True),
    "cut, first only": lambda t: t(SHORT, LONG, truncation="only_second", max_length=60),
    "cut, not": lambda t: t(LONG, truncation=False, max_length=4),
    "cut with the rest": lambda t: t(LONG, truncation=True, max_length=6, stride=2, return_overflowing_tokens=True),
    "cut with the rests": lambda t: t(BATCH, max_length=6, return_overflowing_tokens=True, return_length=True),
    "masks and offsets": lambda t: t(BATCH, return_special_tokens_mask=True, return_offsets_mapping=True),
    "offsets of one": lambda t: t(LONG, return_offsets_mapping=True, return_length=True),
    "types": lambda t: t(BATCH, return_token_type_ids=True, return_attention_mask=False),
    "lengths": lambda t: t(BATCH, return_length=True),
    "arrays": lambda t: t(LONG, return_tensors="np"),
    "tensors": lambda t: {name: values.tolist() for name, values in t(LONG, return_tensors="pt").items()},
    "tensors moved": lambda t: t(LONG, return_tensors="pt").to("cpu").input_ids.tolist(),
    "decode tensors": lambda t: [t.decode(t(x, return_tensors="pt").input_ids) for x in (LONG, [LONG])],
    "a copy of it": lambda t: copy.deepcopy(t)(LONG, max_length=4),
    "sent to a process": lambda t: pickle.loads(pickle.dumps(t)).encode(LONG, max_length=4),
    "ragged arrays": lambda t: t([SHORT, LONG], return_tensors="np"),
    "special tokens split": lambda t: t(LONG, split_special_tokens=True),
    "quiet": lambda t: t(SHORT, verbose=False),
    "tokens of a call": lambda t: [t(BATCH).tokens(n) for n in range(3)],
    "words of a call": lambda t: [t(LONG).word_ids(), t(LONG).sequence_ids(), t(SHORT, LONG).sequence_ids()],
    "parts of a call": lambda t: [t(LONG).input_ids, t(LONG)["attention_mask"], t(BATCH)[1].ids, t(LONG).n_sequences],
    "keys of a call": lambda t: [sorted(t(LONG).keys()), "input_ids" in t(LONG), len(t(LONG)), t(LONG).is_fast],
    "spread of a call": lambda t: dict(**t(BATCH)),
    "copies of a call": lambda t: [dict(copy.copy(t(LONG))), dict(pickle.loads(pickle.dumps(t(LONG))))],
    # encode and tokenize
    "encode": lambda t: [t.encode(text) for text in BATCH],
    "encode bare": lambda t: [t.encode(text, add_special_tokens=False) for text in BATCH],
    "encode a pair": lambda t: t.encode(SHORT, LONG),
    "encode cut": lambda t: t.encode(LONG, truncation=True, max_length=3),
    "encode by position": lambda t: t.encode(SHORT, None, False),
    "encode as an array": lambda t: t.encode(SHORT, return_tensors="np"),
    "tokenize": lambda t: [t.tokenize(text) for text in BATCH],
    "tokenize with special ones": lambda t: t.tokenize(SHORT, add_special_tokens=True),
    "tokenize a pair": lambda t: t.tokenize(SHORT, LONG),
    # decode
    "decode": lambda t: t.decode(ids(t)),
    "decode without special tokens": lambda t: t.decode(ids(t), skip_special_tokens=True),
    "decode each": lambda t: [t.decode(token_id) for token_id in range(min(len(t), 520))],
    "decode an array": lambda t: [t.decode(np.array(ids(t))), t.decode(np.array([ids(t)])), t.decode(np.int64(5))],
    "decode a mix": lambda t: t.decode([5, np.int64(6), 7]),
    "decode a list of numpy ints": lambda t: t.decode(list(np.array(ids(t)))),
    "decode a tuple": lambda t: t.decode(tuple(ids(t))),
    "decode nothing": lambda t: t.decode([]),
    "decode a batch": lambda t: t.decode([ids(t), [], [7]]),
    "decode cleaned": lambda t: t.decode(ids(t), clean_up_tokenization_spaces=True),
    "decode what was called": lambda t: t.decode(t(LONG)["input_ids"]),
    "decode beyond the vocabulary": lambda t: t.decode([5, 10**6]),
    "batch_decode": lambda t: t.batch_decode([ids(t), [7], []]),
    "batch_decode without special tokens": lambda t: t.batch_decode([ids(t)], skip_special_tokens=True),
    "batch_decode nothing": lambda t: t.batch_decode([]),
    "batch_decode one": lambda t: t.batch_decode(ids(t)),
    "batch_decode what was called": lambda t: t.batch_decode(t(BATCH)["input_ids"]),
    "convert_tokens_to_string": lambda t: t.convert_tokens_to_string(t.tokenize(LONG)),
    # the vocabulary
    "tokens to ids": lambda t: t.convert_tokens_to_ids(["<s>", "<new>", "<image>", "[PAD]", "no such token", "a"]),
    "a token to an id": lambda t: [t.convert_tokens_to_ids(x) for x in ("<s>", "<new>", "no such token", "")],
    "ids to tokens": lambda t: t.convert_ids_to_tokens([*range(min(len(t), 600)), 10**6]),
    "ids to tokens without special ones": lambda t: t.convert_ids_to_tokens(range(200, 520), skip_special_tokens=True),
    "an id to a token": lambda t: [t.convert_ids_to_tokens(token_id) for token_id in (0, 5, 511, 10**6)],
    "ids to tokens of an array": lambda t: t.convert_ids_to_tokens(np.array([0, 5])),
    "sizes": lambda t: [t.vocab_size, len(t), bool(t)],
    "get_vocab": lambda t: [t.get_vocab(), t.vocab],
    "get_added_vocab": lambda t: list(t.get_added_vocab().items()),
    "added tokens": lambda t: [list(t.added_tokens_encoder.items()), [*map(repr, t.added_tokens_decoder.items())]],
    "all special": lambda t: [t.all_special_tokens, t.all_special_ids],
    "extra special": lambda t: [t.extra_special_tokens, t.extra_special_tokens_ids],
    "special_tokens_map": lambda t: list(t.special_tokens_map.items()),
    "bos and eos": lambda t: [t.bos_token, t.bos_token_id, t.eos_token, t.eos_token_id],
    "pad and unk": lambda t: [t.pad_token, t.pad_token_id, t.unk_token, t.unk_token_id, t.pad_token_type_id],
    "sep, cls and mask": lambda t: [t.sep_token, t.sep_token_id, t.cls_token, t.cls_token_id, t.mask_token_id],
    "a name of its own": lambda t: getattr(t, "image_token", None),
    "sides": lambda t: [t.padding_side, t.truncation_side, t.model_max_length, t.model_input_names, t.name_or_path],
    "switches": lambda t: [t.is_fast, t.clean_up_tokenization_spaces, t.split_special_tokens],
    "number of special tokens": lambda t: [t.num_special_tokens_to_add(), t.num_special_tokens_to_add(pair=True)],
    "backend": lambda t: t.backend_tokenizer.encode(LONG).ids,
    # conversations
    "chat": lambda t: t.apply_chat_template(MESSAGES),
    "chat ids": lambda t: t.apply_chat_template(MESSAGES, return_dict=False),
    "chat text": lambda t: t.apply_chat_template(MESSAGES, tokenize=False),
    "chat prompt": lambda t: t.apply_chat_template(MESSAGES[:1], tokenize=False, add_generation_prompt=True),
    "chat tools": lambda t: t.apply_chat_template(MESSAGES, TOOLS, [{"text": "d"}], tokenize=False),
    "chat goes on": lambda t: t.apply_chat_template(MESSAGES, continue_final_message=True, tokenize=False),
    "chats": lambda t: t.apply_chat_template([MESSAGES, MESSAGES[:1]]),
    "chat texts": lambda t: t.apply_chat_template([MESSAGES, MESSAGES[:1]], tokenize=False),
    "chat cut": lambda t: t.apply_chat_template(MESSAGES, truncation=True, max_length=4),
    "chat array": lambda t: t.apply_chat_template(MESSAGES, return_tensors="np", return_dict=False),
    "chat template": lambda t: t.apply_chat_template(
        MESSAGES, chat_template="{{ messages[0].content }}{{ eos_token }}"
    ),
    "chat variables": lambda t: t.apply_chat_template(
        MESSAGES, chat_template="{{ x }}{{ bos_token }}", x=5, bos_token=""
    ),
    "chat call options": lambda t: t.apply_chat_template(MESSAGES, tokenizer_kwargs={"return_length": True}),
    "get_chat_template": lambda t: [t.get_chat_template(), t.get_chat_template(tools=TOOLS), t.chat_template],
}

# These need a pad_token; where the folder names none, they set one, as people do.
PADDED: dict[str, Call] = {
    "padded": lambda t: t(BATCH, padding=True),
    "padded to a length": lambda t: t(BATCH, padding="max_length", max_length=40),
    "padded to the model's length": lambda t: t([SHORT], padding="max_length"),
    "padded and cut": lambda t: t(BATCH, padding="longest", truncation=True, max_length=6),
    "padded to a multiple": lambda t: t(BATCH, padding=True, pad_to_multiple_of=16),
    "padded on the left": lambda t: t(BATCH, padding=True, padding_side="left", return_special_tokens_mask=True),
    "padded on the right": lambda t: t(BATCH, padding=True, padding_side="right", return_token_type_ids=True),
    "padded arrays": lambda t: t(BATCH, padding=True, return_tensors="np"),
    "padded, one": lambda t: t(SHORT, padding="max_length", max_length=30),
    "not padded after all that": lambda t: [t(BATCH), t.encode(LONG)],
    "encode padded": lambda t: t.encode(SHORT, padding="max_length", max_length=24),
    "chat padded": lambda t: t.apply_chat_template([MESSAGES, MESSAGES[:1]], padding=True),
    "its ids": lambda t: [t.pad_token, t.pad_token_id, t.all_special_tokens, t.special_tokens_map],
}


def plain(value: Any) -> Any:
    """The answer as plain data, which knows no array from a list, but its type's name."""
    if isinstance(value, np.ndarray):
        return ["array", value.dtype.kind, [plain(part) for part in value] if value.dtype == object else value.tolist()]
    if hasattr(value, "keys"):
        return {key: plain(value[key]) for key in value.keys()}  # noqa: SIM118  a BatchEncoding iterates otherwise
    if isinstance(value, (list, tuple)):
        return [plain(part) for part in value]
    return value


@pytest.mark.parametrize("call", CALLS)
def test_calls_are_answered_as_by_transformers(pair: tuple[Tokenizer, Any], call: str) -> None:
    ours, theirs = pair
    assert plain(CALLS[call](ours)) == plain(CALLS[call](theirs))


@pytest.mark.parametrize("call", PADDED)
def test_padding_is_that_of_transformers(pair: tuple[Tokenizer, Any], call: str) -> None:
    answers = []
    for tokenizer in pair:
        before = tokenizer.pad_token
        if before is None:
            with pytest.raises(ValueError, match="pad"):
                tokenizer(BATCH, padding=True)
            tokenizer.pad_token = tokenizer.eos_token
        answers.append(plain(PADDED[call](tokenizer)))
        tokenizer.pad_token = before
    assert answers[0] == answers[1]


def test_special_tokens_are_set_by_text_or_id(pair: tuple[Tokenizer, Any]) -> None:
    answers = []
    for tokenizer in pair:
        before, template = tokenizer.pad_token, tokenizer.chat_template
        tokenizer.pad_token_id = 5
        tokenizer.chat_template = "{{ pad_token }}"
        text = tokenizer.apply_chat_template(MESSAGES, tokenize=False)
        answers.append([tokenizer.pad_token, tokenizer.pad_token_id, tokenizer.all_special_ids, text])
        tokenizer.pad_token, tokenizer.chat_template = before, template
        with pytest.raises(ValueError, match="pad_token"):
            tokenizer.pad_token = 5
    assert answers[0] == answers[1]


WRONG: dict[str, tuple[Call, type[Exception], str]] = {
    "ids as text": (lambda t: t([1, 2]), ValueError, "text must be a str or a list of them, got int"),
    "no text": (lambda t: t(None), ValueError, "text must be a str or a list of them, got NoneType"),
    "bytes": (lambda t: t.encode(b"x"), ValueError, "text must be a str or a list of them, got bytes"),
    "half a pair": (lambda t: t(["a", "b"], ["c"]), ValueError, "text_pair must be a list of as many texts"),
    "padding": (lambda t: t("a", padding="widest"), ValueError, "padding must be one of .*'widest'"),
    "truncation": (lambda t: t("a", truncation="all"), ValueError, "truncation must be one of .*'all'"),
    "max_length": (lambda t: t("a", max_length=-1), ValueError, "max_length must be .*-1"),
    "padding_side": (
        lambda t: t("a", padding_side="up"),
        ValueError,
        "padding_side must be 'left' or 'right', got 'up'",
    ),
    "tensors": (lambda t: t("a", return_tensors="tf"), ValueError, "return_tensors must be None, 'np' or 'pt'"),
    "ragged tensors": (lambda t: t(["a", SHORT], return_tensors="pt"), ValueError, "differ in length"),
    "no room": (lambda t: t("a", "b", max_length=1, truncation="only_first"), ValueError, "too short to respect"),
    "a lone surrogate": (lambda t: t(["a", "\ud800"]), ValueError, "lone surrogate"),
    "targets": (lambda t: t("a", text_target="b"), NotImplementedError, "does not support text_target"),
    "unknown option": (lambda t: t("a", colour="red"), TypeError, "colour"),
    "assistant mask": (
        lambda t: t.apply_chat_template(MESSAGES, return_assistant_tokens_mask=True),
        NotImplementedError,
        "does not support return_assistant_tokens_mask",
    ),
    "sanitised": (
        lambda t: t.apply_chat_template(MESSAGES, sanitize_control_tokens=True),
        NotImplementedError,
        "does not support sanitize_control_tokens",
    ),
    "a field to go on": (
        lambda t: t.apply_chat_template(MESSAGES, continue_final_message="reasoning"),
        NotImplementedError,
        "does not support continue_final_message",
    ),
    "a function as tool": (
        lambda t: t.apply_chat_template(MESSAGES, [print]),
        TypeError,
        "tools holds a value of type",
    ),
    **{
        name: (lambda t, name=name: getattr(t, name), AttributeError, f"no '{name}'.*AutoTokenizer.from_pretrained")
        for name in (
            "add_tokens",
            "add_special_tokens",
            "save_pretrained",
            "pad",
            "train_new_from_iterator",
            "image_id",
        )
    },
    "words of characters": (lambda t: t("a").char_to_token(0), AttributeError, "no 'char_to_token'.*encodings"),
}


@pytest.mark.parametrize("call", WRONG)
def test_what_is_not_done_is_refused_by_name(tmp_path: Path, call: str) -> None:
    tokenizer, _ = both(tmp_path)
    ask, error, reason = WRONG[call]
    with pytest.raises(error, match=reason):
        ask(tokenizer)


def test_a_class_without_a_fast_backend_answers_itself(tmp_path: Path) -> None:
    options = {"tokenizer_class": "ByT5Tokenizer", "eos_token": "</s>", "extra_special_tokens": ["<new>"]}
    edit(tmp_path / "tokenizer_config.json", **options, chat_template=TEMPLATE)
    edit(tmp_path / "config.json", model_type="t5")
    ours, theirs = both(tmp_path, model_type="t5", with_file=False)
    assert not ours.is_fast
    answered = 0
    for name, call in (CALLS | PADDED).items():
        try:
            expected = plain(call(theirs))
        except Exception:  # of offsets, words and the like such a class knows nothing
            continue
        assert plain(call(ours)) == expected, name
        answered += 1
    assert answered > 75


def test_files_of_an_older_kind_are_read_by_transformers(tmp_path: Path) -> None:
    write_tokenizer(tmp_path)
    model = json.loads((tmp_path / "tokenizer.json").read_text())["model"]
    (tmp_path / "tokenizer.json").unlink()
    (tmp_path / "vocab.json").write_text(json.dumps(model["vocab"]))
    (tmp_path / "merges.txt").write_text("#version: 0.2\n" + "\n".join(map(" ".join, model["merges"])) + "\n")
    edit(tmp_path / "tokenizer_config.json", tokenizer_class="GPT2Tokenizer", unk_token="</s>")
    ours, theirs = both(tmp_path, with_file=False)
    assert ours.is_fast
    for name, call in CALLS.items():
        assert plain(call(ours)) == plain(call(theirs)), name


def test_cutting_and_padding_in_one_thread_does_not_touch_another(tmp_path: Path) -> None:
    plus_added(tmp_path)
    tokenizer, _ = both(tmp_path)
    whole, cut = tokenizer.encode(LONG), tokenizer.encode(LONG, max_length=4)
    begin = threading.Barrier(2)
    seen: list[list[int]] = []

    def cut_and_pad() -> None:
        begin.wait()
        for n in range(200):
            tokenizer(LONG, padding="max_length", truncation=True, max_length=4 + n % 30)

    thread = threading.Thread(target=cut_and_pad)
    thread.start()
    begin.wait()
    for _ in range(200):
        seen += [tokenizer.encode(LONG), tokenizer.encode(LONG, max_length=4)]
    thread.join()
    assert seen == [whole, cut] * 200
