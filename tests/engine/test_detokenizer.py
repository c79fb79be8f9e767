"""Text comes out piece by piece and is, in the end, what decoding all tokens at once gives, cut at a stop string."""

from collections.abc import Callable
from typing import Any

import pytest
from awkward_texts import AWKWARD
from hypothesis import given, settings
from hypothesis import strategies as st
from text_pipeline import VOCAB_SIZE, byte_fallback_tokenizer, make_config, make_request, stream
from tiny_llama import write_tokenizer

from corespan.engine.outputs.request_output import RequestOutput
from corespan.engine.requests.input_processor import InputProcessor
from corespan.engine.text.detokenizer import FastStream, SlowStream
from corespan.engine.text.loading import load_tokenizer
from corespan.engine.text.tokenizer import Tokenizer
from corespan.protocol.outputs import FinishReason
from corespan.protocol.params import RequestOutputKind, SamplingParams

CUMULATIVE, DELTA, FINAL_ONLY = RequestOutputKind.CUMULATIVE, RequestOutputKind.DELTA, RequestOutputKind.FINAL_ONLY


@pytest.fixture(scope="session")
def tokenizers(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Tokenizer]:
    folder = tmp_path_factory.mktemp("byte_level")
    write_tokenizer(folder)
    return {
        "byte level": load_tokenizer(str(folder)),
        "byte fallback": byte_fallback_tokenizer(tmp_path_factory.mktemp("byte_fallback")),
    }


@pytest.fixture(scope="session")
def byte_level(tokenizers: dict[str, Tokenizer]) -> Tokenizer:
    return tokenizers["byte level"]


Generate = Callable[..., list[RequestOutput]]


@pytest.fixture(scope="session")
def generate() -> Generate:
    """Outputs of one request over a tokenizer, given what the core yields."""

    def run(
        tokenizer: Tokenizer, token_ids: list[int], params: SamplingParams, prompt: Any = "Once", **options: Any
    ) -> list[RequestOutput]:
        processor = InputProcessor(make_config(max_model_len=4096), tokenizer)
        return list(stream(tokenizer, make_request(processor, prompt, params), token_ids, **options))

    return run


def text_of(outputs: list[RequestOutput]) -> str:
    return outputs[-1].outputs[0].text


def joined(outputs: list[RequestOutput]) -> str:
    return "".join(output.outputs[0].text for output in outputs)


def first_stop(text: str, stops: list[str], ends_behind: int = 0) -> tuple[int, int, str] | None:
    """(end, begin, stop) of the stop string that is complete first, found character by character."""
    for end in range(ends_behind + 1, len(text) + 1):
        for stop in stops:
            begin = end - len(stop)
            if begin >= 0 and text[begin:end] == stop:
                return end, begin, stop
    return None


text_pieces = st.one_of(st.sampled_from(AWKWARD), st.text(max_size=12))


