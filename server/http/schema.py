"""The bodies of generation requests, field by field. Unknown fields are ignored; the sampling limits are
`SamplingParams`' own, checked where it is built.
"""

from typing import Any

import msgspec

from .errors import ApiError


def text_field(item: object, key: str, where: str) -> str:
    """`item[key]`. Raises ApiError naming the field below `where` for anything but a text."""
    value = item.get(key) if isinstance(item, dict) else None
    if not isinstance(value, str):
        raise ApiError(f"{where}.{key} must be a text, got {value!r:.50}", param=f"{where}.{key}")
    return value


class StreamOptions(msgspec.Struct, kw_only=True):
    include_usage: bool | None = None
    continuous_usage_stats: bool | None = None


class GenerationRequest(msgspec.Struct, kw_only=True):
    """What completions and chats have in common: OpenAI's fields and vLLM's additions."""

    model: str | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    n: int | None = None
    best_of: int | None = None
    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    min_p: float | None = None
    repetition_penalty: float | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    seed: int | None = None
    max_tokens: int | None = None
    min_tokens: int | None = None
    stop: str | list[str] | None = None
    stop_token_ids: list[int] | None = None
    include_stop_str_in_output: bool | None = None
    ignore_eos: bool | None = None
    bad_words: list[str] | None = None
    allowed_token_ids: list[int] | None = None
    logit_bias: dict[str, float] | None = None
    prompt_logprobs: int | None = None
    logprob_token_ids: list[int] | None = None
    skip_special_tokens: bool | None = None
    spaces_between_special_tokens: bool | None = None
    add_special_tokens: bool | None = None
    truncate_prompt_tokens: int | None = None
    truncation_side: str | None = None
    stream_interval: int | None = None
    response_format: dict[str, Any] | None = None
    structured_outputs: dict[str, Any] | None = None
    guided_json: Any = None
    guided_regex: str | None = None
    guided_choice: list[str] | None = None
    guided_grammar: str | None = None
    repetition_detection: dict[str, Any] | None = None
    vllm_xargs: dict[str, Any] | None = None
    priority: int | None = None
    request_id: str | None = None
    cache_salt: str | None = None
    return_tokens_as_token_ids: bool | None = None
    return_token_ids: bool | None = None
    use_beam_search: bool | None = None
    length_penalty: float | None = None

    @property
    def include_usage(self) -> bool:
        return bool(self.stream_options and self.stream_options.include_usage)

    @property
    def running_usage(self) -> bool:
        return bool(self.stream_options and self.stream_options.continuous_usage_stats)

    def check_common(self) -> None:
        """Raises ApiError for combinations that no kind of request allows."""
        if self.best_of is not None and self.best_of != (self.n or 1):
            raise ApiError("best_of is not supported: it must be absent or equal to n", param="best_of")
        if self.use_beam_search:
            raise ApiError("use_beam_search is not supported over HTTP", param="use_beam_search")
        if self.stream and self.prompt_logprobs is not None:
            raise ApiError("prompt_logprobs cannot be streamed", param="prompt_logprobs")
        if self.cache_salt == "":
            raise ApiError("cache_salt must not be empty", param="cache_salt")


class CompletionRequest(GenerationRequest, kw_only=True):
    prompt: str | list[Any] | None = None
    prompt_embeds: Any = None
    suffix: str | None = None
    echo: bool | None = None
    logprobs: int | None = None


class ChatMessage(msgspec.Struct, kw_only=True, omit_defaults=True):
    """A message of a conversation; content as text or as typed parts."""

    role: str
    content: str | list[str | dict[str, Any]] | None = None
    name: str | None = None
    tool_calls: list[dict[str, Any]] | None = None
    tool_call_id: str | None = None
    reasoning: str | None = None
    reasoning_content: str | None = None


class FunctionSpec(msgspec.Struct, kw_only=True, omit_defaults=True):
    name: str
    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: bool | None = None


class Tool(msgspec.Struct, kw_only=True):
    type: str = "function"
    function: FunctionSpec


class ChatCompletionRequest(GenerationRequest, kw_only=True):
    messages: list[ChatMessage]
    tools: list[Tool] | None = None
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None
    chat_template: str | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    documents: list[dict[str, Any]] | None = None
    reasoning_effort: str | None = None
    max_completion_tokens: int | None = None
    logprobs: bool | None = None
    top_logprobs: int | None = None
    tool_choice: str | dict[str, Any] | None = None
    parallel_tool_calls: bool | None = None
    include_reasoning: bool | None = None
    echo: bool | None = None
    modalities: list[str] | None = None
    audio: Any = None


class TokenizeRequest(ChatCompletionRequest, kw_only=True):
    """Either `prompt`, or a chat, of which only what makes up its prompt matters."""

    messages: list[ChatMessage] = []
    prompt: str | None = None
    return_token_strs: bool | None = None


class DetokenizeRequest(msgspec.Struct, kw_only=True):
    model: str | None = None
    tokens: list[int]
