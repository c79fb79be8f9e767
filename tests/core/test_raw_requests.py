"""Requests as a client of another make may send them to a real model: each runs, or ends with
an error, and the request beside it does not notice.
"""

from collections.abc import Iterator
from typing import Any

import msgspec
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from corespan.core.engine_core import EngineCore
from corespan.engine.engine_args import DEFAULT_EXECUTOR_CLASS, EngineArgs
from corespan.protocol.codec import MsgpackDecoder
from corespan.protocol.errors import ProtocolError
from corespan.protocol.outputs import EngineCoreOutput, EngineCoreOutputs, FinishReason
from corespan.protocol.requests import EngineCoreRequest
from corespan.protocol.resolved_sampling import ResolvedSampling

NEIGHBOUR = EngineCoreRequest("neighbour", [5, 6, 7], ResolvedSampling(temperature=0.0, max_tokens=8))


class Core:
    """An engine core that keeps what its requests get, by request."""

    def __init__(self, model: str) -> None:
        config = EngineArgs(model=model, max_model_len=64, num_gpu_blocks_override=33).create_engine_config()
        self.core = EngineCore(config, DEFAULT_EXECUTOR_CLASS, False, lambda _, outputs: self._keep(outputs))
        self.outputs: dict[str, list[EngineCoreOutput]] = {}

    def run(self, *frames: bytes) -> dict[str, list[EngineCoreOutput]]:
        """The neighbour, and the requests that the frames hold as far as they can be decoded."""
        self.outputs = {}
        self.core.add_request(NEIGHBOUR)
        decoder = MsgpackDecoder(EngineCoreRequest)
        for frame in frames:
            try:
                request = decoder.decode([frame])
            except ProtocolError:
                continue
            self.core.add_request(request)
        self.core.step()
        self.core.abort_requests([])
        while self.core.has_work():
            for outputs in self.core.step()[0].values():
                self._keep(outputs)
        self.core.scheduler.finish_requests(None)
        return self.outputs

    def _keep(self, outputs: EngineCoreOutputs) -> None:
        for output in outputs.outputs:
            self.outputs.setdefault(output.request_id, []).append(output)


@pytest.fixture(scope="module")
def core(tiny_llama_dir: str) -> Iterator[Core]:
    core = Core(tiny_llama_dir)
    yield core
    core.core.shutdown()


def raw(params: dict[str, Any], name: str = "raw", prompt: object = (8, 9), *more: object) -> bytes:
    sampling: list[Any] = msgspec.to_builtins(ResolvedSampling(temperature=0.0, max_tokens=3))
    for field, value in params.items():
        sampling[1 + ResolvedSampling.__struct_fields__.index(field)] = value
    return msgspec.msgpack.encode([name, prompt, sampling, *more])


@pytest.mark.parametrize(
    "params",
    [
        {"temperature": -1.0},
        {"temperature": float("nan")},
        {"top_p": 0.0},
        {"top_k": -1},
        {"top_k": 2**63},
        {"min_p": 1.5},
        {"repetition_penalty": 0.0},
        {"repetition_penalty": float("inf")},
        {"frequency_penalty": 2.5},
        {"max_tokens": 0},
        {"end_token_ids": [-600], "min_tokens": 2},
        {"stop_token_ids": [-1]},
        {"bad_words_token_ids": [[]]},
        {"bad_words_token_ids": [[5, -600]]},
        {"allowed_token_ids": []},
        {"logit_bias": {-1: 1.0}},
        {"logit_bias": {1: float("nan")}},
        {"logprobs": -2},
        {"logprob_token_ids": list(range(129))},
        {"beam_length": -1},
        {"structured_outputs": {"regex": 5}},
        {"repetition_detection": {"max_pattern_size": 4, "min_count": 1}},
        {"for_processors": {"top_p": 7.0}},
    ],
)
def test_what_no_model_could_be_asked_for_does_not_decode(params: dict[str, Any]) -> None:
    decoder = MsgpackDecoder(EngineCoreRequest)
    assert decoder.decode([raw({})]).params == ResolvedSampling(temperature=0.0, max_tokens=3)
    with pytest.raises(ProtocolError):
        decoder.decode([raw(params)])


@pytest.mark.parametrize(
    ("params", "named"),
    [
        ({"bad_words_token_ids": [[2**62]]}, "bad_words_token_ids"),
        ({"logprobs": 2**40}, "logprobs"),
        ({"logprobs": -1}, "logprobs"),
        ({"prompt_logprobs": 2**40}, "prompt_logprobs"),
        ({"allowed_token_ids": [600]}, "allowed_token_ids"),
        ({"logit_bias": {600: 1.0}}, "logit_bias"),
        ({"logprob_token_ids": [2**62]}, "logprob_token_ids"),
        ({"beam_length": 2}, "beam_length"),
    ],
)
def test_a_field_beyond_the_model_is_the_error_of_its_request(core: Core, params: dict[str, Any], named: str) -> None:
    alone = core.run()["neighbour"]
    outputs = core.run(raw(params))
    assert outputs["raw"][-1].finish_reason is FinishReason.ERROR
    assert named in str(outputs["raw"][-1].stop_reason)
    assert [each.new_token_ids for each in outputs["neighbour"]] == [each.new_token_ids for each in alone]


ODD = st.sampled_from([-(2**63), -600, -1, 0, 1, 2, 600, 2**31, 2**63 - 1, 2**64 - 1, 0.5, -1e308, 1e308, float("nan")])
ODD_VALUES = st.one_of(ODD, st.none(), st.booleans(), st.text(max_size=3), st.lists(ODD, max_size=3))
ODD_PARAMS = st.dictionaries(
    st.sampled_from([name for name in ResolvedSampling.__struct_fields__ if name not in ("max_tokens", "min_tokens")]),
    st.one_of(ODD_VALUES, st.lists(st.lists(ODD, max_size=2), max_size=2), st.dictionaries(ODD, ODD, max_size=2)),
    max_size=3,
)
ODD_FIELDS = st.tuples(
    ODD_VALUES, ODD_VALUES, ODD_VALUES, ODD_VALUES
)  # arrival_time, noise_seed, client_index, priority


@settings(
    max_examples=60, deadline=None, suppress_health_check=[HealthCheck.too_slow, HealthCheck.function_scoped_fixture]
)
@given(requests=st.lists(st.tuples(ODD_PARAMS, st.one_of(st.just(()), ODD_FIELDS)), min_size=1, max_size=4))
def test_requests_of_odd_fields_run_or_end_and_harm_no_neighbour(
    core: Core, requests: list[tuple[dict[str, Any], tuple[Any, ...]]]
) -> None:
    alone = core.run()["neighbour"]
    frames = [raw(params, f"raw {index}", (8, 9), *more) for index, (params, more) in enumerate(requests)]
    outputs = core.run(*frames)
    assert [each.new_token_ids for each in outputs["neighbour"]] == [each.new_token_ids for each in alone]