@settings(max_examples=500, deadline=None)
@given(
    pieces=st.lists(st.one_of(text_pieces, st.lists(st.integers(0, 511), max_size=5)), max_size=5),
    which=st.sampled_from(["byte level", "byte fallback"]),
    stop_at=st.lists(st.tuples(st.integers(0, 60), st.integers(1, 8)), max_size=2),
    options=st.fixed_dictionaries(
        {
            "include_stop_str_in_output": st.booleans(),
            "skip_special_tokens": st.booleans(),
            "spaces_between_special_tokens": st.booleans(),
            "min_tokens": st.integers(0, 12),
        }
    ),
    tokens_per_step=st.integers(1, 3),
    stream_interval=st.integers(1, 4),
)
def test_joined_deltas_equal_the_cumulative_text(
    tokenizers: dict[str, Tokenizer],
    generate: Generate,
    pieces: list[str | list[int]],
    which: str,
    stop_at: list[tuple[int, int]],
    options: dict[str, Any],
    tokens_per_step: int,
    stream_interval: int,
) -> None:
    tokenizer = tokenizers[which]
    token_ids: list[int] = []
    for piece in pieces:
        ids = tokenizer.encode(piece, add_special_tokens=False) if isinstance(piece, str) else piece
        token_ids.extend(token_id % len(tokenizer) for token_id in ids)
    token_ids = token_ids or [5]
    unstopped = generate(tokenizer, token_ids, SamplingParams(output_kind=DELTA, max_tokens=1000, **options))
    whole = joined(unstopped)
    stops = [stop for start, length in stop_at if (stop := whole[start : start + length])]
    runs = {
        kind: generate(
            tokenizer,
            token_ids,
            SamplingParams(output_kind=kind, stop=stops, max_tokens=1000, **options),
            tokens_per_step=tokens_per_step,
            stream_interval=stream_interval,
        )
        for kind in RequestOutputKind
    }

    final = text_of(runs[FINAL_ONLY])
    assert joined(runs[DELTA]) == text_of(runs[CUMULATIVE]) == final
    ids = {kind: runs[kind][-1].outputs[0].token_ids for kind in (CUMULATIVE, FINAL_ONLY)}
    assert [t for output in runs[DELTA] for t in output.outputs[0].token_ids] == ids[CUMULATIVE] == ids[FINAL_ONLY]
    so_far = ""
    for output in runs[CUMULATIVE]:
        assert output.outputs[0].text.startswith(so_far)
        so_far = output.outputs[0].text
    if which == "byte level":
        assert whole == tokenizer.decode(token_ids, skip_special_tokens=options["skip_special_tokens"])
    match = first_stop(whole, stops, ends_behind=len(joined(unstopped[: options["min_tokens"]])))
    end, begin, stop = match or (len(whole), len(whole), None)
    assert final == whole[: end if options["include_stop_str_in_output"] else begin]
    assert [runs[kind][-1].outputs[0].stop_reason for kind in RequestOutputKind] == [stop] * 3


def test_the_random_cases_hold_what_is_awkward(tokenizers: dict[str, Tokenizer]) -> None:
    """Emoji with joiners, CJK, combining marks, special tokens, and characters that are several bytes' tokens."""
    text = "".join(AWKWARD)
    assert all(part in text for part in ("\u200d", "\U0001f44d", "日本", "\u0308", "العربية", "<|im_start|>", "</s>"))
    for tokenizer in tokenizers.values():
        ids = tokenizer.encode(text, add_special_tokens=False)
        assert any(tokenizer.decode([token_id]).endswith("\ufffd") for token_id in ids)
    assert tokenizers["byte level"].skipped_ids & set(tokenizers["byte level"].encode(text, add_special_tokens=False))


@pytest.mark.parametrize("include", [True, False])
@pytest.mark.parametrize("tokens_per_step", [1, 4])
def test_a_stop_string_is_found_at_every_place(
    byte_level: Tokenizer, generate: Generate, include: bool, tokens_per_step: int
) -> None:
    text = "Once upon a time 👩‍👩‍👧 there was 日本 an engine"
    token_ids = byte_level.encode(text, add_special_tokens=False)
    for start in range(len(text) - 1):
        for length in (1, 2, 5):
            stop = text[start : start + length]
            params = SamplingParams(output_kind=DELTA, stop=[stop], include_stop_str_in_output=include, max_tokens=1000)
            outputs = generate(byte_level, token_ids, params, tokens_per_step=tokens_per_step)
            cut = text.index(stop) + (len(stop) if include else 0)
            assert joined(outputs) == text[:cut]
            last = outputs[-1].outputs[0]
            assert (last.finish_reason, last.stop_reason) == ("stop", stop)


def test_the_stop_string_that_is_complete_first_ends_the_text_whatever_the_listing(
    byte_level: Tokenizer, generate: Generate
) -> None:
    token_ids = byte_level.encode("one two three", add_special_tokens=False)
    for stops in (["three", "two"], ["two", "three"]):
        outputs = generate(byte_level, token_ids, SamplingParams(stop=stops), tokens_per_step=len(token_ids))
        assert text_of(outputs) == "one "


@pytest.mark.parametrize("stops", [["two", "o two"], ["o two", "two"]])
def test_of_stop_strings_that_end_together_the_first_listed_counts(
    byte_level: Tokenizer, generate: Generate, stops: list[str]
) -> None:
    token_ids = byte_level.encode("no two three", add_special_tokens=False)
    outputs = generate(byte_level, token_ids, SamplingParams(stop=stops))
    assert outputs[-1].outputs[0].stop_reason == stops[0]
    assert text_of(outputs) == "no two".removesuffix(stops[0])


