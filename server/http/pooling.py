"""Routes for models that pool: embeddings, pooling, classes, scores and rankings."""

import asyncio
import base64
import dataclasses
import time
from collections.abc import Sequence
from typing import Any

import numpy as np
from starlette.requests import Request
from starlette.responses import Response

from ...engine.outputs.pooling_output import PoolingOutput, PoolingRequestOutput, ScoringRequestOutput
from ...engine.requests.pooling_resolver import behind_prompt
from ...engine.scoring import plan_scores
from ...engine.text.prompts import PromptType
from ...engine.text.render_params import TokenizeParams
from ...protocol.pooling import PoolingParams
from ..models import ServedModel
from .errors import ApiError
from .generation import Caller, check_finish
from .hang_up import until_hung_up
from .pooling_schema import MAX_TEXTS, InputRequest, PooledRequest, RerankRequest, ScoreRequest
from .prompts import chat_prompt, prompt_list, tokenize_params
from .responses import encode, json_response, read_body
from .schema import ChatCompletionRequest
from .server import server_of

Outputs = list[PoolingRequestOutput[PoolingOutput]]
KEEPS_THE_BEGINNING = TokenizeParams(truncation_side="right")


async def embeddings(request: Request) -> Response:
    return await _pooled_inputs(request, "embd", "embedding", "embed", "embeddings")


async def pooling(request: Request) -> Response:
    return await _pooled_inputs(request, "pool", "pooling", None, "pooling")


async def _pooled_inputs(request: Request, prefix: str, kind: str, task: str | None, api: str) -> Response:
    """Arrays, as lists or in base64. `task`: None is the body's, or else the model's own."""
    body = await read_body(request, InputRequest)
    body.check()
    caller = Caller.of(request, body)
    field = "embedding" if kind == "embedding" else "data"

    async def answer() -> bytes:
        async with server_of(request).models.use(body.model) as model:
            own = _pooler_task(model, api, (task,) if task else ("embed", "classify"))
            params = body.params(task=task or body.task or own)
            outputs = await _pool(model, await _prompts(model, body), params, prefix, caller)
            data = [
                {"index": index, "object": kind, field: output.outputs.data} for index, output in enumerate(outputs)
            ]
            envelope = _envelope(model, prefix, caller, outputs) | {"object": "list"}
            return await model.in_thread(_spelled, envelope, data, field, body)

    return Response(await until_hung_up(request, answer()), media_type="application/json")


async def classify(request: Request) -> Response:
    body = await read_body(request, InputRequest)
    body.check()
    caller = Caller.of(request, body)

    async def answer() -> dict[str, Any]:
        async with server_of(request).models.use(body.model) as model:
            _pooler_task(model, "classification", ("classify",))
            outputs = await _pool(model, await _prompts(model, body), body.params(task="classify"), "classify", caller)
            labels = model.engine.model_config.hf_config.get("id2label") or {}
            data = []
            for index, output in enumerate(outputs):
                probs = output.outputs.data
                best = int(probs.argmax())
                label = labels.get(str(best), labels.get(best, f"LABEL_{best}"))
                data.append({"index": index, "label": label, "probs": probs.tolist(), "num_classes": len(probs)})
            return _envelope(model, "classify", caller, outputs) | {"object": "list", "data": data}

    return json_response(await until_hung_up(request, answer()))


async def score(request: Request) -> Response:
    body = await read_body(request, ScoreRequest)
    first, second = body.sides()
    caller = Caller.of(request, body)

    async def answer() -> dict[str, Any]:
        async with server_of(request).models.use(body.model) as model:
            scores, outputs = await _scores(model, "score", first, second, body, caller)
            data = [
                {"index": index, "object": "score", "score": each.outputs.score} for index, each in enumerate(scores)
            ]
            return _envelope(model, "score", caller, outputs) | {"object": "list", "data": data}

    return json_response(await until_hung_up(request, answer()))


async def rerank(request: Request) -> Response:
    body = await read_body(request, RerankRequest)
    texts = body.texts()
    caller = Caller.of(request, body)

    async def answer() -> dict[str, Any]:
        async with server_of(request).models.use(body.model) as model:
            scores, outputs = await _scores(model, "rerank", body.query, texts, body, caller)
            ranked = sorted(range(len(texts)), key=lambda index: -scores[index].outputs.score)
            results = []
            for index in ranked[: body.top_n or None]:
                result: dict[str, Any] = {"index": index, "relevance_score": scores[index].outputs.score}
                if body.return_documents:
                    result["document"] = {"text": texts[index]}
                results.append(result)
            return _envelope(model, "rerank", caller, outputs) | {"results": results}

    return json_response(await until_hung_up(request, answer()))


