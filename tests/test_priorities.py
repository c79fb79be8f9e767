"""Scheduling by priority under load: who begins, who has to give way, and who begins again, over the three clients."""

import random
from dataclasses import dataclass
from typing import Any

import pytest

from corespan import RequestOutput, SamplingParams
from corespan.protocol.outputs import EngineCoreOutput, EventType

NUM_PLACES = 4
PRIORITIES = (5, 0, 0, 1, -2, 0, 1)


@dataclass(frozen=True, order=True)
class Move:
    """Something that happened to a request, by the core's clock; `request` is its place in the order of arrival."""

    seconds: float
    what: str
    request: int


class Recorder:
    """Every move of every request, taken from what the core sends."""

    def __init__(self, runner: Any, monkeypatch: pytest.MonkeyPatch) -> None:
        self.moves: list[Move] = []
        self._processor = runner.engine.output_processor if runner.kind == "async_mp" else None
        self._processor = self._processor or runner.llm.llm_engine.output_processor
        self._process_outputs = self._processor.process_outputs
        monkeypatch.setattr(self._processor, "process_outputs", self._record)

    def _record(self, outputs: list[EngineCoreOutput], seconds: float, *rest: Any) -> Any:
        for output in outputs:
            state = self._processor.request_states[output.request_id]
            request = state.request.prompt_token_ids[0]  # prompts begin with their place in the order
            for event in output.events or ():
                self.moves.append(Move(event.timestamp, EventType(event.type).name, request))
            if output.finish_reason is not None:
                self.moves.append(Move(seconds, "FINISHED", request))
        return self._process_outputs(outputs, seconds, *rest)


def check_order(moves: list[Move], priorities: list[int]) -> None:
    """Replays the moves: only the first in order of those that wait may begin or go on, only the last in order of those
    that run may be preempted."""
    order = [(priority, request) for request, priority in enumerate(priorities)]
    waiting: set[int] = set()
    running: set[int] = set()
    for move in sorted(moves):
        if move.what == "QUEUED":
            waiting.add(move.request)
        elif move.what == "SCHEDULED":
            assert move.request == min(waiting, key=order.__getitem__)
            waiting.remove(move.request)
            running.add(move.request)
            assert len(running) <= NUM_PLACES
        elif move.what == "PREEMPTED":
            assert move.request == max(running, key=order.__getitem__)
            running.remove(move.request)
            waiting.add(move.request)
        else:
            running.remove(move.request)
    assert not waiting and not running


def prompts_from(first: int, count: int) -> list[dict[str, Any]]:
    rng = random.Random(first)
    lengths = [rng.randint(10, 34) for _ in range(count)]
    return [{"prompt_token_ids": [first + at] + [100 + at] * length} for at, length in enumerate(lengths)]


def begun(moves: list[Move]) -> list[int]:
    """The requests in the order in which they first began."""
    return list(dict.fromkeys(move.request for move in sorted(moves) if move.what == "SCHEDULED"))


def test_under_load_the_order_is_by_priority_and_then_by_arrival(
    make_runner: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Sixty requests on four places and few blocks: some have to give way, some come while others run."""
    engine = make_runner(
        scheduling_policy="priority",
        max_num_seqs=NUM_PLACES,
        max_model_len=80,
        num_gpu_blocks_override=13,
        disable_log_stats=False,
    )
    recorder = Recorder(engine, monkeypatch)
    params = SamplingParams(temperature=0, max_tokens=24, ignore_eos=True)
    waves = [prompts_from(0, 36), prompts_from(36, 12), prompts_from(48, 12)]
    rng = random.Random(1)
    priorities = [[rng.choice(PRIORITIES) for _ in wave] for wave in waves]

    outputs: list[RequestOutput] = engine.generate_in_waves(waves, params, priorities)

    assert [output.prompt_token_ids[0] for output in outputs] == list(range(60))
    assert {len(output.outputs[0].token_ids) for output in outputs} == {24}
    all_priorities = [priority for wave in priorities for priority in wave]
    check_order(recorder.moves, all_priorities)
    assert any(move.what == "PREEMPTED" for move in recorder.moves)
    order = begun(recorder.moves)
    first_wave = [request for request in order if request < 36]
    assert first_wave == sorted(first_wave, key=lambda request: (all_priorities[request], request))
    assert order != sorted(order, key=lambda request: (all_priorities[request], request))  # some came too late for that
    assert engine.is_idle()
