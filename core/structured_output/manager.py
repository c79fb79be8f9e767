"""`StructuredOutputManager`: compiles grammars off the busy loop and says, step by step, which tokens they allow.

The engine core calls `grammar_init` when a request arrives; the scheduler asks `is_grammar_ready`, then for a bitmask
in each step that samples, and hands every sampled token to `accept_token`. A request's state, a matcher, hangs on the
request and follows from its output tokens alone: preemption leaves it untouched and a restarted core rebuilds it.
"""

import logging
import os
import threading
from collections import OrderedDict
from collections.abc import Iterable
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path

import llguidance
import msgspec
import numpy as np

from ...protocol.config import ModelConfig, VllmConfig
from ...protocol.structured_outputs import StructuredOutputsParams
from ...shared.grammar import compiled, grammar_text
from ...shared.tokenizer_files import missing_tokens, read_tokenizer, str_of
from ..scheduler.request import Request

logger = logging.getLogger(__name__)

_KEPT_GRAMMARS = 128
"""Compiled grammars kept for requests that ask for the same; the least recently used go first."""


class StructuredOutputManager:
    """Grammars of the requests that have one. The tokenizer is read when the first of them arrives."""

    def __init__(self, vllm_config: VllmConfig) -> None:
        self._model_config = vllm_config.model_config
        self._mask_width = (self._model_config.vocab_size + 31) // 32
        self._pool = ThreadPoolExecutor(max(1, (os.cpu_count() or 1) // 2), thread_name_prefix="grammar")
        self._executor: llguidance.LLExecutor | None = None
        self._lock = threading.Lock()  # grammar_init runs in the input thread
        self._tokenizer: Future[llguidance.LLTokenizer] | None = None
        self._compiled: OrderedDict[bytes, Future[llguidance.LLMatcher]] = OrderedDict()

    def grammar_init(self, request: Request) -> None:
        """Begin to compile the request's grammar. Returns at once; failures show in `is_grammar_ready`."""
        params = request.sampling_params.structured_outputs
        if params is not None:
            request.structured_output_state = self._compile(params)

    def is_grammar_ready(self, request: Request) -> bool:
        """Whether the request can be scheduled. Raises ValueError when its grammar cannot be compiled, or does not
        allow the tokens that the request brought along."""
        state = request.structured_output_state
        if isinstance(state, llguidance.LLMatcher):
            return True
        if not isinstance(state, Future):
            raise ValueError(f"request {request.request_id} has no grammar")
        if not state.done():
            return False
        error = state.exception()
        if error is not None:
            raise ValueError(str(error)) from error
        matcher = state.result().deep_copy()
        first = request.num_prompt_tokens - (request.sampling_params.beam_length or 0)
        if not matcher.consume_tokens(request.token_ids[first:]):
            raise ValueError("the request's output tokens break the grammar of its structured output")
        request.structured_output_state = matcher
        return True

    def grammar_bitmask(self, requests: list[Request]) -> np.ndarray:
        """The tokens each request may have next: [len(requests), ceil(vocab_size / 32)] int32, bit set = allowed.

        A request whose grammar ran into a limit has no bit set, and fails alone when it is sampled.
        """
        matchers = [_matcher_of(request) for request in requests]
        assert self._tokenizer is not None
        width = max(self._mask_width, (self._tokenizer.result().vocab_size + 31) // 32)
        bitmask = np.zeros((len(matchers), width), dtype=np.int32)
        if len(matchers) == 1:
            matchers[0].unsafe_compute_mask_ptr(bitmask.ctypes.data, width * 4)
        elif matchers:
            self._executor = self._executor or llguidance.LLExecutor()
            targets = [(matcher, line) for line, matcher in enumerate(matchers)]
            self._executor.unsafe_compute_mask_ptr(targets, bitmask.ctypes.data, width * 4, len(matchers))
        for line, (request, matcher) in enumerate(zip(requests, matchers, strict=True)):
            if matcher.is_error():
                logger.warning("Grammar of request %s: %s", request.request_id, matcher.get_error())
                bitmask[line] = 0
        return np.ascontiguousarray(bitmask[:, : self._mask_width])

    def accept_token(self, request: Request, token_id: int) -> bool:
        """Advance the request's grammar by a sampled token; False when the token breaks it. An end token is taken
        wherever the text may end, and after it only end tokens are."""
        return bool(_matcher_of(request).consume_token(token_id))

    def is_complete(self, request: Request) -> bool:
        """Whether nothing but the end can follow, and the model has no row for an end token to say so."""
        assert self._tokenizer is not None
        tokenizer = self._tokenizer.result()
        can_draw_the_end = min(tokenizer.eos_tokens, default=tokenizer.vocab_size) < self._model_config.vocab_size
        return not can_draw_the_end and _matcher_of(request).is_stopped()

    def shutdown(self) -> None:
        """Drop what is being compiled."""
        self._pool.shutdown(wait=False, cancel_futures=True)

    def _compile(self, params: StructuredOutputsParams) -> "Future[llguidance.LLMatcher]":
        key = msgspec.msgpack.encode(params)
        with self._lock:
            if self._tokenizer is None:
                self._tokenizer = self._pool.submit(_load_tokenizer, self._model_config)
            future = self._compiled.get(key)
            if future is None:
                future = self._pool.submit(_compile, params, self._tokenizer)
                self._compiled[key] = future
                if len(self._compiled) > _KEPT_GRAMMARS:
                    self._compiled.popitem(last=False)
            self._compiled.move_to_end(key)
        return future


def _compile(params: StructuredOutputsParams, tokenizer: "Future[llguidance.LLTokenizer]") -> llguidance.LLMatcher:
    """Raises ValueError when the grammar cannot be compiled."""
    compiled_for = tokenizer.result()
    grammar = grammar_text(params, compiled_for)
    matcher = compiled(grammar, compiled_for)
    if matcher.is_error():
        raise ValueError(f"the grammar of the structured output cannot be compiled: {matcher.get_error()}")
    return matcher


def _load_tokenizer(model_config: ModelConfig) -> llguidance.LLTokenizer:
    """Raises ValueError when there is no tokenizer, or it cannot be read."""
    if model_config.tokenizer is None:
        raise ValueError("structured outputs need a tokenizer; the engine has none")
    backend, settings = read_tokenizer(Path(model_config.tokenizer))
    backend.add_tokens(missing_tokens(backend, settings))
    end_token = settings.special_tokens.get("eos_token")
    end_ids = _as_ids(None if end_token is None else backend.token_to_id(str_of(end_token)))
    for config in (model_config.generation_config, model_config.hf_config):
        end_ids |= _as_ids(config.get("eos_token_id"))
    text, eos_token = backend.to_str(), sorted(end_ids) or None
    try:
        return llguidance.LLTokenizer(text, n_vocab=model_config.vocab_size, eos_token=eos_token)
    except ValueError:  # ids beyond the model's vocabulary; their bits are cut off the masks
        return llguidance.LLTokenizer(text, eos_token=eos_token)


def _as_ids(value: int | Iterable[int] | None) -> set[int]:
    if value is None:
        return set()
    return {value} if isinstance(value, int) else set(value)


def _matcher_of(request: Request) -> llguidance.LLMatcher:
    matcher = request.structured_output_state
    assert isinstance(matcher, llguidance.LLMatcher), "scheduled before its grammar was ready"
    return matcher
