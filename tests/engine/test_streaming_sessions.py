"""A prompt in pieces as the output processor sees it: whose answer an output is, and when the session ends."""

import msgspec
import pytest
from text_pipeline import add, make_config, make_request

from corespan.engine.outputs.output_collector import RequestOutputCollector
from corespan.engine.outputs.output_processor import OutputProcessor
from corespan.engine.outputs.request_output import RequestOutput
from corespan.engine.requests.input_processor import InputProcessor
from corespan.engine.requests.prepared_request import PreparedRequest
from corespan.engine.text.tokenizer import Tokenizer
from corespan.protocol.outputs import EngineCoreOutput, FinishReason
from corespan.protocol.params import RequestOutputKind, SamplingParams

CUMULATIVE, DELTA = RequestOutputKind.CUMULATIVE, RequestOutputKind.DELTA


class Session:
    """One streamed prompt in an output processor, fed with pieces and with what the core makes of them."""

    def __init__(self, tokenizer: Tokenizer, kind: RequestOutputKind) -> None:
        self.inputs = InputProcessor(make_config(), tokenizer)
        self.processor = OutputProcessor(tokenizer, log_stats=False)
        first = self.prepared([70, 71], kind)
        first.request.resumable = True
        self.request_id = first.request_id
        self.kind = kind
        self.queue = RequestOutputCollector(kind, self.request_id)
        add(self.processor, first, queue=self.queue)

    def prepared(self, prompt: list[int], kind: RequestOutputKind) -> PreparedRequest:
        return make_request(self.inputs, prompt, SamplingParams(output_kind=kind, max_tokens=2))

    def piece(self, prompt: list[int], last: bool = False) -> bool:
        request = msgspec.structs.replace(
            self.prepared(prompt, self.kind).request, request_id=self.request_id, resumable=not last
        )
        return self.processor.extend_session(request)

    def core_says(self, *token_ids: int, finish: FinishReason | None = None) -> RequestOutput | None:
        processed = self.processor.process_outputs([EngineCoreOutput(self.request_id, list(token_ids), finish)])
        self.aborted_in_core = processed.reqs_to_abort
        return self.queue.get_nowait()

    @property
    def is_over(self) -> bool:
        return not (self.processor.request_states or self.processor.external_req_ids)


def test_pieces_are_answered_one_after_the_other_until_the_session_closes(tokenizer: Tokenizer) -> None:
    session = Session(tokenizer, DELTA)
    first = session.core_says(80, 81, finish=FinishReason.LENGTH)
    assert first is not None and not first.finished
    assert (first.outputs[0].token_ids, first.outputs[0].finish_reason) == ([80, 81], "length")
    assert session.piece([72, 73])
    second = session.core_says(82)
    assert second is not None and second.outputs[0].token_ids == [82]
    assert second.prompt_token_ids == [70, 71, 80, 72, 73]  # as the core has it: without the token sampled last
    assert session.piece([0], last=True)
    last = session.core_says(83, finish=FinishReason.STOP)
    assert last is not None and last.finished and session.is_over


def test_pieces_that_come_early_wait_for_their_turn(tokenizer: Tokenizer) -> None:
    session = Session(tokenizer, CUMULATIVE)
    assert session.piece([72]) and session.piece([73]) and session.piece([0], last=True)
    outputs = [session.core_says(80 + at, finish=FinishReason.LENGTH) for at in range(3)]
    assert [output.finished for output in outputs if output] == [False, False, True]
    assert [output.prompt_token_ids for output in outputs if output] == [[70, 71], [70, 71, 72], [70, 71, 72, 73]]
    assert [output.outputs[0].token_ids for output in outputs if output] == [[80], [80, 81], [80, 81, 82]]
    assert session.is_over


@pytest.mark.parametrize("kind", [CUMULATIVE, DELTA])
def test_closing_an_idle_session_ends_it_at_once(tokenizer: Tokenizer, kind: RequestOutputKind) -> None:
    session = Session(tokenizer, kind)
    session.core_says(80, finish=FinishReason.STOP)
    assert session.piece([0], last=True)
    output = session.queue.get_nowait()
    assert output is not None and output.finished and session.is_over
    assert output.outputs[0].token_ids == ([] if kind is DELTA else [80])
    assert not session.piece([72])


@pytest.mark.parametrize("finish", [FinishReason.LENGTH, FinishReason.ERROR])
def test_a_session_that_the_core_ends_takes_no_more_pieces(tokenizer: Tokenizer, finish: FinishReason) -> None:
    session = Session(tokenizer, DELTA)
    output = session.core_says(finish=finish)
    assert output is not None and output.finished and session.is_over
    assert session.aborted_in_core == [session.request_id]  # lest a piece on its way there begin another request
    assert not session.piece([72])


def test_an_idle_session_can_be_aborted(tokenizer: Tokenizer) -> None:
    session = Session(tokenizer, DELTA)
    session.core_says(80, finish=FinishReason.STOP)
    assert session.processor.abort_requests([session.request_id], internal=True) == [session.request_id]
    output = session.queue.get_nowait()
    assert output is not None and output.finished and output.outputs[0].finish_reason == "abort"
    assert session.is_over


def test_an_answer_follows_on_its_piece_not_on_the_answer_before(tokenizer: Tokenizer) -> None:
    whole = tokenizer.encode("日", add_special_tokens=False)
    session = Session(tokenizer, CUMULATIVE)
    session.core_says(*whole[:-1], finish=FinishReason.LENGTH)
    session.piece([72])
    output = session.core_says(*whole, finish=FinishReason.LENGTH)
    assert output is not None and output.outputs[0].text == "\ufffd日"
