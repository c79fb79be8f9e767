"""The bodies of the routes for models that pool. Unknown fields are ignored."""

from typing import Any, Literal

import msgspec

from ...protocol.pooling import PoolingParams
from .errors import ApiError
from .schema import ChatMessage

FORMATS = ("float", "base64")
MAX_TEXTS = 2048


class PooledRequest(msgspec.Struct, kw_only=True):
    """What the routes have in common: vLLM's names of what `PoolingParams` and tokenisers are told."""

    model: str | None = None
    user: str | None = None
    request_id: str | None = None
    priority: int | None = None
    use_activation: bool | None = None
    truncate_prompt_tokens: int | None = None
    truncation_side: str | None = None
    add_special_tokens: bool | None = None
    dimensions: int | None = None

    def params(self, **fields: Any) -> PoolingParams:
        return PoolingParams(use_activation=self.use_activation, dimensions=self.dimensions, **fields)


class InputRequest(PooledRequest, kw_only=True):
    """`input`: a text, a list of texts, token ids, or a list of those; or `messages`, for the chat template.
    `prompt_name`: which of the model's own prompts goes in front of the texts. In base64, numbers are of `embed_dtype`
    and their bytes in the order of `endianness`.
    """

    input: str | list[Any] | None = None
    messages: list[ChatMessage] | None = None
    chat_template: str | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    prompt_name: str | None = None
    encoding_format: str = "float"
    embed_dtype: Literal["float32", "float16"] = "float32"
    endianness: Literal["native", "little", "big"] = "little"
    task: str | None = None

    def check(self) -> None:
        if self.encoding_format not in FORMATS:
            formats = " or ".join(FORMATS)
            raise ApiError(f"encoding_format must be {formats}, got {self.encoding_format!r}", param="encoding_format")
        if (self.input is None) == (self.messages is None):
            raise ApiError("give either input or messages", param="input")


class ScoreRequest(PooledRequest, kw_only=True):
    """The two sides, under any of their names."""

    text_1: str | list[str] | None = None
    text_2: str | list[str] | None = None
    data_1: str | list[str] | None = None
    data_2: str | list[str] | None = None
    queries: str | list[str] | None = None
    documents: str | list[str] | None = None
    items: str | list[str] | None = None

    def sides(self) -> tuple[str | list[str], str | list[str]]:
        first = next((each for each in (self.text_1, self.data_1, self.queries) if each is not None), None)
        rest = (self.text_2, self.data_2, self.documents, self.items)
        second = next((each for each in rest if each is not None), None)
        if first is None or second is None:
            names = "text_1 and text_2, data_1 and data_2, queries and documents, or queries and items"
            raise ApiError(f"give two sides: {names}", param="text_1" if first is None else "text_2")
        for side in (first, second):
            _check_count(side, "text_2")
        return first, second


class RerankRequest(PooledRequest, kw_only=True):
    """`documents`: texts, or objects with a `text`. `top_n`: how many of the best are returned, 0: all."""

    query: str
    documents: list[str | dict[str, Any]]
    top_n: int = 0
    return_documents: bool = True

    def texts(self) -> list[str]:
        texts = [document if isinstance(document, str) else document.get("text") for document in self.documents]
        for number, text in enumerate(texts):
            if not isinstance(text, str):
                where = f"documents.{number}"
                raise ApiError(f"{where} must be a text or an object with a text", param=where)
        if not texts:
            raise ApiError("documents is empty", param="documents")
        _check_count(texts, "documents")
        if self.top_n < 0:
            raise ApiError(f"top_n must be at least 0, got {self.top_n}", param="top_n")
        return [str(text) for text in texts]


def _check_count(texts: Any, field: str) -> None:
    if isinstance(texts, list) and len(texts) > MAX_TEXTS:
        raise ApiError(f"{len(texts)} texts are given; at most {MAX_TEXTS} are taken at once", param=field)
