"""Prompts of every form, and what is no prompt; how a prompt is cut down, or found too long unread."""

from typing import Any

import numpy as np
import pytest
from text_pipeline import make_config

from corespan.engine.text.prompts import to_prompt_list
from corespan.engine.text.render_params import TokenizeParams
from corespan.engine.text.renderer import Renderer
from corespan.engine.text.tokenizer import Tokenizer
from corespan.protocol.errors import VLLMValidationError


@pytest.fixture
def embeds_renderer(tokenizer: Tokenizer) -> Renderer:
    return Renderer(make_config(enable_prompt_embeds=True).model_config, tokenizer)


def test_a_batch_is_told_from_a_token_prompt_by_its_first_element(renderer: Renderer) -> None:
    assert to_prompt_list("text") == ["text"]
    assert to_prompt_list({"prompt": "text"}) == [{"prompt": "text"}]
    assert to_prompt_list([1, 2]) == [[1, 2]]
    assert to_prompt_list([[1, 2], "text", {"prompt": "x"}]) == [[1, 2], "text", {"prompt": "x"}]
    assert to_prompt_list(("a", "b")) == ["a", "b"]
    assert to_prompt_list([]) == []
    with pytest.raises(TypeError, match="a prompt is .* got ndarray"):
        renderer.render_cmpl(to_prompt_list([np.array([1, 2])]))
    for wrong in (None, 5, b"bytes", {"a"}, np.array([1, 2])):
        with pytest.raises(TypeError, match="prompts must be"):
            to_prompt_list(wrong)


def test_text_is_tokenised_with_its_special_tokens_and_kept(renderer: Renderer, tokenizer: Tokenizer) -> None:
    for prompt in ("Once", {"prompt": "Once"}):
        (rendered,) = renderer.render_cmpl([prompt])
        assert rendered["prompt_token_ids"] == [
            tokenizer.bos_token_id,
            *tokenizer.encode("Once", add_special_tokens=False),
        ]
        assert rendered["prompt"] == "Once" and rendered["arrival_time"] > 0


def test_token_prompts_stay_as_they_are(renderer: Renderer) -> None:
    prompts: list[Any] = [[5, 6], {"prompt_token_ids": [5, 6]}, {"prompt_token_ids": np.array([5, 6])}]
    for rendered in renderer.render_cmpl(prompts):
        assert rendered["prompt_token_ids"] == [5, 6]
        assert all(type(token_id) is int for token_id in rendered["prompt_token_ids"])
        assert rendered.get("prompt") is None
    (with_text,) = renderer.render_cmpl([{"prompt_token_ids": [5], "prompt": "said so", "cache_salt": "s"}])
    assert (with_text["prompt"], with_text["cache_salt"]) == ("said so", "s")


def test_a_rendered_prompt_is_taken_as_it_is(renderer: Renderer) -> None:
    (once,) = renderer.render_cmpl(["Once"])
    (twice,) = renderer.render_cmpl([once])
    assert twice == once


@pytest.mark.parametrize(
    "prompt",
    [
        None,
        5,
        b"bytes",
        {},
        {"promt": "misspelt"},
        {"prompt": 5},
        {"prompt": b"bytes"},
        {"prompt_token_ids": "12"},
        {"prompt_token_ids": 7},
        {"prompt_token_ids": [1.5]},
        {"prompt_token_ids": [1, "2"]},
        {"prompt_token_ids": [True]},
        {"prompt_token_ids": [1, None]},
        {"prompt": "x", "cache_salt": 5},
        {"encoder_prompt": "a", "decoder_prompt": "b"},
        ["not", "ids"],
        (1, 2),
        {"type": "token"},
        {"type": "embeds", "prompt_token_ids": [0]},
    ],
)
def test_what_is_no_prompt_is_a_type_error(renderer: Renderer, prompt: Any) -> None:
    with pytest.raises(TypeError):
        renderer.render_cmpl([prompt])


@pytest.mark.parametrize(
    ("prompt", "match"),
    [
        ("a lone \ud800 surrogate", "surrogate"),
        ({"prompt": "x", "cache_salt": ""}, "cache_salt"),
        ({"prompt": "x", "multi_modal_data": {"image": 1}}, "multi_modal_data"),
        ({"prompt_embeds": np.zeros((2, 8))}, "enable_prompt_embeds"),
        ({"type": "multimodal"}, "multimodal"),
    ],
)
def test_a_prompt_this_model_cannot_be_given_is_a_value_error(renderer: Renderer, prompt: Any, match: str) -> None:
    with pytest.raises(ValueError, match=match):
        renderer.render_cmpl([prompt])


def test_without_a_tokenizer_only_token_ids_will_do() -> None:
    renderer = Renderer(make_config().model_config, None)
    assert renderer.render_cmpl([[5, 6]])[0]["prompt_token_ids"] == [5, 6]
    with pytest.raises(ValueError, match="tokenizer"):
        renderer.render_cmpl(["text"])


def test_embeddings_come_as_float32_rows_with_a_zero_id_each(embeds_renderer: Renderer) -> None:
    import torch

    values = np.arange(16, dtype=np.float64).reshape(2, 8)
    for given in (values, values[None], torch.tensor(values, dtype=torch.bfloat16), torch.tensor(values[None])):
        (rendered,) = embeds_renderer.render_cmpl([{"prompt_embeds": given}])
        assert rendered["type"] == "embeds" and rendered["prompt_token_ids"] == [0, 0]
        assert rendered["prompt_embeds"].dtype == np.float32
        assert np.array_equal(rendered["prompt_embeds"], values)


