"""openai-python, any major version: models, completions, chats, tools, schemas, responses, errors, async streams."""

import asyncio
import json
import os

import openai

MODEL = os.environ["MODEL"]
BASE = os.environ["BASE_URL"] + "/v1"
MESSAGES = [{"role": "user", "content": "Name a colour."}]
SCHEMA = {
    "type": "object",
    "properties": {"colour": {"type": "string", "enum": ["red", "blue"]}},
    "required": ["colour"],
    "additionalProperties": False,
}
TOOLS = [{"type": "function", "function": {"name": "pick", "description": "Picks a colour", "parameters": SCHEMA}}]


def check_models(client: openai.OpenAI) -> None:
    assert MODEL in [model.id for model in client.models.list()]
    assert client.models.retrieve(MODEL).id == MODEL


def check_completions(client: openai.OpenAI) -> None:
    whole = client.completions.create(model=MODEL, prompt="One two", max_tokens=8, temperature=0, logprobs=2)
    choice = whole.choices[0]
    assert whole.usage.completion_tokens == len(choice.logprobs.tokens) == 8
    parts = client.completions.create(model=MODEL, prompt="One two", max_tokens=8, temperature=0, stream=True)
    assert "".join(part.choices[0].text for part in parts) == choice.text
    batch = client.completions.create(model=MODEL, prompt=["a", "b"], n=2, max_tokens=2, temperature=1)
    assert [each.index for each in batch.choices] == [0, 1, 2, 3]


def check_chats(client: openai.OpenAI) -> None:
    whole = client.chat.completions.create(
        model=MODEL, messages=MESSAGES, max_completion_tokens=8, temperature=0, logprobs=True, top_logprobs=2
    )
    assert whole.choices[0].message.role == "assistant" and len(whole.choices[0].logprobs.content) > 0
    chunks = list(
        client.chat.completions.create(
            model=MODEL,
            messages=MESSAGES,
            max_completion_tokens=8,
            temperature=0,
            stream=True,
            stream_options={"include_usage": True},
        )
    )
    text = "".join(chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices)
    assert text == whole.choices[0].message.content
    assert chunks[-1].usage.total_tokens == whole.usage.total_tokens
    raw = client.chat.completions.with_raw_response.create(model=MODEL, messages=MESSAGES, max_tokens=1)
    assert raw.headers["x-request-id"]


def check_tools(client: openai.OpenAI) -> None:
    for choice in ("required", {"type": "function", "function": {"name": "pick"}}):
        ask = {"model": MODEL, "messages": MESSAGES, "tools": TOOLS, "tool_choice": choice, "max_tokens": 100}
        whole = client.chat.completions.create(**ask, temperature=0)
        (call,) = whole.choices[0].message.tool_calls[:1]
        assert call.function.name == "pick" and json.loads(call.function.arguments)["colour"] in ("red", "blue")
        joined, name = "", None
        for chunk in client.chat.completions.create(**ask, temperature=0, stream=True):
            for part in chunk.choices[0].delta.tool_calls or ():
                if part.index == 0:
                    name = part.function.name or name
                    joined += part.function.arguments or ""
        assert (name, joined) == ("pick", call.function.arguments)
    client.chat.completions.create(
        model=MODEL,
        messages=[
            *MESSAGES,
            {"role": "assistant", "content": None, "tool_calls": [call.model_dump()]},
            {"role": "tool", "tool_call_id": call.id, "content": "red"},
        ],
        tools=TOOLS,
        max_tokens=4,
    )


def check_schemas(client: openai.OpenAI) -> None:
    schema = {"type": "json_schema", "json_schema": {"name": "pick", "schema": SCHEMA, "strict": True}}
    answer = client.chat.completions.create(
        model=MODEL, messages=MESSAGES, response_format=schema, max_tokens=100, temperature=0
    )
    assert json.loads(answer.choices[0].message.content)["colour"] in ("red", "blue")
    guided = client.chat.completions.create(
        model=MODEL, messages=MESSAGES, max_tokens=20, extra_body={"structured_outputs": {"choice": ["yes", "no"]}}
    )
    assert guided.choices[0].message.content in ("yes", "no")
    stream = getattr(client.chat.completions, "stream", None) or client.beta.chat.completions.stream
    with stream(model=MODEL, messages=MESSAGES, response_format=schema, max_tokens=100, temperature=0) as events:
        final = events.get_final_completion()
    assert json.loads(final.choices[0].message.content)["colour"] in ("red", "blue")


def check_responses(client: openai.OpenAI) -> None:
    text = {"format": {"type": "json_schema", "name": "pick", "schema": SCHEMA, "strict": True}}
    ask = {"model": MODEL, "input": "Name a colour.", "text": text, "max_output_tokens": 100, "temperature": 0}
    first = client.responses.create(**ask)
    assert first.output_text and first.usage.output_tokens > 0
    second = client.responses.create(
        model=MODEL, input="Again.", previous_response_id=first.id, max_output_tokens=16, temperature=0
    )
    assert client.responses.retrieve(second.id).output_text == second.output_text
    with client.responses.stream(**ask) as events:
        kinds = [event.type for event in events]
        assert events.get_final_response().output_text == first.output_text
    assert (kinds[0], kinds[-1]) == ("response.created", "response.completed")
    client.responses.delete(first.id)


def check_errors(client: openai.OpenAI) -> None:
    def refused(kind: type[Exception], **fields: object) -> openai.APIStatusError:
        try:
            client.chat.completions.create(**({"model": MODEL, "messages": MESSAGES} | fields))
        except kind as error:
            return error
        raise AssertionError(f"{fields} was not refused")

    assert refused(openai.NotFoundError, model="no-such-model").code == "model_not_found"
    assert refused(openai.BadRequestError, temperature=-1).param == "temperature"
    refused(openai.BadRequestError, messages=[])
    try:
        client.embeddings.create(model=MODEL, input="text")
    except openai.BadRequestError as error:
        assert "embeddings" in str(error)
    else:
        raise AssertionError("embeddings were not refused")


async def check_async() -> None:
    async with openai.AsyncOpenAI(base_url=BASE, api_key="EMPTY") as client:

        async def one(number: int) -> str:
            parts = []
            stream = await client.chat.completions.create(
                model=MODEL,
                messages=[{"role": "user", "content": f"Count from {number}."}],
                max_tokens=8,
                temperature=0,
                stream=True,
            )
            async for chunk in stream:
                parts.append(chunk.choices[0].delta.content or "")
            return "".join(parts)

        assert all(await asyncio.gather(*(one(number) for number in range(16))))


client = openai.OpenAI(base_url=BASE, api_key="EMPTY", max_retries=0)
for check in (check_models, check_completions, check_chats, check_tools, check_schemas, check_responses, check_errors):
    check(client)
asyncio.run(check_async())
