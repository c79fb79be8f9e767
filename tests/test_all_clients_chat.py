"""Conversations over the three clients: prompts as transformers renders them, clear errors at the caller."""

from pathlib import Path
from typing import Any

import pytest
from clients import IN_PROCESS
from prompts import greedy
from tiny_llama import write_tokenizer

from corespan import SamplingParams

USER = {"role": "user", "content": "Hi there"}
SYSTEM = {"role": "system", "content": "Be brief."}
TOOL = {
    "type": "function",
    "function": {"name": "weather", "parameters": {"type": "object", "properties": {"place": {"type": "string"}}}},
}
CALL = {
    "role": "assistant",
    "content": None,
    "tool_calls": [{"type": "function", "function": {"name": "weather", "arguments": {"place": "Párís"}}}],
}
TEMPLATE = (
    "{% if tools %}{% for tool in tools %}{{ tool | tojson }}\n{% endfor %}{% endif %}"
    "{% for message in messages %}<|im_start|>{{ message.role }}\n{{ message.content or '' }}"
    "{% for call in message.tool_calls or [] %}{{ call.function | tojson }}{% endfor %}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% if quick %}<quick>{% endif %}{% endif %}"
)
CHATS: dict[str, tuple[list[Any], dict[str, Any]]] = {
    "user alone": ([USER], {}),
    "system": ([SYSTEM, USER], {}),
    "no generation prompt": ([SYSTEM, USER], {"add_generation_prompt": False}),
    "tools": ([USER, CALL, {"role": "tool", "content": "sunny"}], {"tools": [TOOL]}),
    "template kwargs": ([USER], {"chat_template_kwargs": {"quick": True}}),
    "final message continued": (
        [USER, {"role": "assistant", "content": "Hello, I"}],
        {"add_generation_prompt": False, "continue_final_message": True},
    ),
}


@pytest.fixture(scope="module")
def transformers_tokenizer(tiny_llama_dir: str) -> Any:
    from transformers import AutoTokenizer

    return AutoTokenizer.from_pretrained(tiny_llama_dir)


@pytest.mark.parametrize("chat", CHATS)
def test_a_chats_prompt_is_transformers_and_its_answer_that_of_the_prompt(
    runner: Any, transformers_tokenizer: Any, chat: str
) -> None:
    messages, options = CHATS[chat]

    (output,) = runner.chat(messages, greedy(), chat_template=TEMPLATE, **options)

    kwargs = {"add_generation_prompt": True, **options, **options.get("chat_template_kwargs", {})}
    kwargs.pop("chat_template_kwargs", None)
    expected = transformers_tokenizer.apply_chat_template(
        messages, chat_template=TEMPLATE, tokenize=True, return_dict=False, **kwargs
    )
    assert output.prompt_token_ids == expected
    assert output.prompt == transformers_tokenizer.apply_chat_template(
        messages, chat_template=TEMPLATE, tokenize=False, **kwargs
    )
    (plain,) = runner.generate([expected], greedy())
    assert output.outputs[0].token_ids == plain.outputs[0].token_ids


def test_a_batch_of_chats_is_answered_in_order_each_by_its_own_params(runner: Any) -> None:
    chats = [messages for messages, _ in list(CHATS.values())[:3]]
    all_params = [greedy(3), greedy(9), SamplingParams(seed=4, max_tokens=5)]

    together = runner.chat(chats, all_params)

    alone = [runner.chat(chat, params)[0] for chat, params in zip(chats, all_params, strict=True)]
    assert [output.outputs[0].token_ids for output in together] == [output.outputs[0].token_ids for output in alone]
    assert [len(output.outputs[0].token_ids) for output in together[:2]] == [3, 9]


@IN_PROCESS
def test_without_a_template_a_chat_says_to_pass_one_and_the_engine_goes_on(make_runner: Any, tmp_path: Path) -> None:
    write_tokenizer(tmp_path, chat_template=None)
    runner = make_runner(tokenizer=str(tmp_path))

    with pytest.raises(ValueError, match="no chat template; pass one as chat_template"):
        runner.chat([USER], greedy())

    (output,) = runner.chat([USER], greedy(), chat_template="{{ messages[0].content }}")
    assert output.prompt == "Hi there"
    assert runner.is_idle()


