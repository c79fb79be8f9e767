"""LiteLLM, as provider `openai` and `hosted_vllm`: completions, streams, tools, errors by its own classes."""

import json
import os

import litellm

BASE = os.environ["BASE_URL"] + "/v1"
MODEL = os.environ["MODEL"]
MESSAGES = [{"role": "user", "content": "Name a colour."}]
SCHEMA = {
    "type": "object",
    "properties": {"colour": {"type": "string", "enum": ["red", "blue"]}},
    "required": ["colour"],
    "additionalProperties": False,
}
TOOLS = [{"type": "function", "function": {"name": "pick", "description": "Picks", "parameters": SCHEMA}}]

for provider in ("openai", "hosted_vllm"):
    ask = {"model": f"{provider}/{MODEL}", "api_base": BASE, "api_key": "EMPTY", "messages": MESSAGES, "max_tokens": 8}
    ask |= {"temperature": 0, "num_retries": 0}
    whole = litellm.completion(**ask)
    assert whole.usage.completion_tokens > 0
    chunks = litellm.completion(**ask, stream=True, stream_options={"include_usage": True})
    text = "".join(chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices)
    assert text == whole.choices[0].message.content
    called = litellm.completion(**ask | {"max_tokens": 100}, tools=TOOLS, tool_choice="required")
    arguments = called.choices[0].message.tool_calls[0].function.arguments
    assert json.loads(arguments)["colour"] in ("red", "blue")
    try:
        litellm.completion(**ask | {"messages": [{"role": "user", "content": "word " * 20_000}]})
    except litellm.ContextWindowExceededError:
        pass
    else:
        raise AssertionError("a prompt that is too long was not refused")
    try:
        litellm.completion(**ask | {"model": f"{provider}/no-such-model"})
    except litellm.NotFoundError:
        pass
    else:
        raise AssertionError("an unknown model was not refused")
text = litellm.text_completion(
    model=f"text-completion-openai/{MODEL}", api_base=BASE, api_key="EMPTY", prompt="One two", max_tokens=4
)
assert text.choices[0].text