@pytest.mark.parametrize("include", [True, False])
@pytest.mark.parametrize("kind", [CUMULATIVE, DELTA, FINAL_ONLY])
def test_a_stop_string_may_be_a_special_token_that_the_text_leaves_out(
    byte_level: Tokenizer, generate: Generate, kind: RequestOutputKind, include: bool
) -> None:
    token_ids = byte_level.encode("one<|im_start|>two<|im_end|>three", add_special_tokens=False)
    stop = "<|im_end|>"
    params = SamplingParams(stop=["x", stop], include_stop_str_in_output=include, max_tokens=100, output_kind=kind)
    outputs = generate(byte_level, token_ids, params)
    assert (joined(outputs) if kind is DELTA else text_of(outputs)) == "onetwo" + (stop if include else "")
    assert (outputs[-1].outputs[0].finish_reason, outputs[-1].outputs[0].stop_reason) == ("stop", stop)


@pytest.mark.parametrize("skip", [True, False])
def test_more_than_a_special_token_is_looked_for_in_the_text_which_may_leave_that_out(
    byte_level: Tokenizer, generate: Generate, skip: bool
) -> None:
    token_ids = byte_level.encode("one<|im_end|>\ntwo", add_special_tokens=False)
    stop = "<|im_end|>\n"
    outputs = generate(byte_level, token_ids, SamplingParams(stop=[stop], skip_special_tokens=skip, max_tokens=100))
    assert (text_of(outputs), outputs[-1].outputs[0].stop_reason) == (("one\ntwo", None) if skip else ("one", stop))


def test_a_stop_string_that_is_no_token_is_not_taken_for_the_unknown_one(
    tokenizers: dict[str, Tokenizer], generate: Generate
) -> None:
    tokenizer = tokenizers["byte fallback"]
    assert tokenizer.unk_token_id in tokenizer.skipped_ids
    token_ids = [tokenizer.unk_token_id, *tokenizer.encode("one two", add_special_tokens=False)]
    outputs = generate(tokenizer, token_ids, SamplingParams(stop=["never there"], max_tokens=100))
    assert (text_of(outputs).strip(), outputs[-1].outputs[0].stop_reason) == ("one two", None)
    outputs = generate(tokenizer, token_ids, SamplingParams(stop=["<unk>"], max_tokens=100))
    assert (text_of(outputs), outputs[-1].outputs[0].stop_reason) == ("", "<unk>")


def test_a_special_token_stops_nothing_before_min_tokens(byte_level: Tokenizer, generate: Generate) -> None:
    token_ids = byte_level.encode("<|im_end|>a<|im_end|>", add_special_tokens=False)
    for min_tokens, length in ((0, 1), (1, 3), (2, 3)):
        params = SamplingParams(stop=["<|im_end|>"], min_tokens=min_tokens, max_tokens=100)
        outputs = generate(byte_level, token_ids, params)
        assert len(outputs[-1].outputs[0].token_ids) == length


def test_a_stop_string_may_begin_before_min_tokens_and_end_behind(byte_level: Tokenizer, generate: Generate) -> None:
    token_ids = [token for char in "abcd" for token in byte_level.encode(char, add_special_tokens=False)]
    outputs = generate(byte_level, token_ids, SamplingParams(stop=["bc"], min_tokens=2, max_tokens=100))
    assert text_of(outputs) == "a" and outputs[-1].outputs[0].stop_reason == "bc"
    outputs = generate(byte_level, token_ids, SamplingParams(stop=["bc"], min_tokens=3, max_tokens=100))
    assert text_of(outputs) == "abcd"


def test_stop_strings_do_not_match_before_min_tokens(byte_level: Tokenizer, generate: Generate) -> None:
    text = "ab" * 20
    token_ids = [token for char in text for token in byte_level.encode(char, add_special_tokens=False)]
    assert len(token_ids) == len(text)
    for min_tokens in range(12):
        params = SamplingParams(stop=["ba"], min_tokens=min_tokens, max_tokens=100)
        outputs = generate(byte_level, token_ids, params)
        end, begin, _ = first_stop(text, ["ba"], ends_behind=min_tokens) or (0, 0, "")
        assert text_of(outputs) == text[:begin]
        assert len(outputs[-1].outputs[0].token_ids) == end > min_tokens


