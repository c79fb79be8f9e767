"""anthropic: messages, streams, tools, token counts, errors."""

import os

import anthropic

MODEL = os.environ["MODEL"]
MESSAGES = [{"role": "user", "content": "Name a colour."}]
TOOLS = [
    {
        "name": "pick",
        "description": "Picks a colour",
        "input_schema": {
            "type": "object",
            "properties": {"colour": {"type": "string", "enum": ["red", "blue"]}},
            "required": ["colour"],
            "additionalProperties": False,
        },
    }
]

client = anthropic.Anthropic(base_url=os.environ["BASE_URL"], api_key="EMPTY", max_retries=0)
ask = {"model": MODEL, "messages": MESSAGES, "max_tokens": 8, "temperature": 0}
try:
    whole = client.messages.create(**ask, system="Be brief.")
except TypeError:  # a major version that knows no temperature
    ask.pop("temperature")
    ask["extra_body"] = {"temperature": 0}
    whole = client.messages.create(**ask, system="Be brief.")
assert whole.content[0].type == "text" and whole.usage.output_tokens > 0
with client.messages.stream(**ask, system="Be brief.") as stream:
    text = "".join(stream.text_stream)
    assert stream.get_final_message().usage.output_tokens == whole.usage.output_tokens
assert text == whole.content[0].text

for choice in ({"type": "any"}, {"type": "tool", "name": "pick"}):
    fields = ask | {"tools": TOOLS, "tool_choice": choice, "max_tokens": 100}
    called = client.messages.create(**fields)
    (call,) = [block for block in called.content if block.type == "tool_use"][:1]
    assert called.stop_reason == "tool_use" and call.input["colour"] in ("red", "blue")
    with client.messages.stream(**fields) as stream:
        (again,) = [block for block in stream.get_final_message().content if block.type == "tool_use"][:1]
    assert again.input == call.input
answered = {"type": "tool_result", "tool_use_id": call.id, "content": "red"}
turns = [*MESSAGES, {"role": "assistant", "content": [call.model_dump()]}, {"role": "user", "content": [answered]}]
client.messages.create(**ask | {"messages": turns, "tools": TOOLS})

counted = client.messages.count_tokens(model=MODEL, messages=MESSAGES).input_tokens
usage = client.messages.create(**ask).usage
assert counted == usage.input_tokens + (usage.cache_read_input_tokens or 0)
try:
    client.messages.create(**ask | {"model": "no-such-model"})
except anthropic.NotFoundError as error:
    assert error.body["error"]["type"] == "not_found_error"
else:
    raise AssertionError("an unknown model was not refused")
