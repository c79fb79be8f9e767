"""Log-probabilities as users see them: contents, decoded tokens, and views that are cheap until looked at."""

import copy
import dataclasses
import pickle
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import pytest
from text_pipeline import add, logprobs_of, make_config, make_request, stream

from corespan.engine.outputs.logprobs import FlatLogprobs, Logprob, LogprobsStore
from corespan.engine.outputs.output_processor import OutputProcessor
from corespan.engine.outputs.request_output import RequestOutput
from corespan.engine.requests.input_processor import InputProcessor
from corespan.engine.text.tokenizer import Tokenizer
from corespan.protocol.outputs import EngineCoreOutput, FinishReason, LogprobsArrays
from corespan.protocol.params import RequestOutputKind, SamplingParams

CUMULATIVE, DELTA, FINAL_ONLY = RequestOutputKind.CUMULATIVE, RequestOutputKind.DELTA, RequestOutputKind.FINAL_ONLY
Run = Callable[..., list[RequestOutput]]


@pytest.fixture
def run(tokenizer: Tokenizer) -> Run:
    """The outputs of a request whose core yields the steps given, each (token ids, their logprobs)."""

    def run(
        steps: Sequence[tuple[list[int], LogprobsArrays | None]],
        prompt: Any = "Once",
        of_prompt: Sequence[LogprobsArrays] = (),
        params: dict[str, Any] | None = None,
    ) -> list[RequestOutput]:
        inputs = InputProcessor(make_config(), tokenizer)
        processor = OutputProcessor(tokenizer, log_stats=False)
        request = make_request(inputs, prompt, SamplingParams(**{"max_tokens": 50} | (params or {})))
        (internal,) = add(processor, request)
        outputs = []
        for at, (token_ids, logprobs) in enumerate(steps):
            finish = FinishReason.LENGTH if at == len(steps) - 1 else None
            chunk = of_prompt[at] if at < len(of_prompt) else None
            output = EngineCoreOutput(internal, token_ids, finish, new_logprobs=logprobs, new_prompt_logprobs=chunk)
            outputs += processor.process_outputs([output]).request_outputs
        return outputs

    return run


def test_an_entry_begins_with_the_chosen_token_and_then_lists_the_likeliest(run: Run) -> None:
    (output,) = run([([70], logprobs_of([70], [[80, 81]]))], params={"logprobs": 2})
    (entry,) = output.outputs[0].logprobs or ()
    assert list(entry) == [70, 80, 81]
    assert [entry[token].rank for token in entry] == [7, 1, 2]
    assert [round(entry[token].logprob, 3) for token in entry] == [-1.0, -1.1, -1.2]


def test_a_chosen_token_among_the_likeliest_stands_once(run: Run) -> None:
    (output,) = run([([70], logprobs_of([70], [[80, 70]]))], params={"logprobs": 2})
    (entry,) = output.outputs[0].logprobs or ()
    assert {token: entry[token].rank for token in entry} == {70: 2, 80: 1}


def test_logprobs_0_gives_the_chosen_token_alone_out_of_wider_arrays(run: Run) -> None:
    (output,) = run([([70], logprobs_of([70], [[80, 81]]))], params={"logprobs": 0})
    assert [list(entry) for entry in output.outputs[0].logprobs or ()] == [[70]]


def test_named_tokens_carry_no_rank(run: Run) -> None:
    (output,) = run([([70], logprobs_of([70], [[80, 70]]))], params={"logprob_token_ids": [80, 70]})
    (entry,) = output.outputs[0].logprobs or ()
    assert {token: entry[token].rank for token in entry} == {70: 7, 80: None}


def test_the_cumulative_logprob_is_the_sum_over_the_chosen_tokens(run: Run) -> None:
    steps = [([70], logprobs_of([70])), ([71], logprobs_of([71]))]
    for kind in RequestOutputKind:
        assert run(steps, params={"logprobs": 0, "output_kind": kind})[-1].outputs[0].cumulative_logprob == -2.0
    assert run([([70], None)])[-1].outputs[0].cumulative_logprob is None


def test_an_infinite_logprob_stays_a_float(run: Run) -> None:
    arrays = LogprobsArrays(np.array([[70, 71]]), np.array([[-1.0, -np.inf]], np.float32), np.array([1]))
    (output,) = run([([70], arrays)], params={"logprobs": 1})
    assert output.outputs[0].logprobs[0][71].logprob == -float("inf")  # type: ignore[index]


