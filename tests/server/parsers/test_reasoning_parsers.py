"""Reasoning told from content, wherever the prompt left off and however the text is cut."""

import random

import pytest

from corespan.server.parsers.base import AnswerParser, Delta
from corespan.server.parsers.registry import (
    guess_reasoning_parser,
    guess_tool_parser,
    reasoning_parser_class,
    tool_parser_class,
)

CASES = [
    ("qwen3", "<|im_start|>assistant\n", "<think>\nhm\n</think>\n\nYes", "hm", "Yes"),
    ("qwen3", "<|im_start|>assistant\n<think>\n", "hm\n</think>\n\nYes", "hm", "Yes"),
    ("qwen3", "<|im_start|>assistant\n<think>\n\n</think>\n\n", "Yes </think>", "", "Yes </think>"),
    ("qwen3", "<|im_start|>assistant\n", "Yes <think>", "", "Yes <think>"),
    ("qwen3", "<think>", "never ends\n\n", "never ends\n\n", ""),
    ("qwen3", "", "<think></think>x", "", "x"),
    ("deepseek_r1", "<｜Assistant｜>", "a\nb</think>c", "a\nb", "c"),
    ("deepseek_r1", "<｜Assistant｜>", "<think>a</think>c", "a", "c"),
    ("mistral", "", "[THINK]a < b[/THINK]c", "a < b", "c"),
    (
        "gpt_oss",
        "<|start|>assistant",
        "<|channel|>analysis<|message|>a < b<|end|><|start|>assistant<|channel|>final<|message|>Yes <|return|>",
        "a < b",
        "Yes ",
    ),
    ("gpt_oss", "<|start|>assistant<|channel|>final<|message|>It", " is", "", " is"),
    ("gpt_oss", "<|start|>assistant<|channel|>analysis<|message|>", "hm", "hm", ""),
    ("gpt_oss", "", "plain", "", "plain"),
    ("granite", "", "Here is my thought process:\nhm\nHere is my response:\nYes", "hm", "Yes"),
]


@pytest.mark.parametrize(("name", "prompt", "text", "reasoning", "content"), CASES)
def test_any_cut_gives_the_same(name: str, prompt: str, text: str, reasoning: str, content: str) -> None:
    generator = random.Random(text)
    for way in range(60):
        cuts = sorted(generator.sample(range(len(text) + 1), min(len(text), way // 6)))
        parser = reasoning_parser_class(name)(prompt)
        total = Delta()
        for start, end in zip([0, *cuts], [*cuts, len(text)], strict=True):
            total.add(parser.feed(text[start:end]))
        total.add(parser.finish())
        assert (total.reasoning, total.content) == (reasoning, content), cuts


@pytest.mark.parametrize("reasoning", ["gpt_oss", None])
def test_harmony_tells_thoughts_calls_and_content_apart(reasoning: str | None) -> None:
    text = (
        "<|channel|>analysis<|message|>hm<|end|>"
        '<|start|>assistant<|channel|>commentary to=functions.f <|constrain|>json<|message|>{"a": 1}<|call|>'
        "<|start|>assistant<|channel|>commentary to=functions.g<|message|>{}<|call|>"
        "<|start|>assistant<|channel|>final<|message|>Done<|return|>"
    )
    for size in (1, 2, 3, 7, 20, len(text)):
        thinker = None if reasoning is None else reasoning_parser_class(reasoning)("<|start|>assistant")
        parser = AnswerParser(thinker, tool_parser_class("openai")())
        total = Delta()
        for start in range(0, len(text), size):
            total.add(parser.feed(text[start : start + size]))
        total.add(parser.finish())
        assert (total.reasoning, total.content) == ("hm", "Done"), size
        assert [(call.name, call.arguments) for call in total.calls] == [("f", '{"a": 1}'), ("g", "{}")]


def test_parsers_are_guessed_from_templates() -> None:
    assert guess_tool_parser("... <tool_call>{{ call }}</tool_call>") == "hermes"
    assert guess_tool_parser("<tool_call><function={{ name }}>") == "qwen3_xml"
    assert guess_tool_parser("plain") is None
    assert guess_tool_parser("<|start|>assistant<|channel|>final") == "openai"
    assert guess_reasoning_parser("{{ '<think>' }}") == "qwen3"