def test_a_begin_token_that_the_template_writes_is_there_once(runner: Any, transformers_tokenizer: Any) -> None:
    template = "{{ bos_token }}{{ messages[0].content }}"
    assert transformers_tokenizer.encode("x")[0] == transformers_tokenizer.bos_token_id  # it adds one of its own

    (output,) = runner.chat([USER], greedy(), chat_template=template)

    assert output.prompt_token_ids == transformers_tokenizer.apply_chat_template(
        [USER], chat_template=template, tokenize=True, return_dict=False
    )
    assert output.prompt_token_ids.count(transformers_tokenizer.bos_token_id) == 1


WRONG_CHATS: dict[str, tuple[Any, dict[str, Any], type[Exception], str]] = {
    "a template that raises": ([USER], {"chat_template": "{{ raise_exception('no such role') }}"}, ValueError, "role"),
    "a template that does not parse": ([USER], {"chat_template": "{% if %}"}, ValueError, "chat template failed"),
    "a number for content": ([{"role": "user", "content": 5}], {}, TypeError, r"messages\[0\]\['content'\]"),
    "a number for a role": ([{"role": 5, "content": "x"}], {}, TypeError, r"messages\[0\]\['role'\]"),
    "no role": ([{"content": "x"}], {}, ValueError, r"messages\[0\] needs a 'role'"),
    "text for a message": ([USER, "x"], {}, TypeError, r"messages\[1\] must be a dict"),
    "a dict for tools": ([USER], {"tools": {"name": "f"}}, TypeError, "tools must be a list"),
    "text for messages": ("Hi there", {}, TypeError, "messages must be a list"),
    "a conversation without messages": ([[USER], []], {}, ValueError, "empty"),
    "a second conversation that is wrong": ([[USER], [{"role": None}]], {}, ValueError, "needs a 'role'"),
    "a lone surrogate": ([{"role": "user", "content": "\ud800"}], {}, ValueError, "surrogate"),
    "a chat too long": ([{"role": "user", "content": "word " * 3000}], {}, ValueError, "max_model_len"),
    "a megabyte of chat": ([{"role": "user", "content": "word " * 200_000}], {}, ValueError, "max_model_len"),
    "wrong tokenization_kwargs": ([USER], {"tokenization_kwargs": 5}, TypeError, "tokenization_kwargs"),
}


def test_wrong_chats_are_refused_at_the_caller_and_harm_no_neighbour(runner: Any) -> None:
    (alone,) = runner.generate("Once upon a time", greedy(200))

    def send_wrong_chats() -> None:
        for name, (messages, options, error, reason) in WRONG_CHATS.items():
            with pytest.raises(error, match=reason):
                runner.chat(messages, greedy(), **options)
                pytest.fail(f"{name} was accepted")

    together = runner.with_neighbour("Once upon a time", greedy(200), send_wrong_chats)

    assert together.outputs[0].token_ids == alone.outputs[0].token_ids
    assert runner.is_idle()


def test_wrong_chats_are_not_enqueued_either(runner: Any) -> None:
    if runner.kind == "async_mp":
        pytest.skip("AsyncLLM has no queue of its own")
    for messages, options, error, reason in WRONG_CHATS.values():
        with pytest.raises(error, match=reason):
            runner.llm.enqueue_chat(messages, greedy(), use_tqdm=False, **options)

    assert runner.llm.wait_for_completion(use_tqdm=False) == []
    assert runner.is_idle()


@pytest.mark.parametrize("where", ["params", "call"])
def test_a_chat_of_any_length_may_be_truncated(runner: Any, where: str) -> None:
    if runner.kind == "async_mp" and where == "params":
        pytest.skip("AsyncLLM is handed prompts that are rendered already")
    messages = [{"role": "user", "content": "word " * 20_000}]
    truncation = {"truncate_prompt_tokens": 8}
    params = greedy(**truncation) if where == "params" else greedy()

    (output,) = runner.chat(messages, params, tokenization_kwargs=truncation if where == "call" else None)

    (short,) = runner.chat([{"role": "user", "content": "word " * 20}], params, tokenization_kwargs=truncation)
    assert len(output.prompt_token_ids) == 8
    assert output.prompt_token_ids == short.prompt_token_ids
