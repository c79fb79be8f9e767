"""Beam search over the engine's ordinary requests: each step asks for one token, with its alternatives, per live beam.

`LLM.beam_search` calls it. Which beams live, end and win is decided as transformers does it. The prefix cache keeps a
step from computing its beams anew.
"""

import heapq
import math
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field

from ..protocol.errors import EngineGenerateError
from ..protocol.lora import LoRARequest
from ..protocol.param_checks import int_at_least, reject_type
from ..protocol.params import BeamSearchParams, SamplingParams
from .llm_engine import LLMEngine
from .outputs.logprobs import Logprob
from .outputs.request_output import RequestOutput
from .progress import UseTqdm, progress
from .text.prompts import EngineInput, PromptType

Generate = Callable[
    [Sequence[PromptType], SamplingParams, Sequence[LoRARequest | None], Sequence[int] | None], list[RequestOutput]
]
"""One output a prompt, each with its adapter. Under a grammar each prompt comes with how many tokens at its end are the
beam's."""


@dataclass(slots=True)
class BeamSearchSequence:
    """One continuation. `tokens` begin with the prompt's, `text` is all of them; `logprobs`: one entry per new."""

    orig_prompt: PromptType
    tokens: list[int]
    logprobs: list[dict[int, Logprob]] = field(default_factory=list)
    cum_logprob: float = 0.0
    text: str | None = None
    finish_reason: str | None = None
    stop_reason: int | str | None = None


@dataclass(slots=True)
class BeamSearchOutput:
    """A prompt's best continuations, the best first."""

    sequences: list[BeamSearchSequence]


def beam_search(
    engine: LLMEngine,
    generate: Generate,
    prompts: Sequence[PromptType],
    params: BeamSearchParams,
    lora_requests: Sequence[LoRARequest | None],
    use_tqdm: UseTqdm = False,
    concurrency_limit: int | None = None,
) -> list[BeamSearchOutput]:
    """The best `params.beam_width` continuations of each prompt, searched for at most `concurrency_limit` at a time.

    A prompt's alternatives count as `logprobs`: twice the beam width (more with several end tokens) must be within
    the engine's `max_logprobs`. Raises ValueError, TypeError, NotImplementedError for prompts of embeddings, and
    EngineDeadError or EngineGenerateError where a step has no outcome.
    """
    if not isinstance(params, BeamSearchParams):
        reject_type("params", params, "a BeamSearchParams")
    if concurrency_limit is not None:
        int_at_least("concurrency_limit", concurrency_limit, 1, "None or an integer of at least 1")
    # A grammar allows an end token where the text may end, and nothing behind it.
    ignores_ends = params.ignore_eos and params.structured_outputs is None
    end_tokens = set() if ignores_ends else engine.input_processor.resolver.end_token_ids
    searches = [
        _make_search(engine, prompt, params, end_tokens, lora_request)
        for prompt, lora_request in zip(prompts, lora_requests, strict=True)
    ]
    for group in _groups(searches, concurrency_limit or len(searches)):
        for _ in progress(range(params.max_tokens), params.max_tokens, use_tqdm, "Beam search"):
            group = [search for search in group if not search.done]
            if not group:
                break
            _step(engine, generate, group)
    return [BeamSearchOutput(_decoded(engine, search.best())) for search in searches]


def _step(engine: LLMEngine, generate: Generate, searches: Sequence["_Search"]) -> None:
    """Extends every beam of `searches` by one token, in one batch."""
    prompts: list[PromptType] = [search.prompt_of(beam) for search in searches for beam in search.beams]
    lora_requests = [search.lora_request for search in searches for _ in search.beams]
    lengths = [search.length for search in searches for _ in search.beams]
    params = searches[0].step_params
    outputs = generate(prompts, params, lora_requests, None if params.structured_outputs is None else lengths)
    alternatives = iter([_alternatives(engine, output) for output in outputs])
    for search in searches:
        search.advance([next(alternatives) for _ in search.beams])