def test_no_delta_holds_half_a_character(byte_level: Tokenizer, generate: Generate) -> None:
    token_ids = byte_level.encode("ďábel 👩‍👩‍👧 日本 ok", add_special_tokens=False)
    for stop in ([], ["never comes"]):
        outputs = generate(byte_level, token_ids, SamplingParams(output_kind=DELTA, stop=stop, max_tokens=100))
        assert not any("\ufffd" in output.outputs[0].text for output in outputs)
        assert joined(outputs) == "ďábel 👩‍👩‍👧 日本 ok"


@pytest.mark.parametrize("which", ["byte level", "byte fallback"])
@pytest.mark.parametrize("kind", list(RequestOutputKind))
def test_a_character_cut_by_max_tokens_is_one_replacement_at_the_end(
    tokenizers: dict[str, Tokenizer], generate: Generate, which: str, kind: RequestOutputKind
) -> None:
    tokenizer = tokenizers[which]
    whole = tokenizer.encode("ok 日", add_special_tokens=False)
    outputs = generate(tokenizer, whole[:-1], SamplingParams(output_kind=kind, max_tokens=100))
    text = joined(outputs) if kind is DELTA else text_of(outputs)
    assert text.rstrip("\ufffd").strip() == "ok"
    assert text.count("\ufffd") == 1


def test_the_token_that_ends_the_request_takes_no_text_with_it(byte_level: Tokenizer, generate: Generate) -> None:
    words = byte_level.encode("The capital of France", add_special_tokens=False)
    end = byte_level.encode("<|im_end|>", add_special_tokens=False)[0]
    for stop_token in (end, words[0]):
        params = SamplingParams(stop_token_ids=[stop_token], max_tokens=100)
        outputs = generate(byte_level, [*words, stop_token], params, finish_reason=FinishReason.STOP)
        assert text_of(outputs) == "The capital of France"
        assert outputs[-1].outputs[0].token_ids == [*words, stop_token]


def test_the_ending_tokens_text_is_kept_on_request(byte_level: Tokenizer, generate: Generate) -> None:
    words = byte_level.encode("The capital", add_special_tokens=False)
    params = SamplingParams(stop_token_ids=[words[0]], include_stop_str_in_output=True)
    outputs = generate(byte_level, [*words, words[0]], params, finish_reason=FinishReason.STOP)
    assert text_of(outputs) == byte_level.decode([*words, words[0]], skip_special_tokens=True)


def test_special_tokens_show_only_when_not_skipped(byte_level: Tokenizer, generate: Generate) -> None:
    token_ids = byte_level.encode("a<|im_start|>b<|im_end|><|im_end|>c", add_special_tokens=False)
    shown = generate(byte_level, token_ids, SamplingParams(skip_special_tokens=False, output_kind=DELTA))
    hidden = generate(byte_level, token_ids, SamplingParams(output_kind=DELTA))
    assert joined(shown) == "a<|im_start|>b<|im_end|><|im_end|>c"
    assert joined(hidden) == "abc"


def test_the_prompt_decides_whether_the_first_word_brings_a_space(
    tokenizers: dict[str, Tokenizer], generate: Generate
) -> None:
    tokenizer = tokenizers["byte fallback"]
    whole = tokenizer.encode("in the world", add_special_tokens=False)
    prompt = tokenizer.encode("in", add_special_tokens=False)
    outputs = generate(tokenizer, whole[len(prompt) :], SamplingParams(max_tokens=100), prompt=prompt)
    assert text_of(outputs) == " the world"


@pytest.mark.parametrize("name", ["byte level", "byte fallback"])
@pytest.mark.parametrize("kind", [CUMULATIVE, DELTA, FINAL_ONLY])
def test_a_character_that_the_prompt_begins_appears_once(
    tokenizers: dict[str, Tokenizer], generate: Generate, name: str, kind: RequestOutputKind
) -> None:
    tokenizer = tokenizers[name]
    whole = tokenizer.encode("so 👩 it is", add_special_tokens=False)
    inside = [at for at in range(1, len(whole)) if tokenizer.decode(whole[:at]).endswith("\ufffd")]
    assert inside
    for at in inside:
        params = SamplingParams(max_tokens=100, output_kind=kind)
        outputs = generate(tokenizer, whole[at:], params, prompt=whole[:at])
        assert (joined(outputs) if kind is DELTA else text_of(outputs)) == "👩 it is"


