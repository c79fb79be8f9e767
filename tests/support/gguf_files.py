"""Writes small GGUF files: a header, a vocabulary, and as few tensors as a test needs."""

from pathlib import Path
from typing import Any

import gguf
import numpy as np

_FIGURES: dict[str, Any] = {
    "context_length": 128,
    "embedding_length": 16,
    "block_count": 1,
    "feed_forward_length": 32,
    "attention.head_count": 2,
    "attention.head_count_kv": 1,
    "attention.layer_norm_rms_epsilon": 1e-5,
}
GEMMA_LIKE = (
    "{{ bos_token }}{% set turns, before = messages, '' %}{% if messages[0]['role'] == 'system' %}"
    "{% set turns, before = messages[1:], messages[0]['content'] + '\n\n' %}{% endif %}"
    "{% for turn in turns %}{% if (turn['role'] == 'user') != (loop.index0 is even) %}"
    "{{ raise_exception('the roles must take turns, the user first') }}{% endif %}"
    "{{ '<start_of_turn>' ~ ('model' if turn['role'] == 'assistant' else turn['role']) ~ '\n' }}"
    "{{ before if loop.first }}{% if turn['content'] is string %}{{ turn['content'] | trim }}"
    "{% else %}{% for part in turn['content'] if part['type'] == 'text' %}{{ part['text'] | trim }}{% endfor %}"
    "{% endif %}{{ '<end_of_turn>\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<start_of_turn>model\n' }}{% endif %}"
)
"""A chat template that does what Gemma's do."""
NORMAL, UNKNOWN, CONTROL, USER_DEFINED, BYTE = 1, 2, 3, 4, 6


def write_gguf(path: Path, architecture: str, extra: dict[str, Any], tensors: dict[str, np.ndarray]) -> Path:
    """`extra` holds metadata beside or in place of the figures every model has; lists, text, bools, ints and floats."""
    writer = gguf.GGUFWriter(path, architecture)
    figures = {f"{architecture}.{name}": value for name, value in _FIGURES.items()}
    for key, value in (figures | extra).items():
        if isinstance(value, list):
            writer.add_array(key, value)
        elif isinstance(value, bool):
            writer.add_bool(key, value)
        elif isinstance(value, int):
            writer.add_uint32(key, value)
        elif isinstance(value, float):
            writer.add_float32(key, value)
        else:
            writer.add_string(key, value)
    for name, tensor in tensors.items():
        writer.add_tensor(name, tensor)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def sentencepiece_vocabulary(with_merges: bool) -> dict[str, Any]:
    """A vocabulary of the llama kind: control tokens, all bytes, characters, and pieces built from them."""
    pieces = [
        "\u2581t",
        "he",
        "\u2581the",
        "in",
        "\u2581in",
        "er",
        "\u2581a",
        "on",
        "re",
        "\u2581\u2581",
        "or",
        "\u2581wor",
        "ld",
    ]
    characters = sorted(set("\u2581abcdefghijklmnopqrstuvwxyzTHE.,!?0123456789é"))
    tokens = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256)), *pieces, *characters, "<think>"]
    kinds = [UNKNOWN, CONTROL, CONTROL, *[BYTE] * 256, *[NORMAL] * (len(pieces) + len(characters)), USER_DEFINED]
    vocabulary: dict[str, Any] = {
        "tokenizer.ggml.model": "llama",
        "tokenizer.ggml.tokens": tokens,
        "tokenizer.ggml.scores": [float(-index) for index in range(len(tokens))],
        "tokenizer.ggml.token_type": kinds,
        "tokenizer.ggml.bos_token_id": 1,
        "tokenizer.ggml.eos_token_id": 2,
        "tokenizer.ggml.unknown_token_id": 0,
    }
    if with_merges:
        pairs = [
            "\u2581 t",
            "h e",
            "\u2581t he",
            "i n",
            "\u2581 in",
            "e r",
            "\u2581 a",
            "o n",
            "r e",
            "\u2581 \u2581",
            "o r",
            "l d",
        ]
        vocabulary["tokenizer.ggml.merges"] = pairs
    return vocabulary


def gemma_vocabulary() -> dict[str, Any]:
    """A vocabulary of Gemma's kind: runs of spaces and line ends, tags and `<s>` are tokens for the text as it stands;
    scores that do not rank the merges; no space before a text."""
    runs = ["\n", "\n\n", "\n\n\n", "\t", "\t\t", "  ", "   ", "    ", "<b>", "<s>", "</s>", "[multimodal]"]
    special = ["<pad>", "<eos>", "<bos>", "<unk>", "<mask>", "<start_of_turn>", "<end_of_turn>"]
    pieces = "he in er \u2581t \u2581the the \u2581a re or \u2581w \u2581wor \u2581world ld".split()
    characters = sorted(set("\u2581abcdefghijklmnopqrstuvwxyzTHE.,!?0123456789é<>/"))
    tokens = [*special, *runs, *(f"<0x{byte:02X}>" for byte in range(256)), *pieces, *characters]
    plain = len(pieces) + len(characters)
    kinds = [*[CONTROL] * len(special), *[USER_DEFINED] * len(runs), *[BYTE] * 256, *[NORMAL] * plain]
    return {
        "tokenizer.ggml.model": "llama",
        "tokenizer.ggml.pre": "default",
        "tokenizer.ggml.tokens": tokens,
        "tokenizer.ggml.scores": [-1000.0] * (len(tokens) - plain) + [float(index % 7) for index in range(plain)],
        "tokenizer.ggml.token_type": kinds,
        "tokenizer.ggml.bos_token_id": 2,
        "tokenizer.ggml.eos_token_id": 1,
        "tokenizer.ggml.unknown_token_id": 3,
        "tokenizer.ggml.padding_token_id": 0,
        "tokenizer.ggml.add_bos_token": True,
        "tokenizer.ggml.add_space_prefix": False,
        "tokenizer.chat_template": GEMMA_LIKE,
    }


def byte_level_vocabulary(pre: str, **flags: Any) -> dict[str, Any]:
    """A vocabulary of the gpt2 kind, cut before merging the way `pre` says; with one special token in plain text."""
    alphabet = list(bytes_to_unicode().values())
    merges = ["Ġ t", "h e", "Ġt he", "1 2", "12 3", "i n", "Ġ Ġ", "Ġ 1", "' s", "Ċ Ċ", "a b"]
    pieces = [merge.replace(" ", "") for merge in merges]
    tokens = [*alphabet, *pieces, "<|endoftext|>", "<|im_start|>", "<|im_end|>", "<tool call>"]
    kinds = [NORMAL] * (len(alphabet) + len(pieces)) + [CONTROL, CONTROL, CONTROL, USER_DEFINED]
    return {
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.pre": pre,
        "tokenizer.ggml.tokens": tokens,
        "tokenizer.ggml.token_type": kinds,
        "tokenizer.ggml.merges": merges,
        "tokenizer.ggml.bos_token_id": tokens.index("<|endoftext|>"),
        "tokenizer.ggml.eos_token_id": tokens.index("<|im_end|>"),
        **flags,
    }


def bytes_to_unicode() -> dict[int, str]:
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in printable]
    return {**{byte: chr(byte) for byte in printable}, **{byte: chr(0x100 + at) for at, byte in enumerate(others)}}