async def _scores(
    model: ServedModel,
    api: str,
    first: str | list[str],
    second: str | list[str],
    body: PooledRequest,
    caller: Caller,
) -> tuple[list[ScoringRequestOutput], Outputs]:
    task = _pooler_task(model, api, ("embed", "classify"))
    template = model.chat.chat_template if task == "classify" else None
    params = body.params(truncate_prompt_tokens=body.truncate_prompt_tokens)
    engine = model.engine
    plan = await model.in_thread(plan_scores, engine.model_config, engine.tokenizer, first, second, params, template)
    tok_params = tokenize_params(body, KEEPS_THE_BEGINNING)
    prompts = await model.in_thread(model.renderer.render_cmpl, plan.prompts, tok_params)
    outputs = await _pool(model, prompts, plan.params, api, caller)
    return plan.scores(outputs), outputs


def _pooler_task(model: ServedModel, api: str, tasks: Sequence[str]) -> str:
    """What the model does. Raises ApiError where that is none of `tasks`."""
    pooler = model.engine.model_config.pooler
    if pooler is None or pooler.task not in tasks:
        does = "generates text" if pooler is None else "embeds" if pooler.task == "embed" else "classifies"
        raise ApiError(f"the model {model.name!r} does not support the {api} API: it {does}", param="model")
    return pooler.task


async def _prompts(model: ServedModel, body: InputRequest) -> Sequence[PromptType]:
    if body.messages is None:
        prompts = prompt_list(body.input, "input", MAX_TEXTS)
        if body.prompt_name is not None:
            prompts = behind_prompt(prompts, body.prompt_name, model.engine.model_config.pooler)
        tok_params = tokenize_params(body, KEEPS_THE_BEGINNING)
        return await model.in_thread(model.renderer.render_cmpl, prompts, tok_params)
    chat = ChatCompletionRequest(
        messages=body.messages,
        chat_template=body.chat_template,
        chat_template_kwargs=body.chat_template_kwargs,
        add_generation_prompt=False,
    )
    tok_params = tokenize_params(body, dataclasses.replace(KEEPS_THE_BEGINNING, add_special_tokens=False))
    return [await chat_prompt(model, chat, tok_params)]


async def _pool(
    model: ServedModel, prompts: Sequence[PromptType], params: PoolingParams, prefix: str, caller: Caller
) -> Outputs:
    """The outputs of all prompts, in their order. Where one fails, or this is cancelled, the others are aborted."""

    async def one(number: int, prompt: PromptType) -> PoolingRequestOutput[PoolingOutput]:
        request_id = f"{prefix}-{caller.request_id}-{number}"
        outputs = model.engine.encode(prompt, params, request_id, model.adapter, caller.trace_headers, caller.priority)
        async for output in outputs:
            check_finish(output)
            return output
        raise ApiError("the engine gave no output", 500)

    tasks = [asyncio.create_task(one(number, prompt)) for number, prompt in enumerate(prompts)]
    try:
        return list(await asyncio.gather(*tasks))
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


def _envelope(model: ServedModel, prefix: str, caller: Caller, outputs: Outputs) -> dict[str, Any]:
    num_tokens = sum(len(output.prompt_token_ids) for output in outputs)
    return {
        "id": f"{prefix}-{caller.request_id}",
        "created": int(time.time()),
        "model": model.name,
        "usage": {"prompt_tokens": num_tokens, "total_tokens": num_tokens},
    }


def _spelled(envelope: dict[str, Any], data: list[dict[str, Any]], field: str, body: InputRequest) -> bytes:
    """The answer, with the arrays in `data` as lists, or in base64 their bytes, row by row. Takes its time."""
    dtype = np.dtype(body.embed_dtype).newbyteorder(body.endianness)
    for entry in data:
        array = entry[field]
        as_text = body.encoding_format == "base64"
        entry[field] = base64.b64encode(array.astype(dtype).tobytes()).decode("ascii") if as_text else array.tolist()
    return encode(envelope | {"data": data})