@pytest.mark.parametrize("kind", list(RequestOutputKind))
@pytest.mark.parametrize("flat", [False, True])
def test_every_kind_gives_the_same_entries(run: Run, kind: RequestOutputKind, flat: bool) -> None:
    steps = [([token], logprobs_of([token], [[80, 81]])) for token in (70, 71, 72)]
    outputs = run(steps, params={"logprobs": 2, "output_kind": kind, "flat_logprobs": flat})
    pieces = [output.outputs[0].logprobs or [] for output in outputs]
    entries = [entry for piece in pieces for entry in piece] if kind is DELTA else list(pieces[-1])
    assert [list(entry) for entry in entries] == [[token, 80, 81] for token in (70, 71, 72)]
    assert all(isinstance(piece, FlatLogprobs) for piece in pieces) == flat
    if kind is CUMULATIVE:
        assert [len(piece) for piece in pieces] == [1, 2, 3]


def test_decoded_tokens_of_the_chosen_ones_join_to_the_text(tokenizer: Tokenizer, run: Run) -> None:
    text = "ďábel 👩‍👩‍👧 日本 ok"
    token_ids = tokenizer.encode(text, add_special_tokens=False)
    outputs = run([([token], logprobs_of([token])) for token in token_ids], params={"logprobs": 0})
    entries = outputs[-1].outputs[0].logprobs or []
    decoded = [next(iter(entry.values())).decoded_token for entry in entries]
    assert "".join(piece or "" for piece in decoded) == text
    ascii_tokens = [at for at, token in enumerate(token_ids) if tokenizer.decode([token]).isascii()]
    assert [decoded[at] for at in ascii_tokens] == [tokenizer.decode([token_ids[at]]) for at in ascii_tokens]


def test_the_first_generated_token_may_complete_the_prompts_last_character(tokenizer: Tokenizer, run: Run) -> None:
    token_ids = tokenizer.encode("日", add_special_tokens=False)
    outputs = run([(token_ids[-1:], logprobs_of(token_ids[-1:]))], prompt=token_ids[:-1], params={"logprobs": 0})
    assert outputs[-1].outputs[0].logprobs == [{token_ids[-1]: Logprob(-1.0, 7, "日")}]


def test_without_detokenisation_no_token_is_decoded(run: Run) -> None:
    (output,) = run([([70], logprobs_of([70]))], params={"logprobs": 0, "detokenize": False})
    assert output.outputs[0].logprobs == [{70: Logprob(-1.0, 7, None)}]


def test_tokens_behind_a_stop_string_take_their_logprobs_with_them(tokenizer: Tokenizer, run: Run) -> None:
    token_ids = [token for char in "abcd" for token in tokenizer.encode(char, add_special_tokens=False)]
    (output,) = run([(token_ids, logprobs_of(token_ids))], params={"logprobs": 0, "stop": ["b"]})
    assert output.outputs[0].token_ids == token_ids[:2]
    assert len(output.outputs[0].logprobs or ()) == 2
    assert output.outputs[0].cumulative_logprob == -3.0


PROMPT = [70, 71, 72, 73]


@pytest.mark.parametrize("kind", list(RequestOutputKind))
@pytest.mark.parametrize("flat", [False, True])
def test_prompt_logprobs_begin_with_none_and_cover_every_token(
    tokenizer: Tokenizer, run: Run, kind: RequestOutputKind, flat: bool
) -> None:
    outputs = run(
        [([90], None), ([91], None)],
        PROMPT,
        [logprobs_of(PROMPT[1:], [[80]] * 3)],
        params={"prompt_logprobs": 1, "output_kind": kind, "flat_logprobs": flat},
    )
    carried = [list(output.prompt_logprobs or ()) for output in outputs]
    first = carried[0]
    assert first[0] == ({} if flat else None)
    assert [list(entry or ()) for entry in first[1:]] == [[token, 80] for token in PROMPT[1:]]
    assert [(entry or {})[token].decoded_token for entry, token in zip(first[1:], PROMPT[1:], strict=True)] == [
        tokenizer.decode([token]) for token in PROMPT[1:]
    ]
    expected = {CUMULATIVE: [4, 4], DELTA: [4, 0], FINAL_ONLY: [4]}[kind]
    assert [len(entries) for entries in carried] == expected


def test_prompt_logprobs_come_together_from_chunks_and_are_not_taken_twice(run: Run) -> None:
    chunks = [logprobs_of(PROMPT[1:3]), logprobs_of(PROMPT[3:]), logprobs_of(PROMPT[1:])]
    outputs = run([([], None), ([90], None), ([91], None)], PROMPT, chunks, params={"prompt_logprobs": 0})
    assert [list(entry or ()) for entry in outputs[-1].prompt_logprobs or ()] == [
        [],
        *([token] for token in PROMPT[1:]),
    ]


def test_an_output_that_asked_for_none_has_none(run: Run) -> None:
    (output,) = run([([70], None)])
    assert output.prompt_logprobs is None and output.outputs[0].logprobs is None


