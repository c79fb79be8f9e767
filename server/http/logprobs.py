"""Log-probabilities in the two forms of OpenAI's API: parallel lists for completions, objects for chats."""

from collections.abc import Sequence
from typing import Any

from ...engine.outputs.logprobs import Logprob
from ...engine.outputs.request_output import RequestOutput
from ...engine.text.byte_alphabet import byte_alphabet
from ...engine.text.tokenizer import Tokenizer
from .responses import json_float

Entry = dict[int, Logprob]
"""A position's log-probabilities: the token itself first, then the likeliest ones."""


class CompletionLogprobs:
    """Builds the four parallel lists piece by piece; `text_offset` goes on from piece to piece."""

    def __init__(self, tokenizer: Tokenizer, top: int, as_token_ids: bool) -> None:
        self.tokenizer = tokenizer
        self.top = top
        self.as_token_ids = as_token_ids
        self.offset = 0

    def piece(self, token_ids: Sequence[int], entries: Sequence[Entry | None]) -> dict[str, list[Any]]:
        lists: dict[str, list[Any]] = {"text_offset": [], "token_logprobs": [], "tokens": [], "top_logprobs": []}
        for token_id, entry in zip(token_ids, entries, strict=False):
            text = self._text(token_id, entry)
            lists["text_offset"].append(self.offset)
            lists["tokens"].append(text)
            if entry is None:
                lists["token_logprobs"].append(None)
                lists["top_logprobs"].append(None)
            else:
                lists["token_logprobs"].append(json_float(entry[token_id].logprob))
                lists["top_logprobs"].append(self._top(entry))
            self.offset += len(entry[token_id].decoded_token or "") if entry else len(self._plain(token_id))
        return lists

    def _top(self, entry: Entry) -> dict[str, float]:
        top: dict[str, float] = {}
        for token_id, logprob in list(entry.items())[: self.top + 1]:
            top.setdefault(self._text(token_id, entry), json_float(logprob.logprob))
        return top

    def _text(self, token_id: int, entry: Entry | None) -> str:
        if self.as_token_ids:
            return f"token_id:{token_id}"
        if entry is None or entry[token_id].decoded_token is None:
            return self._plain(token_id)
        return entry[token_id].decoded_token or ""

    def _plain(self, token_id: int) -> str:
        return self.tokenizer.decode([token_id], skip_special_tokens=False)


def chat_logprobs(
    tokenizer: Tokenizer, token_ids: Sequence[int], entries: Sequence[Entry], top: int, as_token_ids: bool
) -> dict[str, Any]:
    """`{"content": [...]}`: each token with its log-probability, its bytes and its `top` alternatives."""
    content = []
    for token_id, entry in zip(token_ids, entries, strict=False):
        ranked = [(other, logprob) for other, logprob in entry.items() if (logprob.rank or 0) <= top][:top]
        ranked.sort(key=lambda item: -item[1].logprob)
        spelled = _spelled(tokenizer, token_id, entry[token_id], as_token_ids)
        content.append(
            {
                **spelled,
                "top_logprobs": [_spelled(tokenizer, other, logprob, as_token_ids) for other, logprob in ranked],
            }
        )
    return {"content": content, "refusal": None}


def _spelled(tokenizer: Tokenizer, token_id: int, logprob: Logprob, as_token_id: bool) -> dict[str, Any]:
    text = logprob.decoded_token
    if text is None:
        text = tokenizer.decode([token_id], skip_special_tokens=False)
    return {
        "token": f"token_id:{token_id}" if as_token_id else text,
        "logprob": json_float(logprob.logprob),
        "bytes": list(token_bytes(tokenizer, token_id, text)),
    }


def prompt_logprobs_body(output: RequestOutput) -> list[dict[str, Any] | None]:
    """vLLM's form: for each prompt token a map from token id to its log-probability."""
    return [
        None
        if entry is None
        else {
            str(token_id): {
                "logprob": json_float(logprob.logprob),
                "rank": logprob.rank,
                "decoded_token": logprob.decoded_token,
            }
            for token_id, logprob in entry.items()
        }
        for entry in output.prompt_logprobs or ()
    ]


def token_bytes(tokenizer: Tokenizer, token_id: int, text: str) -> bytes:
    """A token's own bytes, which need not be whole characters."""
    if text and "\ufffd" not in text:
        return text.encode()
    spelling = tokenizer.convert_ids_to_tokens([token_id])[0] or ""
    if len(spelling) == 6 and spelling.startswith("<0x") and spelling.endswith(">"):
        return bytes([int(spelling[3:5], 16)])
    if all(character in _BYTE_OF for character in spelling):
        return bytes(_BYTE_OF[character] for character in spelling)
    return text.encode()


_BYTE_OF = {character: byte for byte, character in enumerate(byte_alphabet())}
