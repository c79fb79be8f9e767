"""Conversations through chat templates, as transformers renders them, and what is no conversation."""

import dataclasses
import functools
from pathlib import Path
from typing import Any, NamedTuple

import pytest
from gguf_files import GEMMA_LIKE
from text_pipeline import make_config
from tiny_llama import write_tokenizer

from corespan.engine.text.conversation import to_conversation_list
from corespan.engine.text.loading import load_tokenizer
from corespan.engine.text.render_params import ChatParams
from corespan.engine.text.renderer import Renderer
from corespan.engine.text.tokenizer import Tokenizer

USER = {"role": "user", "content": "Hi there"}
SYSTEM = {"role": "system", "content": "Be brief."}
ASSISTANT = {"role": "assistant", "content": "Hello! "}
WEATHER = {
    "type": "function",
    "function": {
        "name": "get_weather",
        "description": 'Weather at a "place" <b>now</b> – é',
        "parameters": {"type": "object", "properties": {"place": {"type": "string"}}, "required": ["place"]},
    },
}
CALL = {
    "role": "assistant",
    "content": None,
    "tool_calls": [{"type": "function", "function": {"name": "get_weather", "arguments": {"place": "Párís"}}}],
}

SMOLLM2 = (
    "{% for message in messages %}{% if loop.first and messages[0]['role'] != 'system' %}"
    "{{ '<|im_start|>system\nYou are a helpful AI assistant named SmolLM, trained by Hugging Face<|im_end|>\n' }}"
    "{% endif %}{{'<|im_start|>' + message['role'] + '\n' + message['content'] + '<|im_end|>' + '\n'}}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
LLAMA2 = (
    "{% if messages[0]['role'] == 'system' %}{% set loop_messages = messages[1:] %}"
    "{% set system_message = messages[0]['content'] %}{% else %}{% set loop_messages = messages %}"
    "{% set system_message = false %}{% endif %}{% for message in loop_messages %}"
    "{% if (message['role'] == 'user') != (loop.index0 % 2 == 0) %}"
    "{{ raise_exception('Conversation roles must alternate user/assistant/user/assistant/...') }}{% endif %}"
    "{% if loop.index0 == 0 and system_message != false %}"
    "{% set content = '<<SYS>>\\n' + system_message + '\\n<</SYS>>\\n\\n' + message['content'] %}"
    "{% else %}{% set content = message['content'] %}{% endif %}{% if message['role'] == 'user' %}"
    "{{ bos_token + '[INST] ' + content.strip() + ' [/INST]' }}{% elif message['role'] == 'assistant' %}"
    "{{ ' '  + content.strip() + ' ' + eos_token }}{% endif %}{% endfor %}"
)
QWEN_LIKE = """
{%- if tools %}
    {{- '<|im_start|>system\\n' }}
    {%- if messages[0].role == 'system' %}
        {{- messages[0].content + '\\n\\n' }}
    {%- endif %}
    {{- "# Tools\\n<tools>" }}
    {%- for tool in tools %}
        {{- "\\n" }}
        {{- tool | tojson }}
    {%- endfor %}
    {{- "\\n</tools><|im_end|>\\n" }}
{%- endif %}
{%- set ns = namespace(count=0, last=none) %}
{%- for message in messages %}
    {%- if message.role == 'system' and tools %}{% continue %}{% endif %}
    {%- set ns.count = ns.count + 1 %}
    {{- '<|im_start|>' + message.role }}
    {%- if message.content is string %}
        {{- '\\n' + message.content | trim }}
    {%- endif %}
    {%- for call in message.tool_calls or [] %}
        {{- '\\n<tool_call>' + (call.function.arguments | tojson(indent=2)) + '</tool_call>' }}
    {%- endfor %}
    {% generation %}{{- '<|im_end|>\\n' }}{% endgeneration %}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- '<|im_start|>assistant\\n' }}
    {%- if enable_thinking is defined and enable_thinking is false %}
        {{- '<think>\\n\\n</think>\\n\\n' }}
    {%- endif %}
{%- endif %}
{{- ns.count }}
"""
PARTS = (
    "{% for message in messages %}{{ message.role }}:"
    "{% if message.content is string %}{{ message.content }}{% else %}"
    "{% for part in message.content %}[{{ part.type }}:{{ part.text }}]{% endfor %}{% endif %};{% endfor %}"
)

TEMPLATES = {"smollm2": SMOLLM2, "llama2": LLAMA2, "qwen": QWEN_LIKE, "parts": PARTS, "gemma": GEMMA_LIKE}
CONVERSATIONS = {
    "user": [USER],
    "system": [SYSTEM, USER],
    "turns": [USER, ASSISTANT, {"role": "user", "content": "  And é 日本 <|im_end|>? "}],
}


@pytest.fixture(scope="module")
def reference(tmp_path_factory: pytest.TempPathFactory) -> Any:
    from transformers import AutoTokenizer

    folder = tmp_path_factory.mktemp("reference")
    write_tokenizer(folder)
    (folder / "config.json").write_text('{"model_type": "llama"}')
    return AutoTokenizer.from_pretrained(str(folder))


def rendered_chat(renderer: Renderer, messages: list[Any], **params: Any) -> tuple[str, list[int]]:
    _, (rendered,) = renderer.render_chat([messages], ChatParams(**params))
    return rendered["prompt"] or "", rendered["prompt_token_ids"]


@pytest.mark.parametrize("conversation", CONVERSATIONS)
@pytest.mark.parametrize("template", TEMPLATES)
@pytest.mark.parametrize("add_generation_prompt", [True, False])
def test_conversations_render_as_in_transformers(
    renderer: Renderer, reference: Any, template: str, conversation: str, add_generation_prompt: bool
) -> None:
    messages = CONVERSATIONS[conversation]
    options = {"chat_template": TEMPLATES[template], "add_generation_prompt": add_generation_prompt}
    text, token_ids = rendered_chat(renderer, messages, **options)
    assert text == reference.apply_chat_template(messages, tokenize=False, **options)
    assert token_ids == reference.apply_chat_template(messages, tokenize=True, return_dict=False, **options)


def test_the_models_own_template_is_used_by_default(renderer: Renderer, reference: Any) -> None:
    expected = reference.apply_chat_template([USER], tokenize=False, add_generation_prompt=True)
    assert rendered_chat(renderer, [USER])[0] == expected


def test_the_tokenizer_itself_renders_and_tokenises(tokenizer: Tokenizer, reference: Any) -> None:
    for tokenize in (False, True):
        options = {"add_generation_prompt": True, "tokenize": tokenize, "return_dict": False}
        assert tokenizer.apply_chat_template([USER], **options) == reference.apply_chat_template([USER], **options)


def test_tools_and_tool_calls_render_as_in_transformers(renderer: Renderer, reference: Any) -> None:
    messages = [SYSTEM, USER, CALL, {"role": "tool", "content": "sunny"}]
    options = {"chat_template": QWEN_LIKE, "tools": [WEATHER], "add_generation_prompt": True}
    text, _ = rendered_chat(renderer, messages, **options)
    assert text == reference.apply_chat_template(messages, tokenize=False, **options)
    assert '"Weather at a \\"place\\" <b>now</b> – é"' in text


def test_tool_arguments_in_json_text_reach_the_template_as_data(renderer: Renderer) -> None:
    as_text = {**CALL, "tool_calls": [{"function": {"name": "get_weather", "arguments": '{"place": "Párís"}'}}]}
    given = [rendered_chat(renderer, [USER, call], chat_template=QWEN_LIKE)[0] for call in (CALL, as_text)]
    assert given[0] == given[1]


def test_template_kwargs_reach_the_template(renderer: Renderer, reference: Any) -> None:
    options = {"chat_template": QWEN_LIKE, "add_generation_prompt": True}
    text, _ = rendered_chat(renderer, [USER], chat_template_kwargs={"enable_thinking": False}, **options)
    assert "<think>" in text
    assert text == reference.apply_chat_template([USER], tokenize=False, enable_thinking=False, **options)


@pytest.mark.parametrize("template", TEMPLATES)
@pytest.mark.parametrize("content", ["Hello! ", "Hello!", "  \n"])
def test_the_final_message_is_left_open_as_in_transformers(
    renderer: Renderer, reference: Any, template: str, content: str
) -> None:
    messages = [USER, {"role": "assistant", "content": content}]
    options = {"chat_template": TEMPLATES[template], "continue_final_message": True, "add_generation_prompt": False}
    text, _ = rendered_chat(renderer, messages, **options)
    assert text == reference.apply_chat_template(messages, tokenize=False, **options)


def test_text_parts_are_joined_for_templates_that_want_text(renderer: Renderer) -> None:
    message = {"role": "user", "content": [{"type": "text", "text": "one"}, {"type": "text", "text": "two"}]}
    assert "one\ntwo<|im_end|>" in rendered_chat(renderer, [message], chat_template=SMOLLM2)[0]
    assert rendered_chat(renderer, [message], chat_template=PARTS)[0] == "user:[text:one][text:two];"
    text, _ = rendered_chat(renderer, [message], chat_template=PARTS, chat_template_content_format="string")
    assert text == "user:one\ntwo;"


def test_a_template_may_be_a_files_path_and_a_path_never_becomes_the_prompt(renderer: Renderer, tmp_path: Path) -> None:
    path = tmp_path / "template.jinja"
    for chosen in (path, str(path), "template.jinja", "tool_use"):
        with pytest.raises(ValueError, match="neither a template's text nor the path of a file"):
            rendered_chat(renderer, [USER], chat_template=chosen)
    path.write_text("{{ messages[0].content }}?")
    for chosen in (path, str(path)):
        assert rendered_chat(renderer, [USER], chat_template=chosen)[0] == "Hi there?"


def test_a_template_that_writes_the_begin_token_gives_exactly_one(renderer: Renderer, tokenizer: Tokenizer) -> None:
    _, token_ids = rendered_chat(renderer, [USER], chat_template="{{ bos_token }}{{ messages[0].content }}")
    assert token_ids.count(tokenizer.bos_token_id or 0) == 1 and token_ids[0] == tokenizer.bos_token_id


def test_the_callers_messages_are_not_changed(renderer: Renderer) -> None:
    messages = [dict(USER), {"role": "assistant", "content": [{"type": "text", "text": "Hel"}]}]
    rendered_chat(renderer, messages, continue_final_message=True, add_generation_prompt=False)
    assert messages == [USER, {"role": "assistant", "content": [{"type": "text", "text": "Hel"}]}]


def test_without_a_template_the_error_says_to_pass_one(tmp_path: Path) -> None:
    write_tokenizer(tmp_path, chat_template=None)
    renderer = Renderer(make_config().model_config, load_tokenizer(str(tmp_path)))
    with pytest.raises(ValueError, match="pass one as chat_template"):
        rendered_chat(renderer, [USER])
    assert rendered_chat(renderer, [USER], chat_template="{{ messages[0].content }}")[0] == "Hi there"


@pytest.mark.parametrize(
    "template",
    [
        "{{ raise_exception('no such role') }}",
        "{% if %}",
        "{{ messages[0].content.missing.deeper }}",
        "{{ 1 / 0 }}",
        "{{ messages[0].content + 5 }}",
        "{% for i in range(10**9) %}x{% endfor %}",
        "{{ ''.__class__.__mro__ }}",
        "{{ messages.append(1) }}",
    ],
)
def test_a_template_that_fails_is_a_value_error(renderer: Renderer, template: str) -> None:
    with pytest.raises(ValueError, match="chat template"):
        rendered_chat(renderer, [USER], chat_template=template)


class Message(NamedTuple):
    """No dict: what it is to templates nobody can tell."""

    role: str


@pytest.mark.parametrize(
    ("messages", "options", "error", "reason"),
    [
        ([], {}, ValueError, "the conversation is empty"),
        ("text", {}, TypeError, "a conversation is a list of messages, got str"),
        ([{"content": "no role"}], {}, ValueError, r"messages\[0\] needs a 'role'; it has \['content'\]"),
        ([{"role": None, "content": "x"}], {}, ValueError, r"messages\[0\] needs a 'role'"),
        ([{5: "x", "content": "x"}], {}, ValueError, r"messages\[0\] needs a 'role'"),
        ([USER, {"role": 5, "content": "x"}], {}, TypeError, r"messages\[1\]\['role'\] must be a str, got 5"),
        (["text"], {}, TypeError, r"messages\[0\] must be a dict .*, got str"),
        ([USER, None], {}, TypeError, r"messages\[1\] must be a dict .*, got NoneType"),
        ([USER, [USER]], {}, TypeError, r"messages\[1\] must be a dict .*, got list"),
        ([Message("user")], {}, TypeError, r"messages\[0\] must be a dict .*, got Message"),
        ([{"role": "user", "content": 5}], {}, TypeError, r"messages\[0\]\['content'\] must be a str.*, got 5"),
        ([{"role": "user", "content": True}], {}, TypeError, r"\['content'\] must be a str.*, got True"),
        ([{"role": "user", "content": {"text": "x"}}], {}, TypeError, r"\['content'\] must be a str.*, got {"),
        ([{"role": "user", "content": b"x"}], {}, TypeError, r"messages\[0\] holds a value of type bytes"),
        ([{"role": "user", "content": {"x"}}], {}, TypeError, r"messages\[0\] holds a value of type set"),
        ([{"role": "user", "content": ["x", 5]}], {}, TypeError, r"\['content'\]\[1\] must be a str or a dict"),
        ([{"role": "user", "content": [{"type": "text", "text": 5}]}], {}, TypeError, r"whose 'text' is one"),
        ([{"role": "user", "content": [{"type": "text", "text": None}]}], {}, TypeError, r"whose 'text' is one"),
        ([{"role": "user", "content": [{"type": "image_url", "image_url": "x"}]}], {}, ValueError, "image_url"),
        ([{"role": "assistant", "tool_calls": {"a": 1}}], {}, TypeError, r"\['tool_calls'\] must be a list of dicts"),
        ([{"role": "assistant", "tool_calls": [5]}], {}, TypeError, r"\['tool_calls'\] must be a list of dicts"),
        ([{"role": "user", "content": "\ud800"}], {}, ValueError, "surrogate"),
        (
            [{"role": "user", "x": functools.reduce(lambda inner, _: [inner], range(10**5), [])}],
            {},
            ValueError,
            "nested",
        ),
        ([USER], {"continue_final_message": True}, ValueError, "exclude each other"),
        (
            [{"role": "user"}],
            {"continue_final_message": True, "add_generation_prompt": False},
            ValueError,
            "needs a text to continue",
        ),
        ([USER], {"tools": {"name": "f"}}, TypeError, "tools must be a list of dicts, got dict"),
        ([USER], {"tools": "f"}, TypeError, "tools must be a list of dicts, got str"),
        ([USER], {"tools": [5]}, TypeError, r"tools must be a list of dicts, got \[5\]"),
        ([USER], {"tools": [{"name": b"f"}]}, TypeError, "tools holds a value of type bytes"),
        ([USER], {"chat_template": 5}, ValueError, "chat_template must be None, a template's text"),
        ([USER], {"chat_template": ["x"]}, ValueError, "chat_template must be None, a template's text"),
        ([USER], {"chat_template_content_format": "json"}, ValueError, "chat_template_content_format must be one of"),
        ([USER], {"add_generation_prompt": "no"}, ValueError, "add_generation_prompt must be True or False, got 'no'"),
        ([USER], {"continue_final_message": 1}, ValueError, "continue_final_message must be True or False, got 1"),
        ([USER], {"chat_template_kwargs": ["x"]}, ValueError, "chat_template_kwargs must be a dict"),
        ([USER], {"chat_template_kwargs": {5: "x"}}, ValueError, "chat_template_kwargs must be a dict from names"),
        ([USER], {"chat_template_kwargs": {"tools": []}}, ValueError, r"own arguments, got \['tools'\]"),
        ([USER], {"chat_template_kwargs": {"messages": []}}, ValueError, r"own arguments, got \['messages'\]"),
        ([USER], {"chat_template_kwargs": {"x": object()}}, TypeError, "variable 'x' holds a value of type object"),
    ],
)
def test_what_will_not_do_in_a_chat_is_refused_by_its_name(
    renderer: Renderer, messages: list[Any], options: dict[str, Any], error: type[Exception], reason: str
) -> None:
    with pytest.raises(error, match=reason):
        rendered_chat(renderer, messages, **options)


def test_messages_may_be_dataclasses_and_variables_may_be_called_anything(renderer: Renderer) -> None:
    @dataclasses.dataclass
    class Said:
        role: str
        content: list[Any]

    (messages,), _ = renderer.render_chat([[Said("user", ["one", {"type": "text", "text": "two"}])]])
    assert messages == [{"role": "user", "content": "one\ntwo"}]
    options = {"chat_template_kwargs": {"tokenize": True, "self": 1, "documents": ["a"], "x": 2.5}}
    template = "{{ [tokenize, documents, x] | tojson }}"
    assert rendered_chat(renderer, [USER], chat_template=template, **options)[0] == '[true, ["a"], 2.5]'


def test_one_conversation_is_told_from_several() -> None:
    assert to_conversation_list([USER]) == [[USER]]
    assert to_conversation_list([[USER], [SYSTEM, USER]]) == [[USER], [SYSTEM, USER]]
    assert to_conversation_list([]) == []
    for wrong in ("text", None, {"role": "user"}):
        with pytest.raises(TypeError, match="messages"):
            to_conversation_list(wrong)
