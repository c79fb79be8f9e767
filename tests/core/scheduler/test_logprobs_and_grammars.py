"""Logprobs on their way through the scheduler, and requests whose tokens a grammar constrains."""

from typing import Any

import numpy as np
import pytest
from scheduling import Harness, Step, expected_tokens, greedy, prompt

from corespan.core.scheduler.request import Request, RequestStatus
from corespan.core.scheduler.runner_messages import ModelRunnerOutput
from corespan.core.scheduler.shell_outputs import row_of
from corespan.protocol.outputs import FinishReason, LogprobsArrays
from corespan.protocol.params import SamplingParams
from corespan.protocol.structured_outputs import StructuredOutputsParams


def logprobs_of(positions: range, columns: int) -> LogprobsArrays:
    """Rows that can be told apart: every entry is its position."""
    rows = np.array(positions, dtype=np.int32)
    grid = np.repeat(rows[:, None], columns, axis=1)
    return LogprobsArrays(grid, grid.astype(np.float32), rows)


class LogprobsHarness(Harness):
    """Its runner reports prompt logprobs for each chunk and logprobs with three columns for each token."""

    def step(self) -> Step:
        planned = self.schedule()
        chunks: dict[int, LogprobsArrays] = {}
        for row, num_tokens in zip(planned.rows.tolist(), planned.num_scheduled_tokens.tolist(), strict=True):
            request = self.scheduler.table.running[row]
            if request.sampling_params.prompt_logprobs is not None:
                end = min(request.num_computed_tokens, request.num_prompt_tokens - 1)
                start = request.num_computed_tokens - num_tokens
                if end > start:
                    chunks[row] = logprobs_of(range(start, end), 2)
        output = self.runner.execute_model(planned)
        output.prompt_logprobs = chunks
        output.logprobs = logprobs_of(range(len(output.rows)), 3)
        self.take(planned, output)
        return self.steps[-1]


def prompt_positions(h: Harness, request_id: str) -> list[list[int]]:
    return [
        output.new_prompt_logprobs.ranks.tolist()
        for output in h.outputs[request_id]
        if output.new_prompt_logprobs is not None
    ]


def test_every_request_takes_its_own_row_and_as_many_columns_as_it_asked_for() -> None:
    h = LogprobsHarness()
    for name, count in (("a", 0), ("b", 2), ("c", None), ("d", -1)):
        h.add(name, prompt(4), greedy(2, logprobs=count))
    h.step()
    rows = {name: h.outputs[name][0].new_logprobs for name in "abcd"}
    assert rows["c"] is None
    for row, (name, columns) in enumerate((("a", 1), ("b", 3))):
        logprobs = rows[name]
        assert logprobs is not None
        assert logprobs.logprobs.tolist() == [[row] * columns] == logprobs.token_ids.tolist()
        assert logprobs.ranks.tolist() == [row]
    assert rows["d"] is not None and rows["d"].token_ids.shape == (1, 3)


def test_a_requests_row_keeps_nothing_of_the_batch_alive() -> None:
    batch = LogprobsArrays(
        np.zeros((256, 21), dtype=np.int32), np.zeros((256, 21), dtype=np.float32), np.zeros(256, dtype=np.int32)
    )
    for num_logprobs in (1, 20, -1):
        row = row_of(batch, 7, num_logprobs)
        for array in (row.token_ids, row.logprobs, row.ranks):
            assert array.base is None


def test_prompt_logprobs_of_all_chunks_come_whole_with_the_first_token() -> None:
    h = LogprobsHarness(max_num_batched_tokens=16, max_num_seqs=4)
    h.add("a", prompt(33), greedy(3, prompt_logprobs=1))
    h.run()
    assert prompt_positions(h, "a") == [list(range(32))]
    assert h.outputs["a"][0].new_prompt_logprobs is not None
    assert h.tokens("a") == expected_tokens(prompt(33), count=3)


def test_prompt_logprobs_do_not_depend_on_a_warm_cache() -> None:
    h = LogprobsHarness()
    for name in "ab":
        h.add(name, prompt(33), greedy(1, prompt_logprobs=1))
        h.run()
        assert prompt_positions(h, name) == [list(range(32))]
        assert h.num_cached_tokens(name) == 0


