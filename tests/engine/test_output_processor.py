"""The shell's bookkeeping of running requests: output kinds, several answers, aborts, errors, statistics."""

import asyncio
from collections.abc import Callable
from typing import Any

import pytest
from text_pipeline import add, make_config, make_request

from corespan.engine.metrics.stats import IterationStats
from corespan.engine.outputs.output_collector import RequestOutputCollector
from corespan.engine.outputs.output_processor import OutputProcessor
from corespan.engine.outputs.request_output import RequestOutput
from corespan.engine.requests.input_processor import InputProcessor
from corespan.engine.requests.parallel_sampling import fan_out
from corespan.engine.requests.prepared_request import PreparedRequest
from corespan.engine.text.tokenizer import Tokenizer
from corespan.protocol.outputs import EngineCoreOutput, FinishReason, PrefillStats
from corespan.protocol.params import RequestOutputKind, SamplingParams
from corespan.protocol.resolved_sampling import resolved

CUMULATIVE, DELTA, FINAL_ONLY = RequestOutputKind.CUMULATIVE, RequestOutputKind.DELTA, RequestOutputKind.FINAL_ONLY


@pytest.fixture
def processor(tokenizer: Tokenizer) -> OutputProcessor:
    return OutputProcessor(tokenizer, log_stats=False)


MakeRequest = Callable[..., PreparedRequest]


@pytest.fixture
def request_for(tokenizer: Tokenizer) -> MakeRequest:
    inputs = InputProcessor(make_config(), tokenizer)

    def make(request_id: str = "r", prompt: Any = "Once", **params: Any) -> PreparedRequest:
        return make_request(inputs, prompt, SamplingParams(**{"max_tokens": 50} | params), request_id)

    return make


def is_empty(processor: OutputProcessor) -> bool:
    return not (
        processor.request_states or processor.parent_requests or processor.external_req_ids or processor._by_handle
    )


def step(request_id: str, *token_ids: int, finish: FinishReason | None = None, **fields: Any) -> EngineCoreOutput:
    return EngineCoreOutput(request_id, list(token_ids), finish, **fields)


def test_outputs_carry_the_callers_id_and_the_prompt(processor: OutputProcessor, request_for: MakeRequest) -> None:
    request = request_for("mine")
    (internal,) = add(processor, request)
    (output,) = processor.process_outputs([step(internal, 70)]).request_outputs
    assert output.request_id == "mine" != internal
    assert (output.prompt, output.prompt_token_ids) == ("Once", request.request.prompt_token_ids)
    assert not output.finished and output.metrics is None


def test_outputs_handed_out_do_not_change_later(processor: OutputProcessor, request_for: MakeRequest) -> None:
    (internal,) = add(processor, request_for(output_kind=CUMULATIVE))
    outputs = [processor.process_outputs([step(internal, token)]).request_outputs[0] for token in (70, 71, 72)]
    assert [output.outputs[0].token_ids for output in outputs] == [[70], [70, 71], [70, 71, 72]]


def test_tokens_that_came_as_columns_reach_the_request_of_their_handle(
    processor: OutputProcessor, request_for: MakeRequest, tokenizer: Tokenizer
) -> None:
    end = tokenizer.encode("END", add_special_tokens=False)
    plain, stopping = request_for("plain", output_kind=DELTA), request_for("stopping", stop=["END"])
    add(processor, plain)
    (internal,) = add(processor, stopping)
    stats = IterationStats()
    tokens = [
        (plain.request.handle, 70),
        (stopping.request.handle + 100, 9),
        *((stopping.request.handle, token_id) for token_id in end),
    ]
    processed = processor.process_outputs([], 0.0, stats, tokens)
    outputs = {output.request_id: output for output in processed.request_outputs}
    assert outputs["plain"].outputs[0].token_ids == [70] and not outputs["plain"].finished
    assert outputs["stopping"].finished and outputs["stopping"].outputs[0].stop_reason == "END"
    assert processed.reqs_to_abort == [internal]
    assert processor.process_outputs([], tokens=[(stopping.request.handle, 71)]).request_outputs == []
    processor.process_outputs([step(plain.request_id, 71, finish=FinishReason.LENGTH, handle=plain.request.handle)])
    assert is_empty(processor)


def test_the_number_of_cached_tokens_is_that_of_the_first_scheduling(
    processor: OutputProcessor, request_for: MakeRequest
) -> None:
    (internal,) = add(processor, request_for())
    steps = [
        step(internal, 70, prefill_stats=PrefillStats(40, 32)),
        step(internal, 71, prefill_stats=PrefillStats(40, 0)),
    ]
    counts = [processor.process_outputs([output]).request_outputs[0].num_cached_tokens for output in steps]
    assert counts == [32, 32]


