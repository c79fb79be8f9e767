"""Beam search under a grammar: beams match it, and are those of transformers' constrained search and of trying all."""

import json
import re
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import jsonschema
import pytest

from corespan import LLM, BeamSearchParams, StructuredOutputsParams
from corespan.core.scheduler.request import Request
from corespan.core.structured_output.manager import StructuredOutputManager
from corespan.protocol.requests import EngineCoreRequest
from corespan.protocol.resolved_sampling import ResolvedSampling

PROMPTS = ["The capital of France is", "Once upon a time"]
EOS = 1


@pytest.fixture(scope="module", params=[False, True], ids=["inproc", "sync_mp"])
def llm(request: pytest.FixtureRequest, tiny_llama_dir: str) -> Iterator[LLM]:
    from clients import SMALL_ENGINE, multiprocessing_flag

    with multiprocessing_flag(request.param):
        llm = LLM(tiny_llama_dir, **SMALL_ENGINE)
    yield llm
    llm.shutdown()


def allowed_by(llm: LLM, constraint: StructuredOutputsParams) -> Callable[[Sequence[int]], list[int]]:
    """The tokens that may follow on an answer's first ones."""
    import numpy as np

    manager = StructuredOutputManager(llm.llm_engine.vllm_config)

    def allowed(answer: Sequence[int]) -> list[int]:
        sampling = ResolvedSampling(structured_outputs=constraint)
        request = Request(EngineCoreRequest("r", [5], sampling, output_token_ids=list(answer)))
        manager.grammar_init(request)
        request.structured_output_state.exception()  # type: ignore[attr-defined]  # waits
        assert manager.is_grammar_ready(request)
        bits = manager.grammar_bitmask([request]).view(np.uint8)
        return np.flatnonzero(np.unpackbits(bits, bitorder="little")).tolist()

    return allowed


@pytest.mark.parametrize(("pattern", "ignore_eos"), [("[a-z ]{6,30}", False), ("(yes|no|maybe)( [a-c]{2,5})?", True)])
def test_beams_equal_transformers_constrained_search(llm: LLM, reference: Any, pattern: str, ignore_eos: bool) -> None:
    constraint = StructuredOutputsParams(regex=pattern)
    allowed = allowed_by(llm, constraint)
    params = BeamSearchParams(
        4, 8, structured_outputs=constraint, include_stop_str_in_output=True, ignore_eos=ignore_eos
    )

    outputs = llm.beam_search(PROMPTS, params)

    for prompt, output in zip(PROMPTS, outputs, strict=True):
        ids = llm.get_tokenizer().encode(prompt)
        length = len(ids)

        def may_follow(_: int, tokens: Any, length: int = length) -> list[int]:
            return allowed(tokens[length:].tolist()) or [EOS]

        expected = reference.generate(
            ids,
            num_beams=4,
            num_return_sequences=4,
            max_new_tokens=8,
            do_sample=False,
            eos_token_id=EOS,
            prefix_allowed_tokens_fn=may_follow,
        )
        found = [beam.tokens[len(ids) :] for beam in output.sequences]
        assert found == [tokens[: len(like)] for tokens, like in zip(expected, found, strict=True)]
        for beam in output.sequences:
            if beam.finish_reason == "stop":
                assert beam.tokens[-1] == beam.stop_reason == EOS
                assert re.fullmatch(pattern, llm.get_tokenizer().decode(beam.tokens[len(ids) : -1]))


def test_with_room_for_all_of_them_the_beams_are_the_choices_by_their_probability(llm: LLM, reference: Any) -> None:
    choices = ["red", "green", "blue", "yellow sun", "a", "an apple"]
    allowed = allowed_by(llm, StructuredOutputsParams(choice=choices))
    ids = llm.get_tokenizer().encode(PROMPTS[0])

    def answers(answer: list[int]) -> Iterator[list[int]]:
        if answer[-1:] == [EOS]:
            yield answer
        else:
            for token in allowed(answer):
                yield from answers([*answer, token])

    def score(answer: list[int]) -> float:
        """Of the tokens' own probabilities, which the grammar does not change."""
        logprobs = reference.logprobs([*ids, *answer])
        return float(sum(logprobs[len(ids) - 1 + at, token] for at, token in enumerate(answer)))

    # Texts that can be spelled in several ways come in each of them.
    everything = sorted(((score(answer), answer) for answer in answers([])), reverse=True)[:8]
    params = BeamSearchParams(
        8, 12, structured_outputs=StructuredOutputsParams(choice=choices), length_penalty=0.0,
        include_stop_str_in_output=True,
    )  # fmt: skip

    (output,) = llm.beam_search(PROMPTS[:1], params)

    found = [(beam.cum_logprob, beam.tokens[len(ids) :]) for beam in output.sequences]
    assert [answer for _, answer in found] == [answer for _, answer in everything]
    assert [cum_logprob for cum_logprob, _ in found] == pytest.approx([score for score, _ in everything], abs=1e-3)
    assert {llm.get_tokenizer().decode(answer[:-1]) for _, answer in found} <= set(choices)


def test_a_grammar_with_fewer_texts_than_beams_gives_these(llm: LLM) -> None:
    params = BeamSearchParams(4, 12, structured_outputs=StructuredOutputsParams(regex="7"))

    (output,) = llm.beam_search(PROMPTS[:1], params)

    ids = llm.get_tokenizer().encode(PROMPTS[0])
    assert [llm.get_tokenizer().decode(beam.tokens[len(ids) :]) for beam in output.sequences] == ["7"]


def test_every_beam_validates_against_its_schema(llm: LLM) -> None:
    schema = {"type": "object", "properties": {"n": {"enum": [1, 20, 300]}, "ok": {"type": "boolean"}},
              "required": ["n", "ok"], "additionalProperties": False}  # fmt: skip
    constraint = StructuredOutputsParams(json=schema, disable_any_whitespace=True)

    for output in llm.beam_search(PROMPTS, BeamSearchParams(4, 40, structured_outputs=constraint)):
        assert len(output.sequences) == 4
        for beam in output.sequences:
            ids = llm.get_tokenizer().encode(beam.orig_prompt)
            assert beam.finish_reason == "stop"
            jsonschema.validate(json.loads(llm.get_tokenizer().decode(beam.tokens[len(ids) :])), schema)


def test_a_grammar_that_cannot_be_met_is_refused_at_the_caller(llm: LLM) -> None:
    with pytest.raises(ValueError, match="structured_outputs.regex cannot be used"):
        llm.beam_search(PROMPTS, BeamSearchParams(2, 4, structured_outputs=StructuredOutputsParams(regex="(")))
    assert not llm.llm_engine.has_unfinished_requests()