class _Search:
    """The search for one prompt. `beams` are alive, best first; `_completed` have ended, with their final scores."""

    def __init__(
        self,
        prompt: PromptType,
        rendered: EngineInput,
        params: BeamSearchParams,
        end_tokens: set[int],
        room: int,
        lora_request: LoRARequest | None,
    ) -> None:
        prompt_token_ids = rendered["prompt_token_ids"]
        self.beams = [BeamSearchSequence(prompt, prompt_token_ids)]
        self._mm_features = rendered.get("mm_features")
        self.done = False
        self.lora_request = lora_request
        self._params = params
        self._end_tokens = end_tokens
        self._num_prompt_tokens = len(prompt_token_ids)
        self._max_tokens = min(params.max_tokens, room)
        self._num_candidates = max(2, 1 + len(end_tokens)) * params.beam_width
        self._completed: list[tuple[float, BeamSearchSequence]] = []
        self.step_params = SamplingParams(
            temperature=params.temperature,
            max_tokens=1,
            logprobs=self._num_candidates,
            ignore_eos=True,
            detokenize=False,
            structured_outputs=params.structured_outputs,
        )

    def prompt_of(self, beam: BeamSearchSequence) -> PromptType:
        """What is generated from next, with the prompt's pictures."""
        if self._mm_features is None:
            return {"prompt_token_ids": beam.tokens}
        tokens, features = beam.tokens, self._mm_features
        return {"type": "multimodal", "prompt_token_ids": tokens, "mm_features": features, "arrival_time": time.time()}

    @property
    def length(self) -> int:
        """Tokens in each live beam."""
        return len(self.beams[0].tokens) - self._num_prompt_tokens

    def advance(self, alternatives: Sequence[dict[int, Logprob]]) -> None:
        """Takes the next step, given the alternatives for each live beam's next token.

        Of the best continuations overall those that end are completed, if they are among the first `beam_width`, and
        the first `beam_width` others live on.
        """
        width = self._params.beam_width
        length = self.length + 1
        alive: list[BeamSearchSequence] = []
        for rank, (cum_logprob, beam_index, token_id) in enumerate(self._best_candidates(alternatives)):
            ends = token_id in self._end_tokens
            if ends or length == self._max_tokens:
                if rank < width:
                    beam = self._extended(alternatives, beam_index, token_id, cum_logprob)
                    self._complete(beam, length, token_id if ends else None)
            elif len(alive) < width:
                alive.append(self._extended(alternatives, beam_index, token_id, cum_logprob))
        self._completed = heapq.nlargest(width, self._completed, key=lambda completed: completed[0])
        self.beams = alive
        self.done = not alive or not self._can_improve(length)

    def best(self) -> list[BeamSearchSequence]:
        return [beam for _, beam in self._completed]

    def _best_candidates(self, alternatives: Sequence[dict[int, Logprob]]) -> list[tuple[float, int, int]]:
        """(cumulative log-probability, beam index, token id), best first; none that the grammar excludes."""
        candidates = [
            (beam.cum_logprob + entry.logprob, index, token_id)
            for index, (beam, entries) in enumerate(zip(self.beams, alternatives, strict=True))
            for token_id, entry in entries.items()
            if entry.logprob != -math.inf
        ]
        return heapq.nlargest(self._num_candidates, candidates, key=lambda candidate: candidate[0])

    def _extended(
        self, alternatives: Sequence[dict[int, Logprob]], beam_index: int, token_id: int, cum_logprob: float
    ) -> BeamSearchSequence:
        beam = self.beams[beam_index]
        logprobs = [*beam.logprobs, alternatives[beam_index]]
        return BeamSearchSequence(beam.orig_prompt, [*beam.tokens, token_id], logprobs, cum_logprob)

    def _complete(self, beam: BeamSearchSequence, length: int, end_token: int | None) -> None:
        beam.finish_reason = "length" if end_token is None else "stop"
        beam.stop_reason = end_token
        if end_token is not None and not self._params.include_stop_str_in_output:
            beam.tokens.pop()
        self._completed.append((self._score(beam, length), beam))

    def _can_improve(self, length: int) -> bool:
        """Whether the best live beam, were it to end now, would still displace a completed one."""
        if len(self._completed) < self._params.beam_width:
            return True
        return self._score(self.beams[0], length) > self._completed[-1][0]

    def _score(self, beam: BeamSearchSequence, length: int) -> float:
        """`length` counts the new tokens, an end token included."""
        return float(beam.cum_logprob / length**self._params.length_penalty)


def _make_search(
    engine: LLMEngine,
    prompt: PromptType,
    params: BeamSearchParams,
    end_tokens: set[int],
    lora_request: LoRARequest | None,
) -> _Search:
    (rendered,) = engine.renderer.render_cmpl([prompt])
    if rendered["type"] == "embeds":
        raise NotImplementedError("beam search takes prompts of text or token ids, not of embeddings")
    token_ids = rendered["prompt_token_ids"]
    room = engine.model_config.max_model_len - len(token_ids)
    return _Search(prompt, rendered, params, end_tokens, room, lora_request)


def _alternatives(engine: LLMEngine, output: RequestOutput) -> dict[int, Logprob]:
    """Raises EngineDeadError or EngineGenerateError for a step that has ended without a token."""
    (answer,) = output.outputs
    if answer.logprobs:
        return answer.logprobs[0]
    if engine.engine_core.engine_dead:
        raise engine.engine_core.dead_error()
    reason = f"failed: {answer.stop_reason}" if answer.finish_reason == "error" else "was aborted"
    raise EngineGenerateError(f"a step of the beam search {reason}")


def _decoded(engine: LLMEngine, beams: list[BeamSearchSequence]) -> list[BeamSearchSequence]:
    tokenizer = engine.tokenizer
    if tokenizer is not None:
        for beam in beams:
            beam.text = tokenizer.decode(beam.tokens, skip_special_tokens=False)
    return beams


def _groups(searches: list[_Search], size: int) -> Iterator[list[_Search]]:
    for start in range(0, len(searches), max(size, 1)):
        yield searches[start : start + size]