def test_prompt_logprobs_come_once_though_the_request_is_preempted_in_mid_prompt_and_later() -> None:
    h = LogprobsHarness(max_num_batched_tokens=16, max_num_seqs=4)
    h.add("a", prompt(33), greedy(4, prompt_logprobs=1))
    h.step()
    h.scheduler.reset_prefix_cache(reset_running_requests=True)
    for _ in range(4):
        h.step()
    assert len(h.tokens("a")) == 2
    h.scheduler.reset_prefix_cache(reset_running_requests=True)
    h.run()
    assert prompt_positions(h, "a") == [list(range(32))]
    assert h.tokens("a") == expected_tokens(prompt(33), count=4)


def test_a_restarted_request_does_not_repeat_its_prompt_logprobs() -> None:
    h = LogprobsHarness()
    h.add("a", prompt(33), greedy(4, prompt_logprobs=1), output_token_ids=expected_tokens(prompt(33), count=2))
    h.run()
    assert prompt_positions(h, "a") == []


class FakeGrammars:
    """Grammars that allow only even tokens, are compiled when told so, and break where told so."""

    def __init__(self) -> None:
        self.ready: set[str] = set()
        self.broken: dict[str, Exception] = {}
        self.accepted: list[tuple[str, int]] = []
        self.refuse: set[str] = set()
        self.complete: set[str] = set()
        self.asked: list[list[str]] = []

    def is_grammar_ready(self, request: Request) -> bool:
        if request.request_id in self.broken:
            raise self.broken[request.request_id]
        return request.request_id in self.ready

    def grammar_bitmask(self, requests: list[Request]) -> np.ndarray:
        self.asked.append([request.request_id for request in requests])
        return np.full((len(requests), 2), 0x55555555, dtype=np.int32)

    def accept_token(self, request: Request, token_id: int) -> bool:
        self.accepted.append((request.request_id, token_id))
        return request.request_id not in self.refuse

    def is_complete(self, request: Request) -> bool:
        return request.request_id in self.complete


def constrained(max_tokens: int = 4) -> SamplingParams:
    return greedy(max_tokens, structured_outputs=StructuredOutputsParams(regex="a*"))


@pytest.fixture
def grammars() -> FakeGrammars:
    return FakeGrammars()


def make_harness(grammars: FakeGrammars, **config: Any) -> Harness:
    return Harness(manager=grammars, **config)


def test_a_request_waits_for_its_grammar_while_later_ones_run(grammars: FakeGrammars) -> None:
    h = make_harness(grammars, max_num_seqs=1)
    waiting = h.add("json", prompt(4), constrained())
    for name in "abc":
        h.add(name, prompt(4, 2), greedy(1))
    assert list(h.step().num_scheduled_tokens) == ["a"]
    assert waiting.status is RequestStatus.WAITING_FOR_STRUCTURED_OUTPUT_GRAMMAR
    assert h.scheduler.get_num_unfinished_requests() == 3
    grammars.ready.add("json")
    assert list(h.step().num_scheduled_tokens) == ["json"]  # in its old place
    h.run()
    assert h.finish_reason("json") is FinishReason.LENGTH


def test_those_that_wait_for_a_grammar_are_counted_apart_among_the_waiting(grammars: FakeGrammars) -> None:
    h = make_harness(grammars, max_num_seqs=1)
    h.add("json", prompt(4), constrained())
    for name in "abc":
        h.add(name, prompt(4, 2), greedy(5))
    h.step()
    stats = h.scheduler.make_stats()
    assert (stats.num_running_reqs, stats.num_waiting_reqs, stats.num_skipped_waiting_reqs) == (1, 3, 1)
    grammars.ready.add("json")
    h.step()
    stats = h.scheduler.make_stats()
    assert (stats.num_running_reqs, stats.num_waiting_reqs, stats.num_skipped_waiting_reqs) == (1, 3, 0)


