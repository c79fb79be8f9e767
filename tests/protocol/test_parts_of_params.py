"""The parts of sampling parameters that have checks of their own, and the parameters of a beam search."""

import math
from typing import Any

import pytest

from corespan.protocol.errors import VLLMValidationError
from corespan.protocol.params import BeamSearchParams
from corespan.protocol.repetition import RepetitionDetectionParams
from corespan.protocol.structured_outputs import StructuredOutputsParams


@pytest.mark.parametrize(
    "fields",
    [
        {},
        {"json": {}, "regex": "a"},
        {"json": ""},
        {"json": "  "},
        {"json": 5},
        {"json": {"a": object()}},
        {"regex": 5},
        {"regex": "\ud800"},
        {"choice": []},
        {"choice": [""]},
        {"choice": [1]},
        {"grammar": " \n"},
        {"grammar": ["x"]},
        {"json_object": False},
        {"json_object": 1},
        {"structural_tag": " "},
        {"structural_tag": {"structures": []}},
        {"json": {}, "structural_tag": "{}"},
        {"json": {}, "disable_any_whitespace": 1},
        {"json": {}, "disable_additional_properties": None},
        {"json": {}, "whitespace_pattern": 4},
        {"json": {}, "whitespace_pattern": " ", "disable_any_whitespace": True},
    ],
)
def test_wrong_constraints_are_refused(fields: dict[str, Any]) -> None:
    with pytest.raises(VLLMValidationError, match="structured_outputs"):
        StructuredOutputsParams(**fields)


@pytest.mark.parametrize(
    ("sizes", "name"),
    [
        ((-1, 0, 0), "max_pattern_size"),
        ((4, -1, 2), "min_pattern_size"),
        ((4, 5, 2), "min_pattern_size"),
        ((0, 1, 2), "min_pattern_size"),
        ((4, 1, 1), "min_count"),
        ((4, 1, 0), "min_count"),
        ((0, 0, -1), "min_count"),
        ((4.0, 1, 2), "max_pattern_size"),
        ((True, 1, 2), "max_pattern_size"),
        ((4, None, 2), "min_pattern_size"),
        ((4, 1, "2"), "min_count"),
    ],
)
def test_wrong_repetition_patterns_are_refused(sizes: tuple[Any, Any, Any], name: str) -> None:
    with pytest.raises(VLLMValidationError, match=rf"^repetition_detection\.{name} must be"):
        RepetitionDetectionParams(*sizes)


@pytest.mark.parametrize(
    ("fields", "name"),
    [
        ({"beam_width": 0, "max_tokens": 1}, "beam_width"),
        ({"beam_width": True, "max_tokens": 1}, "beam_width"),
        ({"beam_width": 2, "max_tokens": 0}, "max_tokens"),
        ({"beam_width": 2, "max_tokens": 1, "temperature": -1}, "temperature"),
        ({"beam_width": 2, "max_tokens": 1, "length_penalty": math.nan}, "length_penalty"),
        ({"beam_width": 2, "max_tokens": 1, "ignore_eos": 1}, "ignore_eos"),
        ({"beam_width": 2, "max_tokens": 1, "include_stop_str_in_output": 1}, "include_stop_str_in_output"),
        ({"beam_width": 2, "max_tokens": 1, "structured_outputs": {"json_object": True}}, "structured_outputs"),
    ],
)
def test_wrong_beam_search_params_are_refused(fields: dict[str, Any], name: str) -> None:
    with pytest.raises(VLLMValidationError, match=f"^{name} must be"):
        BeamSearchParams(**fields)


def test_beam_search_defaults() -> None:
    params = BeamSearchParams(beam_width=2, max_tokens=3)
    assert (params.temperature, params.length_penalty, params.ignore_eos) == (0.0, 1.0, False)
    assert (params.include_stop_str_in_output, params.structured_outputs) == (False, None)