def test_a_view_behaves_like_the_list_of_its_entries(run: Run) -> None:
    steps = [([token], logprobs_of([token])) for token in (70, 71, 72)]
    view = run(steps, params={"logprobs": 0})[-1].outputs[0].logprobs
    assert view is not None
    entries = list(view)
    assert view == entries and len(view) == 3
    assert view[-1] == entries[-1] and view[1:] == entries[1:] and view[::2] == entries[::2]
    assert entries[0] in view and repr(view) == repr(entries)
    assert pickle.loads(pickle.dumps(view)) == entries
    with pytest.raises(IndexError, match="3"):
        view[3]


def test_a_view_is_used_as_a_list(run: Run) -> None:
    steps = [([token], logprobs_of([token])) for token in (70, 71, 72)]

    def fresh() -> Any:
        return run(steps, params={"logprobs": 0})[-1].outputs[0]

    entries = list(fresh().logprobs)
    more = {9: Logprob(-9.0)}
    changes: list[Callable[[Any], Any]] = [
        lambda logprobs: logprobs.append(more),
        lambda logprobs: logprobs.extend([more, more]),
        lambda logprobs: logprobs.extend(fresh().logprobs),
        lambda logprobs: logprobs.insert(1, more),
        lambda logprobs: logprobs.__setitem__(0, more),
        lambda logprobs: logprobs.__delitem__(0),
        lambda logprobs: logprobs.pop(),
        lambda logprobs: logprobs.reverse(),
        lambda logprobs: logprobs.__iadd__([more]),
    ]
    for change in changes:
        view, plain = fresh().logprobs, list(entries)
        change(view)
        change(plain)
        assert view == plain == view and len(view) == len(plain) and view[-1] == plain[-1] and list(view) == plain
    view = fresh().logprobs
    assert isinstance(view, list) and view == entries and entries == view and view != entries[1:]
    assert entries + view == view + entries == view + view == entries * 2
    grown: list[Any] = []
    grown += view
    assert grown == entries and copy.copy(view) == copy.deepcopy(view) == view.copy() == entries
    assert [list(entry) for entry in dataclasses.asdict(fresh())["logprobs"]] == [[70], [71], [72]]


def test_prompt_logprobs_are_used_as_a_list_too(run: Run) -> None:
    (output,) = run([([90], None)], PROMPT, [logprobs_of(PROMPT[1:])], params={"prompt_logprobs": 0})
    view = output.prompt_logprobs
    assert isinstance(view, list)
    entries = list(view)
    view.insert(0, {})
    view += [None]
    assert view == [{}, *entries, None] and [{}] + view == [{}, {}, *entries, None]


def test_a_view_makes_no_entry_before_it_is_looked_at(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    made: list[int] = []
    entry = LogprobsStore.entry

    def counted(store: LogprobsStore, position: int) -> dict[int, Logprob]:
        made.append(position)
        return entry(store, position)

    monkeypatch.setattr(LogprobsStore, "entry", counted)
    steps = [([token], logprobs_of([token])) for token in (70, 71, 72)]
    (output,) = run(steps, params={"logprobs": 0, "output_kind": FINAL_ONLY})[-1:]
    view = output.outputs[0].logprobs or []
    assert isinstance(view, list) and len(view) == 3 and made == []
    assert list(view[1]) == [71] and made == [1]
    assert [list(found) for found in view[1:]] == [[71], [72]] and made == [1, 1, 2]


def test_flat_logprobs_grow_at_the_end_and_nowhere_else() -> None:
    flat = FlatLogprobs()
    flat.append(None)
    flat.extend([{5: Logprob(-1.0, 1, "a"), 6: Logprob(-2.0, 2, "b")}, {7: Logprob(-3.0, 1, "c")}])
    assert (flat.start_indices, flat.end_indices) == ([0, 0, 2], [0, 2, 3])
    assert (flat.token_ids, flat.ranks, flat.decoded_tokens) == ([5, 6, 7], [1, 2, 1], ["a", "b", "c"])
    assert flat[0] == {} and flat[1][6].logprob == -2.0
    assert isinstance(flat[1:], FlatLogprobs) and list(flat[1:])[1] == flat[2]
    for change in (lambda: flat.insert(0, {}), lambda: flat.__setitem__(0, {}), lambda: flat.__delitem__(0)):
        with pytest.raises(TypeError, match="end only"):
            change()


def test_merged_deltas_join_their_logprobs(tokenizer: Tokenizer) -> None:
    inputs = InputProcessor(make_config(), tokenizer)
    for flat in (False, True):
        params = SamplingParams(logprobs=0, output_kind=DELTA, max_tokens=9, flat_logprobs=flat)
        request = make_request(inputs, "Once", params)
        first, *rest = stream(tokenizer, request, [70, 71, 72], logprobs=True)
        for output in rest:
            first.add(output, aggregate=True)
        assert first.outputs[0].token_ids == [70, 71, 72]
        assert [list(entry) for entry in first.outputs[0].logprobs or ()] == [[70], [71], [72]]
