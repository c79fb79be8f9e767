"""Prompts and requests that callers have prepared, over each client: what is wrong with them is said at the caller, and
the engine goes on."""

from typing import Any

import numpy as np
import pytest

from corespan import SamplingParams
from corespan.engine.requests import input_processor
from corespan.protocol.requests import EngineCoreRequest
from corespan.protocol.resolved_sampling import ResolvedSampling

GREEDY = SamplingParams(temperature=0, max_tokens=4, ignore_eos=True)


@pytest.mark.parametrize(
    "fields",
    [
        {"type": "embeds", "prompt_embeds": np.array([[object()] * 64] * 3)},
        {"type": "embeds", "prompt_embeds": np.zeros((3, 7), np.float32)},
        {"type": "embeds", "prompt_embeds": np.full((3, 64), np.nan)},
        {"type": "embeds"},
        {"type": "token", "prompt_token_ids": [5], "cache_salt": 5},
        {"type": "token", "prompt_token_ids": [5], "prompt": 5},
        {"type": "token", "prompt_token_ids": [5], "arrival_time": "now"},
        {"type": "token"},
        {"type": "song", "prompt_token_ids": [5]},
    ],
)
def test_a_malformed_rendered_prompt_is_refused_and_the_engine_goes_on(
    embeds_runner: Any, fields: dict[str, Any]
) -> None:
    with pytest.raises((TypeError, ValueError)):
        embeds_runner.stream(fields, GREEDY)

    assert embeds_runner.is_idle()
    assert len(embeds_runner.generate("Once", GREEDY)[0].outputs[0].token_ids) == 4


def test_a_prepared_request_is_warned_of_once_and_keeps_its_id(runner: Any, caplog: pytest.LogCaptureFixture) -> None:
    input_processor._warn_of_prepared_requests.cache_clear()

    for _ in range(2):
        prepared = runner.engine.input_processor.process_inputs("own", [5, 6, 7], GREEDY)
        outputs = runner.stream(prepared, GREEDY, request_id="another")
        assert outputs[-1].request_id == "own"

    messages = [record.getMessage() for record in caplog.records]
    assert sum("was handed a prepared request" in message for message in messages) == 1
    assert sum("own id 'own' wins over 'another'" in message for message in messages) == 2


def test_a_core_handed_bad_tokens_fails_that_request_alone(make_llm: Any) -> None:
    """Past the shell's checks, as a client of another make would."""
    core = make_llm().llm_engine.engine_core
    for fields in (
        {"output_token_ids": [10**6]},
        {"output_token_ids": [5] * 600},
        {"prompt_embeds": np.array([[object()] * 64] * 3)},
    ):
        core.add_request(EngineCoreRequest("own", [5, 6, 7], ResolvedSampling(), **fields))
        (output,) = core.get_output().outputs
        assert str(output.finish_reason) == "error"


@pytest.fixture(scope="module")
def embeds_runner(client_kind: str, tiny_llama_dir: str) -> Any:
    from clients import SMALL_ENGINE, Runner

    runner = Runner(client_kind, model=tiny_llama_dir, enable_prompt_embeds=True, **SMALL_ENGINE)
    yield runner
    runner.shutdown()
