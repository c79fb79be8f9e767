"""LangChain's ChatOpenAI: invoke, stream, batch, bind_tools, with_structured_output, the responses API, completions."""

import os

from langchain_openai import ChatOpenAI, OpenAI
from pydantic import BaseModel, ConfigDict, Field

MODEL = os.environ["MODEL"]
COMMON = {"model": MODEL, "base_url": os.environ["BASE_URL"] + "/v1", "api_key": "EMPTY", "temperature": 0}


class Colour(BaseModel):
    """A colour that was picked."""

    model_config = ConfigDict(extra="forbid")  # a small model goes on with fields of its own where it may
    name: str = Field(description="its name", max_length=12)
    warm: bool


def pick(name: str, amount: int) -> str:
    """Picks an amount of a colour."""
    return f"{amount} of {name}"


chat = ChatOpenAI(**COMMON, max_tokens=16, stream_usage=True)
answer = chat.invoke("Name a colour.")
assert answer.content and answer.usage_metadata["output_tokens"] > 0
chunks = list(chat.stream("Name a colour."))
assert "".join(chunk.content for chunk in chunks) == answer.content
total = chunks[0]
for chunk in chunks[1:]:
    total += chunk
assert total.usage_metadata["output_tokens"] == answer.usage_metadata["output_tokens"]
assert len(chat.batch(["One", "Two", "Three"])) == 3

tooled = ChatOpenAI(**COMMON, max_tokens=200).bind_tools([pick], tool_choice="any")
called = tooled.invoke("Pick two of red.")
assert called.tool_calls[0]["name"] == "pick" and isinstance(called.tool_calls[0]["args"]["amount"], int)
joined = None
for chunk in tooled.stream("Pick two of red."):
    joined = chunk if joined is None else joined + chunk
assert joined.tool_calls[0]["args"] == called.tool_calls[0]["args"]
ChatOpenAI(**COMMON, max_tokens=16).bind_tools([pick]).invoke("Hello.")  # tool_choice "auto"

for method in ("json_schema", "function_calling"):
    structured = ChatOpenAI(**COMMON, max_tokens=200).with_structured_output(Colour, method=method)
    assert isinstance(structured.invoke("Pick a colour."), Colour), method

assert ChatOpenAI(**COMMON, max_tokens=16, use_responses_api=True).invoke("Hello.").text
assert OpenAI(**COMMON, max_tokens=8).invoke("One two")