@pytest.mark.parametrize("kind", list(RequestOutputKind))
async def test_all_answers_of_a_request_arrive_whole_at_a_slow_consumer(
    processor: OutputProcessor, request_for: MakeRequest, kind: RequestOutputKind
) -> None:
    request = request_for(n=3, output_kind=kind)
    queue = RequestOutputCollector(kind, request.request_id)
    children = add(processor, request, queue=queue)
    answers = {child: [60 + 10 * at + offset for offset in range(at + 2)] for at, child in enumerate(children)}
    received: list[RequestOutput] = []
    for position in range(4):
        outputs = [
            step(child, ids[position], finish=FinishReason.LENGTH if position == len(ids) - 1 else None)
            for child, ids in answers.items()
            if position < len(ids)
        ]
        processor.process_outputs(outputs)
        if position % 2 and (output := queue.get_nowait()) is not None:
            received.append(output)
    collected: dict[int, list[int]] = {}
    for output in received:
        for answer in output.outputs:
            before = collected.get(answer.index, []) if kind is DELTA else []
            collected[answer.index] = before + answer.token_ids
    assert collected == dict(enumerate(answers.values()))
    assert [output.finished for output in received] == [False] * (len(received) - 1) + [True]
    assert is_empty(processor)


def test_final_only_gives_one_output_with_all_answers_in_order(
    processor: OutputProcessor, request_for: MakeRequest
) -> None:
    children = add(processor, request_for(n=3, output_kind=FINAL_ONLY))
    outputs = []
    for child in reversed(children):
        outputs += processor.process_outputs([step(child, 70, finish=FinishReason.LENGTH)]).request_outputs
    assert [[answer.index for answer in output.outputs] for output in outputs] == [[0, 1, 2]]
    assert outputs[0].finished


def test_what_an_output_does_not_know_is_ignored_with_a_warning(caplog: pytest.LogCaptureFixture) -> None:
    output = RequestOutput("r", None, [1], None, [], True, colour="red", size=3)
    assert output.finished and not hasattr(output, "colour")
    assert caplog.messages == ["RequestOutput has no colour, size; ignored"]


def test_children_have_a_seed_each_and_share_the_prompt(request_for: MakeRequest) -> None:
    seeded = fan_out(request_for(n=3, seed=40).request, 3)
    unseeded = fan_out(request_for(n=3).request, 3)
    assert [child.noise_seed for child in seeded] == [40, 41, 42]
    assert len({child.noise_seed for child in unseeded}) == 3
    assert len({child.request_id for child in seeded}) == 3
    assert len({child.external_req_id for child in seeded}) == 1


def test_the_largest_seed_still_gives_children_legal_seeds(request_for: MakeRequest) -> None:
    request, shown = request_for(n=2).request, SamplingParams(n=2, seed=2**63 - 1)
    request.params = resolved(shown, for_processors=shown)
    request.noise_seed = 2**64 - 1
    for child in fan_out(request, 2):
        assert child.params.for_processors is not None and child.params.for_processors.n == 1
        assert child.params.for_processors.seed in (2**63 - 1, -(2**63))
        assert 0 <= child.noise_seed < 2**64


@pytest.mark.parametrize("n", [1, 4])
@pytest.mark.parametrize("internal", [True, False])
@pytest.mark.parametrize("kind", list(RequestOutputKind))
async def test_abort_ends_every_answer_and_leaves_no_entry(
    processor: OutputProcessor, request_for: MakeRequest, n: int, internal: bool, kind: RequestOutputKind
) -> None:
    request = request_for("a", n=n, output_kind=kind)
    queue = RequestOutputCollector(kind, request.request_id)
    children = add(processor, request, queue=queue)
    processor.process_outputs([step(child, 70) for child in children])
    aborted = processor.abort_requests([request.request_id if internal else "a"], internal=internal)
    assert sorted(aborted) == sorted(children)
    output = await queue.get()
    assert output.finished
    assert {answer.index: answer.token_ids for answer in output.outputs} == {index: [70] for index in range(n)}
    assert {answer.finish_reason for answer in output.outputs} == {"abort"}
    assert is_empty(processor)
    assert processor.process_outputs([step(child, 71) for child in children]).request_outputs == []


def test_aborting_what_is_unknown_or_gone_does_nothing(processor: OutputProcessor, request_for: MakeRequest) -> None:
    (internal,) = add(processor, request_for("a"))
    processor.process_outputs([step(internal, 70, finish=FinishReason.LENGTH)])
    assert processor.abort_requests(["a", "never"], internal=False) == []
    assert processor.abort_requests([internal, "never"], internal=True) == []
    assert is_empty(processor)


