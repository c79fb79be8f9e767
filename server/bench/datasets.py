"""Prompts to measure with: token ids at random, a file of prompts, conversations in ShareGPT's form."""

import argparse
import json
import random
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

CHARACTERS_PER_TOKEN = 4
LOWEST_ID, HIGHEST_ID = 10, 250
"""Ids that every vocabulary has and that are no special tokens."""


@dataclass(frozen=True, slots=True)
class Sample:
    """One request: a text or token ids, and how many tokens to answer with."""

    prompt: str | list[int]
    output_len: int


def add_arguments(parser: argparse.ArgumentParser, input_len: int, num_prompts: int) -> None:
    """`input_len` and `num_prompts` are the command's defaults."""
    add = parser.add_argument_group("prompts").add_argument
    add(
        "--dataset-name",
        choices=["random", "custom", "sharegpt"],
        default="random",
        help="where prompts come from [%(default)s]",
    )
    add("--dataset-path", metavar="FILE", help='custom: JSON lines with "prompt"; sharegpt: a JSON list')
    add("--num-prompts", type=int, default=num_prompts, metavar="N", help="number of requests [%(default)s]")
    lengths: dict[str, Any] = {"type": int, "metavar": "N"}
    add("--random-input-len", "--input-len", default=input_len, **lengths, help="random: tokens a prompt [%(default)s]")
    add("--random-output-len", "--output-len", default=128, **lengths, help="random: tokens an answer [%(default)s]")
    add("--random-prefix-len", "--prefix-len", default=0, **lengths, help="random: tokens that all prompts share")
    add(
        "--random-range-ratio",
        type=float,
        default=0.0,
        metavar="R",
        help="random: lengths are drawn from within 1-R to 1+R times these [%(default)s]",
    )
    add("--custom-output-len", default=256, **lengths, help="custom: tokens an answer [%(default)s]")
    add("--sharegpt-output-len", **lengths, help="sharegpt: tokens an answer [as the conversation's, about]")


def samples_of(options: argparse.Namespace, seed: int) -> list[Sample]:
    """`--num-prompts` of them, the same for the same seed. Raises ValueError or OSError naming what is wrong."""
    if options.num_prompts < 1:
        raise ValueError(f"--num-prompts must be at least 1, got {options.num_prompts}")
    source = random.Random(seed)
    if options.dataset_name == "random":
        return _random(options, source)
    if options.dataset_path is None:
        raise ValueError(f"--dataset-name {options.dataset_name} needs --dataset-path")
    path = Path(options.dataset_path)
    known = (_custom if options.dataset_name == "custom" else _sharegpt)(path, options)
    if not known:
        raise ValueError(f"{path} holds no prompt")
    return [known[number % len(known)] for number in range(options.num_prompts)]


def _random(options: argparse.Namespace, source: random.Random) -> list[Sample]:
    ratio = options.random_range_ratio
    if not 0 <= ratio < 1:
        raise ValueError(f"--random-range-ratio must be in [0, 1), got {ratio}")
    if options.random_input_len < 1 or options.random_output_len < 1 or options.random_prefix_len < 0:
        raise ValueError("--random-input-len and --random-output-len must be at least 1, --random-prefix-len 0")

    def drawn(length: int) -> int:
        return max(1, source.randint(round(length * (1 - ratio)), round(length * (1 + ratio))))

    def ids(length: int) -> list[int]:
        return [source.randrange(LOWEST_ID, HIGHEST_ID) for _ in range(length)]

    prefix = ids(options.random_prefix_len)
    return [
        Sample(prefix + ids(drawn(options.random_input_len)), drawn(options.random_output_len))
        for _ in range(options.num_prompts)
    ]


def _custom(path: Path, options: argparse.Namespace) -> list[Sample]:
    samples = []
    for number, line in enumerate(path.read_text(encoding="utf-8").splitlines(), start=1):
        if line.strip():
            row = _json(path, line, number)
            if not isinstance(row, dict) or not isinstance(row.get("prompt"), str):
                raise ValueError(f'{path}, line {number}: it must be an object with a text "prompt"')
            samples.append(Sample(row["prompt"], int(row.get("output_tokens") or options.custom_output_len)))
    return samples


def _sharegpt(path: Path, options: argparse.Namespace) -> list[Sample]:
    """The first two turns of each conversation."""
    samples = []
    for conversation in _json(path, path.read_text(encoding="utf-8")):
        turns: Sequence[dict[str, Any]] = conversation.get("conversations") or ()
        if len(turns) >= 2 and turns[0].get("value") and turns[1].get("value"):
            about = max(1, len(turns[1]["value"]) // CHARACTERS_PER_TOKEN)
            samples.append(Sample(turns[0]["value"], options.sharegpt_output_len or about))
    return samples


def _json(path: Path, text: str, line: int | None = None) -> Any:
    try:
        return json.loads(text)
    except ValueError as error:
        where = path if line is None else f"{path}, line {line}"
        raise ValueError(f"{where}: not JSON: {error}") from None