def test_a_character_that_the_prompt_begins_and_nobody_ends_stays_away(
    byte_level: Tokenizer, generate: Generate
) -> None:
    whole = byte_level.encode("so 👩", add_special_tokens=False)
    at = next(at for at in range(1, len(whole)) if byte_level.decode(whole[:at]).endswith("\ufffd"))
    following = byte_level.encode(" it is", add_special_tokens=False)
    outputs = generate(byte_level, following, SamplingParams(max_tokens=100), prompt=whole[:at])
    assert text_of(outputs) == " it is"


def test_without_detokenisation_there_are_tokens_and_no_text(byte_level: Tokenizer, generate: Generate) -> None:
    outputs = generate(byte_level, [5, 6, 7], SamplingParams(detokenize=False))
    assert (text_of(outputs), outputs[-1].outputs[0].token_ids) == ("", [5, 6, 7])


@settings(max_examples=200, deadline=None)
@given(token_ids=st.lists(st.integers(0, VOCAB_SIZE - 1), max_size=40), skip=st.booleans())
def test_the_slow_stream_gives_the_fast_streams_text(byte_level: Tokenizer, token_ids: list[int], skip: bool) -> None:
    context = byte_level.encode("Once upon", add_special_tokens=False)
    texts = []
    for token_stream in (FastStream(byte_level, context, skip), SlowStream(byte_level, context, skip)):
        texts.append("".join(map(token_stream.step, token_ids)) + token_stream.flush())
    assert texts[0] == texts[1] == byte_level.decode(token_ids, skip_special_tokens=skip)


def test_endless_bytes_that_are_no_text_stay_cheap_and_exact(byte_level: Tokenizer) -> None:
    decoded_lengths: list[int] = []

    class Watched(Tokenizer):
        def decode(self, ids: Any, *args: Any, **kwargs: Any) -> str:
            decoded_lengths.append(len(ids))
            return super().decode(ids, *args, **kwargs)

    watched = Watched(byte_level.backend_tokenizer)
    (continuation,) = byte_level.convert_tokens_to_ids(["Ģ"])  # the byte 0x80, which begins no character
    assert continuation is not None
    token_stream = FastStream(watched, [], True)
    text = "".join(token_stream.step(continuation) for _ in range(500)) + token_stream.flush()
    assert text == "\ufffd" * 500
    assert max(decoded_lengths) < 100


def test_a_requests_own_stream_interval_goes_before_the_engines(byte_level: Tokenizer, generate: Generate) -> None:
    def sizes(own: int | None, engines: int) -> list[int]:
        params = SamplingParams(output_kind=RequestOutputKind.DELTA, max_tokens=100, stream_interval=own)
        outputs = generate(byte_level, list(range(70, 79)), params, stream_interval=engines)
        return [len(output.outputs[0].token_ids) for output in outputs]

    assert sizes(4, 1) == sizes(None, 4) == [1, 4, 4]
    assert sizes(1, 4) == [1] * 9


@pytest.mark.parametrize("kind", [CUMULATIVE, DELTA])
def test_stream_interval_holds_outputs_back_but_loses_nothing(
    byte_level: Tokenizer, generate: Generate, kind: RequestOutputKind
) -> None:
    token_ids = byte_level.encode("The quick brown fox jumps over the lazy dog", add_special_tokens=False)
    outputs = generate(byte_level, token_ids, SamplingParams(output_kind=kind, max_tokens=100), stream_interval=4)
    counts = [len(output.outputs[0].token_ids) for output in outputs]
    if kind is DELTA:
        assert counts[0] == 1 and set(counts[1:-1]) == {4} and sum(counts) == len(token_ids)
        assert joined(outputs) == byte_level.decode(token_ids, skip_special_tokens=True)
    else:
        assert counts[:3] == [1, 5, 9]
        assert text_of(outputs) == byte_level.decode(token_ids, skip_special_tokens=True)