@pytest.mark.parametrize(
    ("embeds", "match"),
    [
        (np.zeros((2, 7)), "shape"),
        (np.zeros(8), "shape"),
        (np.zeros((2, 2, 8)), "shape"),
        (np.full((2, 8), np.nan), "NaN"),
    ],
)
def test_embeddings_of_the_wrong_shape_or_value_are_refused(
    embeds_renderer: Renderer, embeds: np.ndarray, match: str
) -> None:
    with pytest.raises(ValueError, match=match):
        embeds_renderer.render_cmpl([{"prompt_embeds": embeds}])


@pytest.mark.parametrize(
    ("kwargs", "kept"),
    [
        ({"truncate_prompt_tokens": 3}, [8, 9, 10]),
        ({"truncate_prompt_tokens": 3, "truncation_side": "right"}, [1, 2, 3]),
        ({"truncate_prompt_tokens": 20}, list(range(1, 11))),
        ({"truncate_prompt_tokens": -1}, list(range(1, 11))),
        ({"truncate_prompt_tokens": 0}, []),
        ({"truncate_prompt_tokens": None}, list(range(1, 11))),
    ],
)
def test_truncation_keeps_the_end_unless_told_otherwise(
    renderer: Renderer, kwargs: dict[str, Any], kept: list[int]
) -> None:
    (rendered,) = renderer.render_cmpl([list(range(1, 11))], TokenizeParams().with_kwargs(kwargs))
    assert rendered["prompt_token_ids"] == kept


@pytest.mark.parametrize(
    ("params", "rows"),
    [
        ({"truncate_prompt_tokens": 3}, [7, 8, 9]),
        ({"truncate_prompt_tokens": 3, "truncation_side": "right"}, [0, 1, 2]),
        ({"truncate_prompt_tokens": -1}, list(range(10))),
    ],
)
def test_embeddings_are_truncated_by_rows(embeds_renderer: Renderer, params: dict[str, Any], rows: list[int]) -> None:
    embeds = np.repeat(np.arange(10, dtype=np.float32)[:, None], 8, axis=1)
    (rendered,) = embeds_renderer.render_cmpl([{"prompt_embeds": embeds}], TokenizeParams(**params))
    assert rendered["prompt_embeds"][:, 0].tolist() == rows
    assert rendered["prompt_token_ids"] == [0] * len(rows)


def test_truncation_to_what_the_model_can_take_leaves_room_for_a_token(renderer: Renderer) -> None:
    (rendered,) = renderer.render_cmpl([[7] * 500], TokenizeParams(truncate_prompt_tokens=-1))
    assert len(rendered["prompt_token_ids"]) == 127
    with pytest.raises(VLLMValidationError, match="128") as caught:
        renderer.render_cmpl([[7]], TokenizeParams(truncate_prompt_tokens=128))
    assert caught.value.parameter == "truncate_prompt_tokens"


@pytest.mark.parametrize("count", [-2, 1.5, "3", True])
def test_a_wrong_number_of_tokens_to_keep_is_refused(count: Any) -> None:
    with pytest.raises(VLLMValidationError, match="truncate_prompt_tokens"):
        TokenizeParams(truncate_prompt_tokens=count)


def test_a_wrong_side_is_refused_and_unknown_options_are_named_in_a_warning(caplog: pytest.LogCaptureFixture) -> None:
    with pytest.raises(VLLMValidationError, match="middle"):
        TokenizeParams().with_kwargs({"truncation_side": "middle"})
    assert TokenizeParams().with_kwargs({"no_such_option": 1}) == TokenizeParams()
    assert "no_such_option" in caplog.text


def test_a_megabyte_of_text_is_tokenised_whole_for_a_model_that_can_take_it(tokenizer: Tokenizer) -> None:
    renderer = Renderer(make_config(max_model_len=1_000_001).model_config, tokenizer)
    for text in ("word " * 200_000, "a" * 1_000_000):
        (rendered,) = renderer.render_cmpl([text])
        assert tokenizer.decode(rendered["prompt_token_ids"], skip_special_tokens=True) == text


def test_a_text_too_long_for_any_tokens_is_refused_without_tokenising_it_unless_it_is_truncated(
    renderer: Renderer, monkeypatch: pytest.MonkeyPatch
) -> None:
    text = "word " * 1000
    chat = [{"role": "user", "content": text}]
    cut = TokenizeParams(truncate_prompt_tokens=4)
    assert len(renderer.render_cmpl([text], cut)[0]["prompt_token_ids"]) == 4
    assert len(renderer.render_chat([chat], None, cut)[1][0]["prompt_token_ids"]) == 4

    monkeypatch.setattr(Tokenizer, "encode", None)
    for render in (lambda: renderer.render_cmpl([text]), lambda: renderer.render_chat([chat])):
        with pytest.raises(
            VLLMValidationError, match=r"\d+ characters, which are \d+ tokens at least.*128.*127"
        ) as caught:
            render()
        assert caught.value.parameter == "input_text"


@pytest.mark.parametrize(
    ("kwargs", "error"),
    [
        (5, TypeError),
        ("truncation_side", TypeError),
        ({"add_special_tokens": "no"}, ValueError),
        ({"truncation_side": 5}, ValueError),
        ({"truncate_prompt_tokens": 2**70}, ValueError),
    ],
)
def test_wrong_tokenization_kwargs_are_refused(kwargs: Any, error: type[Exception]) -> None:
    with pytest.raises(error):
        TokenizeParams().with_kwargs(kwargs)
