"""Turns one request's token ids into text as they come, and stops where a stop string appears.

One detokenizer per request, owned by the output processor's `RequestState`. Text that may still change (half a
character, or what may turn out to be a stop string) is held back.
"""

from collections import deque
from collections.abc import Sequence
from typing import Protocol

from tokenizers.decoders import DecodeStream

from ...protocol.params import SamplingParams
from .stop_strings import StopStringFinder
from .tokenizer import Tokenizer

_CONTEXT_TOKENS = 8  # prompt tokens that decide whether the first word brings a space
_MAX_PENDING = 8  # tokens without text after which something else than an unfinished character is going on
_REPLACEMENT = "\ufffd"


class TokenStream(Protocol):
    """Text of a growing token sequence. `step` returns what is certain, `flush` the rest at the end."""

    def step(self, token_id: int) -> str: ...

    def flush(self) -> str: ...


class SlowStream:
    """Decodes a window of tokens twice, before and after each step, and returns the difference.

    Right for any tokenizer: for those without a decode stream, and where the fast stream gives up.
    """

    def __init__(
        self,
        tokenizer: Tokenizer,
        context: Sequence[int],
        skip_special_tokens: bool,
        spaces_between_special_tokens: bool = True,
    ) -> None:
        self.tokenizer = tokenizer
        self.skip_special_tokens = skip_special_tokens
        self.spaces_between_special_tokens = spaces_between_special_tokens
        self._hidden = tokenizer.skipped_ids if skip_special_tokens else frozenset()
        self._window = [token_id for token_id in context if token_id not in self._hidden]
        self._num_read = len(self._window)  # tokens whose text is out already
        text = self._decode()
        self._num_emitted = len(text.rstrip(_REPLACEMENT))  # characters of the window's text that are out already
        self._num_broken = (
            len(text) - self._num_emitted
        )  # what a character looks like that the prompt leaves unfinished

    def step(self, token_id: int) -> str:
        if token_id in self._hidden:
            return ""
        self._window.append(token_id)
        text = self._decode()
        if text.endswith(_REPLACEMENT):
            return self._step_inside_character(text[:-1])
        if len(text) <= self._num_emitted and len(self._window) - self._num_read <= _MAX_PENDING:
            return ""  # some tokenizers give nothing for half a character
        new_text = self._advance(text)
        self._move_window(self._num_read)
        self._num_read = len(self._window)
        return new_text

    def flush(self) -> str:
        rest = self._advance(self._decode())
        if rest.endswith(_REPLACEMENT) and self.tokenizer.has_byte_fallback:
            # Byte tokens decode to a replacement character each, but are one character cut short.
            return rest.rstrip(_REPLACEMENT) + _REPLACEMENT
        return rest

    def _step_inside_character(self, text: str) -> str:
        """`text` precedes half a character. After so many tokens without a break it will not change any more."""
        if len(self._window) - self._num_read <= _MAX_PENDING:
            return ""
        new_text = self._advance(text)
        if len(self._window) > 8 * _MAX_PENDING:
            self._move_window(len(self._window) - _MAX_PENDING)
            self._num_read = 0
            self._num_emitted -= 1
        return new_text

    def _advance(self, text: str) -> str:
        """The text that is new. A character that the prompt began is, once it is whole; otherwise it stays away."""
        new_text = text[self._num_emitted :]
        if self._num_broken:
            new_text = new_text.removeprefix(_REPLACEMENT * self._num_broken)
            self._num_broken = 0
        self._num_emitted = max(self._num_emitted, len(text))
        return new_text

    def _move_window(self, start: int) -> None:
        self._window = self._window[start:]
        self._num_emitted = len(self._decode())

    def _decode(self) -> str:
        return self.tokenizer.decode(
            self._window,
            self.skip_special_tokens,
            clean_up_tokenization_spaces=False,
            spaces_between_special_tokens=self.spaces_between_special_tokens,
        )


class FastStream:
    """The `tokenizers` library's own stream. Where that cannot go on (bytes that are no text), a `SlowStream` does."""

    def __init__(self, tokenizer: Tokenizer, context: Sequence[int], skip_special_tokens: bool) -> None:
        self.tokenizer = tokenizer
        self.skip_special_tokens = skip_special_tokens
        self._backend = tokenizer.backend_tokenizer
        self._hidden = tokenizer.skipped_ids if skip_special_tokens else frozenset()
        self._seen = deque((token_id for token_id in context if token_id not in self._hidden), maxlen=_CONTEXT_TOKENS)
        self._pending: list[int] = []  # tokens that have given no text yet
        self._slow: SlowStream | None = None
        # Where the prompt ends inside a character the library would give out all its text as generated.
        if tokenizer.decode(context, skip_special_tokens).endswith(_REPLACEMENT):
            self._fall_back()
        self._step = DecodeStream(ids=list(self._seen), skip_special_tokens=skip_special_tokens).step

    def step(self, token_id: int) -> str:
        if token_id in self._hidden:
            return ""
        if self._slow is not None:
            return self._slow.step(token_id)
        pending = self._pending
        try:
            text: str | None = self._step(self._backend, token_id)
        except Exception:  # the library has one exception for all
            pending.append(token_id)
            return self._fall_back()
        if text is None:
            pending.append(token_id)
            return self._fall_back() if len(pending) > _MAX_PENDING else ""
        if pending:
            self._seen.extend(pending)
            pending.clear()
        self._seen.append(token_id)
        return text

    def flush(self) -> str:
        text = self._fall_back() if self._pending else ""
        return text if self._slow is None else text + self._slow.flush()

    def _fall_back(self) -> str:
        context = _whole_characters(self.tokenizer, list(self._seen), self.skip_special_tokens)
        self._slow = slow = SlowStream(self.tokenizer, context, self.skip_special_tokens)
        pending, self._pending = self._pending, []
        return "".join(slow.step(token_id) for token_id in pending)