@pytest.mark.parametrize("error", [ValueError("no such rule"), FileNotFoundError("no tokenizer")])
def test_a_grammar_that_cannot_be_compiled_ends_its_request_alone(grammars: FakeGrammars, error: Exception) -> None:
    h = make_harness(grammars)
    grammars.broken["json"] = error
    h.add("json", prompt(4), constrained())
    h.add("a", prompt(4, 2))
    h.run()
    assert h.finish_reason("json") is FinishReason.ERROR
    assert str(error) in str(h.outputs["json"][-1].stop_reason)
    assert h.tokens("a") == expected_tokens(prompt(4, 2))


def test_the_mask_covers_those_that_sample_in_the_step(grammars: FakeGrammars) -> None:
    grammars.ready.update(("long", "short"))
    h = make_harness(grammars, max_num_batched_tokens=16, max_num_seqs=8)
    h.add("short", prompt(4), constrained())
    h.add("free", prompt(4, 7))
    h.add("long", prompt(20, 3), constrained())
    steps = [h.step() for _ in range(2)]
    assert [step.structured for step in steps] == [["short"], ["short", "long"]]
    for step in steps:
        assert step.grammar_bitmask is not None
        assert step.grammar_bitmask.shape == (len(step.structured), 2)
    h.run()


def test_the_grammar_sees_every_token_but_the_last(grammars: FakeGrammars) -> None:
    grammars.ready.add("json")
    h = make_harness(grammars)
    h.add("json", prompt(4), constrained())
    h.add("free", prompt(4, 7))
    h.run()
    assert grammars.accepted == [("json", token_id) for token_id in h.tokens("json")[:-1]]


def test_a_token_that_breaks_the_grammar_ends_its_request_alone(grammars: FakeGrammars) -> None:
    grammars.ready.update(("json", "other"))
    grammars.refuse.add("json")
    h = make_harness(grammars)
    h.add("json", prompt(4), constrained())
    h.add("other", prompt(4, 7), constrained())
    h.run()
    assert h.finish_reason("json") is FinishReason.ERROR
    assert "grammar" in str(h.outputs["json"][-1].stop_reason)
    assert h.tokens("other") == expected_tokens(prompt(4, 7), count=4)


def test_a_preempted_request_is_not_held_up_by_its_grammar_again(grammars: FakeGrammars) -> None:
    grammars.ready.add("json")
    h = make_harness(grammars)
    h.add("json", prompt(4), constrained())
    h.step()
    grammars.ready.clear()
    h.scheduler.reset_prefix_cache(reset_running_requests=True)
    h.run()
    assert h.tokens("json") == expected_tokens(prompt(4), count=4)
    assert [token_id for _, token_id in grammars.accepted] == h.tokens("json")[:-1]


def test_a_request_may_be_aborted_while_its_grammar_is_compiled(grammars: FakeGrammars) -> None:
    h = make_harness(grammars)
    h.add("json", prompt(4), constrained())
    h.step()
    assert h.scheduler.finish_requests(["json"]) == [("json", 0)]
    grammars.ready.add("json")
    assert not h.scheduler.has_requests()
    assert not h.step().num_scheduled_tokens


def test_without_a_grammar_manager_a_constrained_request_ends_with_an_error() -> None:
    h = Harness()
    h.add("json", prompt(4), constrained())
    h.run()
    assert h.finish_reason("json") is FinishReason.ERROR


def test_a_step_in_which_nobody_is_constrained_asks_no_grammar(grammars: FakeGrammars) -> None:
    h = make_harness(grammars)
    h.add("a", prompt(4))
    step = h.step()
    assert grammars.asked == [] and step.grammar_bitmask is None
    assert isinstance(h.runner.execute_model(h.scheduler.schedule()), ModelRunnerOutput)


def test_a_complete_text_ends_its_request_where_no_end_token_can_be_drawn(grammars: FakeGrammars) -> None:
    h = make_harness(grammars)
    grammars.ready |= {"complete", "open"}
    for name in ("complete", "open"):
        h.add(name, prompt(4), constrained())
    h.step()
    grammars.complete.add("complete")
    h.run()
    assert h.finish_reason("complete") is FinishReason.STOP and h.finish_reason("open") is FinishReason.LENGTH
    assert [name for name, _ in grammars.accepted].count("complete") == 2
