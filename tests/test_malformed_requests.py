"""Requests made of random parts, right and wrong, over each client: they run or are refused at the caller, and the
request beside them keeps its tokens."""

import math
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from corespan import (
    RepetitionDetectionParams,
    RequestOutput,
    RequestOutputKind,
    SamplingParams,
    StructuredOutputsParams,
)

ODD_NUMBERS = st.sampled_from([-(2**70), -(2**63), -1, 0, 1, 2**31, 2**63, 2**70, 1.5, math.nan, math.inf, -math.inf])
ODD_VALUES = st.one_of(ODD_NUMBERS, st.none(), st.booleans(), st.text(max_size=3), st.binary(max_size=3), st.just([]))
TOKEN_IDS = st.lists(st.one_of(st.integers(0, 511), ODD_VALUES), max_size=6)
TEXTS = st.one_of(
    st.text(st.characters(), max_size=20), st.sampled_from(["\ud800", "\x00", "<|im_start|>", "a" * 5000])
)

NEIGHBOUR = "The quick brown fox"
NEIGHBOURS_PARAMS = SamplingParams(temperature=0, max_tokens=60, ignore_eos=True)

UNTOUCHED = {"max_tokens", "min_tokens"}
"""What is not set after construction: lengths, which make a test long."""

TAG = '{"structures": [{"begin": "a=", "schema": {"enum": [1]}, "end": ";"}], "triggers": ["a"]}'

PROMPTS = st.one_of(
    TEXTS,
    TOKEN_IDS,
    ODD_VALUES,
    st.lists(TOKEN_IDS, max_size=2),
    st.dictionaries(
        st.sampled_from(
            [
                "prompt",
                "prompt_token_ids",
                "prompt_embeds",
                "cache_salt",
                "multi_modal_data",
                "type",
                "arrival_time",
                "x",
            ]
        ),
        st.one_of(TEXTS, TOKEN_IDS, ODD_VALUES),
        max_size=3,
    ),
)


def field(*legal: Any) -> st.SearchStrategy[Any]:
    return st.one_of(st.sampled_from(legal), ODD_VALUES, TOKEN_IDS)


FIELDS = st.fixed_dictionaries(
    {"max_tokens": st.sampled_from([1, 3, 3, 3, 0, -1, 1.5, "3", math.nan])},
    optional={
        "n": st.sampled_from([1, 2, 3, 0, -1, 1.5, "2", 2**70, None]),
        "temperature": field(0, 0.5, 1e-9, 2.0),
        "top_p": field(1.0, 0.5, 1e-30),
        "top_k": field(0, -1, 5),
        "min_p": field(0.0, 0.5, 1.0),
        "seed": field(5, -5, None),
        "presence_penalty": field(0.5, -2.0),
        "frequency_penalty": field(2.0, -2.0),
        "repetition_penalty": field(1.0, 1e-30, 1e30),
        "stop": st.one_of(st.lists(TEXTS, max_size=2), ODD_VALUES, TEXTS),
        "stop_token_ids": TOKEN_IDS,
        "allowed_token_ids": TOKEN_IDS,
        "logprob_token_ids": TOKEN_IDS,
        "logit_bias": st.dictionaries(st.one_of(st.integers(-1, 512), st.text(max_size=2)), ODD_NUMBERS, max_size=2),
        "bad_words": st.one_of(st.lists(TEXTS, max_size=2), ODD_VALUES),
        "logprobs": field(0, 5, 20),
        "prompt_logprobs": field(0, 5, 20),
        "min_tokens": field(0, 2),
        "detokenize": field(True, False),
        "skip_special_tokens": field(True, False),
        "truncate_prompt_tokens": field(1, 4, -1),
        "output_kind": field(*RequestOutputKind),
        "extra_args": st.one_of(ODD_VALUES, st.dictionaries(st.text(max_size=2), ODD_VALUES, max_size=2)),
        "thinking_token_budget": field(None, -1, 5),
        "repetition_detection": field(None, RepetitionDetectionParams(2, 1, 2)),
        "structured_outputs": st.one_of(
            ODD_VALUES,
            st.builds(dict, regex=TEXTS),
            st.builds(dict, choice=st.lists(TEXTS, max_size=2)),
            st.builds(dict, json=st.one_of(TEXTS, st.dictionaries(st.sampled_from(["type", "enum"]), ODD_VALUES))),
            st.builds(dict, structural_tag=st.sampled_from([TAG, TAG[:-3], "[]", TAG.replace("a", "\ud800")])),
        ),
        "set afterwards": st.dictionaries(
            st.sampled_from([name for name in SamplingParams.__struct_fields__ if name not in UNTOUCHED]),
            st.one_of(ODD_VALUES, TOKEN_IDS),
            max_size=2,
        ),
    },
)


def sampling_params(fields: dict[str, Any]) -> SamplingParams:
    fields = dict(fields)
    set_afterwards = fields.pop("set afterwards", {})
    if isinstance(fields.get("structured_outputs"), dict):
        fields = fields | {"structured_outputs": StructuredOutputsParams(**fields["structured_outputs"])}
    params = SamplingParams(**fields)
    for name, value in set_afterwards.items():
        setattr(params, name, value)
    return params


@pytest.fixture(scope="module")
def alone(runner: Any) -> RequestOutput:
    (alone,) = runner.generate(NEIGHBOUR, NEIGHBOURS_PARAMS)
    return alone


@settings(max_examples=25, deadline=None, suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large])
@given(requests=st.lists(st.tuples(PROMPTS, FIELDS), min_size=1, max_size=12))
def test_requests_of_random_parts_run_or_are_refused_and_harm_no_neighbour(
    runner: Any, alone: RequestOutput, requests: list[tuple[Any, dict[str, Any]]]
) -> None:
    def send() -> None:
        for prompt, fields in requests:
            try:
                outputs = runner.stream(prompt, sampling_params(fields))
            except (TypeError, ValueError):
                continue
            assert outputs[-1].finished

    together = runner.with_neighbour(NEIGHBOUR, NEIGHBOURS_PARAMS, send)
    assert together.outputs[0].token_ids == alone.outputs[0].token_ids
    assert runner.is_idle()
