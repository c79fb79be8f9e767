"""A user's logits processor, named to the engine by import path, at work in the core behind each client."""

from collections.abc import Callable
from typing import Any

import pytest
from sampler_driver import OnlyMultiplesProcessor

from corespan import SamplingParams
from corespan.protocol.requests import EngineCoreRequest

MULTIPLES = "sampler_driver:OnlyMultiplesProcessor"


def multiples_of(number: int | None) -> SamplingParams:
    extra_args = None if number is None else {"multiple": number}
    return SamplingParams(temperature=0, max_tokens=6, ignore_eos=True, extra_args=extra_args)


def test_a_users_processor_changes_the_requests_that_ask_for_it(make_runner: Callable[..., Any], runner: Any) -> None:
    (expected,) = runner.generate(["one two"], multiples_of(None))

    of_a_path = make_runner(logits_processors=[MULTIPLES])
    outputs = of_a_path.generate(["one two"] * 3, [multiples_of(3), multiples_of(None), multiples_of(5)])

    for output, multiple in ((outputs[0], 3), (outputs[2], 5)):
        ids = output.outputs[0].token_ids
        assert [token_id % (multiple + count) for count, token_id in enumerate(ids)] == [0] * 6
    assert list(outputs[1].outputs[0].token_ids) == list(expected.outputs[0].token_ids)


def test_what_the_processor_refuses_is_refused_at_the_caller_and_harms_no_neighbour(
    make_runner: Callable[..., Any],
) -> None:
    runner = make_runner(logits_processors=[OnlyMultiplesProcessor])
    (alone,) = runner.generate("one two", multiples_of(3))

    def ask_for_what_is_refused() -> None:
        for prompt in ("one two", EngineCoreRequest("own", [5, 6], multiples_of(0))):
            with pytest.raises(ValueError, match="must not be 0"):
                runner.stream(prompt, multiples_of(0))

    together = runner.with_neighbour("one two", multiples_of(3), ask_for_what_is_refused)

    assert together.outputs[0].token_ids == alone.outputs[0].token_ids
    assert runner.is_idle()


def test_a_request_that_the_processor_refuses_in_the_core_fails_alone(
    make_runner: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """As one from a client of another make would."""
    from corespan.engine.input_processor import InputProcessor

    monkeypatch.setattr(InputProcessor, "_check_params", lambda *arguments: None)
    runner = make_runner(logits_processors=[MULTIPLES])

    outputs = runner.generate(["one two"] * 2, [multiples_of(0), multiples_of(3)])

    assert [output.outputs[0].finish_reason for output in outputs] == ["error", "length"]


@pytest.mark.parametrize("path", ["no.such.module:Class", "sampler_driver:NoSuchClass", "sampler_driver:Loop"])
def test_a_path_that_leads_to_no_processor_stops_the_start(make_runner: Callable[..., Any], path: str) -> None:
    with pytest.raises(ValueError, match=path):
        make_runner(logits_processors=[path])
