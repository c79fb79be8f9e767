"""Text and token ids without running the model: tokenize, detokenize, tokenizer_info, and rendered prompts."""

import functools
from typing import Any

from starlette.requests import Request
from starlette.responses import Response

from ...engine.text.prompts import EngineInput
from ..models import ServedModel
from .errors import ApiError
from .prompts import chat_prompt, completion_prompts
from .responses import json_response, read_body
from .schema import ChatCompletionRequest, CompletionRequest, DetokenizeRequest, TokenizeRequest
from .server import server_of


async def tokenize(request: Request) -> Response:
    body = await read_body(request, TokenizeRequest)
    async with server_of(request).models.use(body.model) as model:
        rendered = await _tokenized(model, body)
        token_ids = rendered["prompt_token_ids"]
        strings = model.tokenizer.convert_ids_to_tokens(token_ids) if body.return_token_strs else None
        return json_response(
            {
                "count": len(token_ids),
                "max_model_len": model.max_model_len,
                "tokens": token_ids,
                "token_strs": strings,
            }
        )


async def _tokenized(model: ServedModel, body: TokenizeRequest) -> EngineInput:
    if body.messages:
        return await chat_prompt(model, body)
    if body.prompt is None:
        raise ApiError("either prompt or messages must be given", param="prompt")
    encode = functools.partial(model.tokenizer.encode, add_special_tokens=body.add_special_tokens is not False)
    token_ids = await model.in_thread(encode, body.prompt)
    return {"type": "token", "prompt_token_ids": token_ids, "arrival_time": 0.0}


async def detokenize(request: Request) -> Response:
    body = await read_body(request, DetokenizeRequest)
    async with server_of(request).models.use(body.model) as model:
        vocab_size = model.engine.model_config.vocab_size
        for token_id in body.tokens:
            if not 0 <= token_id < vocab_size:
                raise ApiError(f"tokens holds {token_id}; this model's ids are 0..{vocab_size - 1}", param="tokens")
        tokenizer = model.tokenizer
        text = await model.in_thread(lambda: tokenizer.decode(body.tokens, skip_special_tokens=False))
        return json_response({"prompt": text})


async def tokenizer_info(request: Request) -> Response:
    server = server_of(request)
    if not server.options.enable_tokenizer_info_endpoint:
        raise ApiError("start the server with --enable-tokenizer-info-endpoint", 404)
    async with server.models.use(None) as model:
        tokenizer = model.tokenizer
        info: dict[str, Any] = {"tokenizer_class": type(tokenizer).__name__, **tokenizer.special_tokens_map}
        info["chat_template"] = tokenizer.chat_template
        return json_response(info)


async def render_completion(request: Request) -> Response:
    body = await read_body(request, CompletionRequest)
    async with server_of(request).models.use(body.model) as model:
        prompts = await completion_prompts(model, body)
        return json_response([_shown(prompt) for prompt in prompts])


async def render_chat(request: Request) -> Response:
    body = await read_body(request, ChatCompletionRequest)
    async with server_of(request).models.use(body.model) as model:
        return json_response(_shown(await chat_prompt(model, body)))


def _shown(prompt: EngineInput) -> dict[str, Any]:
    return {"prompt": prompt.get("prompt"), "prompt_token_ids": prompt["prompt_token_ids"]}