def _whole_characters(tokenizer: Tokenizer, token_ids: list[int], skip_special_tokens: bool) -> list[int]:
    """`token_ids` without leading ones that begin inside a character, which would spoil the bytes behind them."""
    while token_ids and tokenizer.decode(token_ids, skip_special_tokens).startswith(_REPLACEMENT):
        token_ids = token_ids[1:]
    return token_ids


class Detokenizer:
    """Collects a request's tokens and text. `token_ids` and `output_text` only ever grow, up to a stop string's cut."""

    def __init__(self, tokenizer: Tokenizer | None, prompt_token_ids: Sequence[int], params: SamplingParams) -> None:
        self.tokenizer = tokenizer if params.detokenize else None
        self.params = params
        self.token_ids: list[int] = []
        self.output_text = ""
        self.min_tokens = params.min_tokens
        self.keep_stop = params.include_stop_str_in_output
        # Characters that a stream keeps back, for a stop string may begin there.
        self._held_back = 0 if self.keep_stop else max(map(len, params.stop or ()), default=1) - 1
        self._num_returned = 0
        self._finder = StopStringFinder(params.stop, params.include_stop_str_in_output) if params.stop else None
        self._special_stops = self._find_special_stops()
        self._stream = self._stream_behind(prompt_token_ids)

    def _find_special_stops(self) -> dict[int, str]:
        """Stop strings that are special tokens which the text leaves out: they are found by their ids."""
        tokenizer, stops = self.tokenizer, self.params.stop
        if tokenizer is None or not stops or not self.params.skip_special_tokens:
            return {}
        skipped = sorted(tokenizer.skipped_ids)
        names = zip(skipped, tokenizer.convert_ids_to_tokens(skipped), strict=True)
        return {token_id: name for token_id, name in names if name in stops}

    def continue_behind(self, prompt_token_ids: Sequence[int]) -> None:
        """The text goes on behind another prompt: what comes next follows on that, not on the text so far."""
        self._stream = self._stream_behind(prompt_token_ids)

    def _stream_behind(self, prompt_token_ids: Sequence[int]) -> TokenStream | None:
        tokenizer, params = self.tokenizer, self.params
        if tokenizer is None:
            return None
        context = list(prompt_token_ids[-_CONTEXT_TOKENS:])
        context = _whole_characters(tokenizer, context, params.skip_special_tokens)
        if tokenizer.is_fast:
            return FastStream(tokenizer, context, params.skip_special_tokens)
        return SlowStream(tokenizer, context, params.skip_special_tokens, params.spaces_between_special_tokens)

    def update(self, new_token_ids: Sequence[int], finished: bool, stopped_by_token: bool) -> str | None:
        """Take in a step's tokens; returns the stop string now found, after which later tokens are dropped.

        `finished`: no more will come. `stopped_by_token`: the last token is the one that ended the request.
        """
        stream = self._stream
        if stream is None:
            self.token_ids.extend(new_token_ids)
            return None
        silent = len(new_token_ids) - 1 if stopped_by_token and not self.keep_stop else -1
        for position, token_id in enumerate(new_token_ids):
            self.token_ids.append(token_id)
            if position == silent:
                break
            text = stream.step(token_id)
            if text and (stop := self._add(text)) is not None:
                return stop
            if token_id in self._special_stops and len(self.token_ids) > self.min_tokens:
                return self._stop_at_special(stream, self._special_stops[token_id])
        if finished and (text := stream.flush()):
            return self._add(text)
        return None

    def _stop_at_special(self, stream: TokenStream, stop: str) -> str:
        """End at a special token that the text does not show; a stop string in what was held back comes first."""
        text = stream.flush()
        if text and (earlier := self._add(text)) is not None:
            return earlier
        if self.keep_stop:
            self.output_text += stop
        return stop

    def _add(self, text: str) -> str | None:
        self.output_text += text
        finder = self._finder
        if finder is None or len(self.token_ids) <= self.min_tokens:
            return None
        match = finder.find(self.output_text, len(text))
        if match is None:
            return None
        self.output_text = self.output_text[: match.length]
        return match.stop

    def text_so_far(self, finished: bool) -> str:
        """All text that is certain."""
        if self._held_back and not finished:
            return self.output_text[: -self._held_back]
        return self.output_text

    def next_text(self, finished: bool) -> str:
        """The text that is certain and was not returned before."""
        end = len(self.output_text)
        if self._held_back and not finished:
            end -= self._held_back
        start = self._num_returned
        if end <= start:
            return ""
        self._num_returned = end
        return self.output_text[start:end]