def test_one_callers_id_may_run_twice_and_an_abort_reaches_both(
    processor: OutputProcessor, request_for: MakeRequest
) -> None:
    first, second = (add(processor, request_for("same"))[0] for _ in range(2))
    (output,) = processor.process_outputs([step(first, 70, finish=FinishReason.LENGTH)]).request_outputs
    assert output.request_id == "same"
    assert processor.abort_requests(["same"], internal=False) == [second]
    assert is_empty(processor)


def test_a_running_internal_id_is_refused_and_the_first_goes_on(
    processor: OutputProcessor, request_for: MakeRequest, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("VLLM_DISABLE_REQUEST_ID_RANDOMIZATION", "1")
    first = request_for("same")
    add(processor, first)
    with pytest.raises(ValueError, match="same"):
        add(processor, request_for("same"))
    last_of_another, ending = (step("same", 70, finish=FinishReason.LENGTH) for _ in range(2))
    last_of_another.handle, ending.handle = first.request.handle + 5, first.request.handle
    assert processor.process_outputs([last_of_another]).request_outputs == []
    (output,) = processor.process_outputs([ending]).request_outputs
    assert output.outputs[0].token_ids == [70]
    add(processor, request_for("same"))


def test_a_stop_string_aborts_in_the_core_only_what_still_runs_there(
    processor: OutputProcessor, request_for: MakeRequest, tokenizer: Tokenizer
) -> None:
    token_ids = tokenizer.encode("END", add_special_tokens=False)
    running, ended = (add(processor, request_for(stop=["END"]))[0] for _ in range(2))
    processed = processor.process_outputs(
        [step(running, *token_ids), step(ended, *token_ids, finish=FinishReason.LENGTH)]
    )
    assert processed.reqs_to_abort == [running]
    assert [(o.outputs[0].text, o.outputs[0].stop_reason) for o in processed.request_outputs] == [("", "END")] * 2
    assert is_empty(processor)


def test_an_error_in_the_core_ends_that_request_with_its_reason(
    processor: OutputProcessor, request_for: MakeRequest
) -> None:
    failed, fine = (add(processor, request_for(name))[0] for name in ("failed", "fine"))
    outputs = processor.process_outputs(
        [step(failed, finish=FinishReason.ERROR, stop_reason="bad grammar"), step(fine, 70)]
    ).request_outputs
    assert (outputs[0].outputs[0].finish_reason, outputs[0].outputs[0].stop_reason) == ("error", "bad grammar")
    assert outputs[0].finished and not outputs[1].finished


async def test_an_error_reaches_every_waiting_consumer_at_once(
    processor: OutputProcessor, request_for: MakeRequest
) -> None:
    queues = []
    for name in ("a", "b"):
        request = request_for(name)
        queues.append(RequestOutputCollector(CUMULATIVE, request.request_id))
        add(processor, request, queue=queues[-1])
    waiting = [asyncio.ensure_future(queue.get()) for queue in queues]
    await asyncio.sleep(0)
    processor.propagate_error(RuntimeError("the core is gone"))
    for result in await asyncio.gather(*waiting, return_exceptions=True):
        assert isinstance(result, RuntimeError)
    assert is_empty(processor)


async def test_a_collector_hands_out_what_came_together_and_waits_for_more() -> None:
    queue = RequestOutputCollector(DELTA, "r")
    getter = asyncio.ensure_future(queue.get())
    await asyncio.sleep(0)
    assert not getter.done() and queue.get_nowait() is None
    queue.put(RequestOutput("r", None, [1], None, [], True))
    assert (await getter).finished


def test_statistics_count_finished_and_aborted_requests_alike(tokenizer: Tokenizer, request_for: MakeRequest) -> None:
    processor, stats = OutputProcessor(tokenizer, log_stats=True), IterationStats()
    children = add(processor, request_for("many", n=2))
    (single,) = add(processor, request_for("single"))
    outputs = [step(children[0], 70, 71, finish=FinishReason.LENGTH), step(children[1], 70), step(single, 70)]
    (first, *_) = processor.process_outputs(outputs, 1.0, stats).request_outputs
    processor.abort_requests(["many", "single"], internal=False, iteration_stats=stats)
    assert first.metrics is not None and first.metrics.num_generation_tokens == 2
    assert stats.num_generation_tokens == 4
    reasons = [(finished.request_id, str(finished.finish_reason)) for finished in stats.finished_requests]
    assert reasons == [("many", "length"), ("many", "abort"), ("single", "abort")]
    assert (stats.n_params_iter, stats.max_num_generation_tokens_iter) == ([2, 1], [2, 1])
