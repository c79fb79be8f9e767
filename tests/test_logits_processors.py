"""A user's logits processor, named to the engine by import path, at work in the core behind each client."""

from collections.abc import Callable
from typing import Any

import pytest

from corespan import SamplingParams


def multiples_of(number: int | None) -> SamplingParams:
    extra_args = None if number is None else {"multiple": number}
    return SamplingParams(temperature=0, max_tokens=6, ignore_eos=True, extra_args=extra_args)


def test_a_users_processor_changes_the_requests_that_ask_for_it(make_runner: Callable[..., Any]) -> None:
    plain = make_runner()
    (expected,) = plain.generate(["one two"], multiples_of(None))

    runner = make_runner(logits_processors=["sampler_driver:OnlyMultiplesProcessor"])
    outputs = runner.generate(["one two"] * 3, [multiples_of(3), multiples_of(None), multiples_of(5)])

    for output, multiple in ((outputs[0], 3), (outputs[2], 5)):
        ids = output.outputs[0].token_ids
        assert [token_id % (multiple + count) for count, token_id in enumerate(ids)] == [0] * 6
    assert list(outputs[1].outputs[0].token_ids) == list(expected.outputs[0].token_ids)


def test_a_request_the_processor_refuses_fails_alone(make_runner: Callable[..., Any]) -> None:
    runner = make_runner(logits_processors=["sampler_driver:OnlyMultiplesProcessor"])
    outputs = runner.generate(["one two"] * 2, [multiples_of(0), multiples_of(3)])
    assert [output.outputs[0].finish_reason for output in outputs] == ["error", "length"]


def test_a_path_that_leads_nowhere_stops_the_start(make_runner: Callable[..., Any]) -> None:
    with pytest.raises(Exception, match="no.such.module:Class"):
        make_runner(logits_processors=["no.such.module:Class"])
