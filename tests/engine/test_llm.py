"""`LLM`: batches, chats, queues, defaults, progress and what stays behind when something goes wrong."""

import functools
from collections.abc import Iterable
from typing import Any

import pytest
from prompts import PROMPTS, greedy

from corespan import LLM, EngineArgs, EngineDeadError, SamplingParams


@pytest.fixture(scope="module")
def llm(tiny_llama_dir: str) -> Iterable[LLM]:
    from clients import SMALL_ENGINE, multiprocessing_flag

    with multiprocessing_flag(False):
        llm = LLM(tiny_llama_dir, **SMALL_ENGINE)
    yield llm
    llm.shutdown()


def test_outputs_come_in_the_order_of_the_prompts_whatever_ends_first(llm: LLM) -> None:
    outputs = llm.generate(PROMPTS, [greedy(9), greedy(2), greedy(5)], use_tqdm=False)

    assert [output.prompt for output in outputs] == PROMPTS
    assert [len(output.outputs[0].token_ids) for output in outputs] == [9, 2, 5]


@pytest.mark.parametrize(
    ("prompts", "count"),
    [
        ("one two", 1),
        ([0, 323, 444], 1),
        ({"prompt": "one two"}, 1),
        ({"prompt_token_ids": [0, 323, 444]}, 1),
        ([[0, 323, 444], "one two", {"prompt": "one two"}], 3),
        (("one two", "one two"), 2),
    ],
)
def test_every_form_of_prompt_gives_the_same_tokens(llm: LLM, prompts: Any, count: int) -> None:
    (expected,) = llm.generate("one two", greedy(), use_tqdm=False)

    outputs = llm.generate(prompts, greedy(), use_tqdm=False)

    assert [output.outputs[0].token_ids for output in outputs] == [expected.outputs[0].token_ids] * count


def test_no_prompts_give_no_outputs(llm: LLM) -> None:
    assert llm.generate([], greedy(), use_tqdm=False) == []


def test_the_callers_params_stay_as_they_were(llm: LLM) -> None:
    params = greedy(3)
    before = params.clone()

    llm.generate(PROMPTS, params, use_tqdm=False)

    assert params == before


@pytest.mark.parametrize(
    ("arguments", "error", "message"),
    [
        ({"sampling_params": [greedy()] * 2}, ValueError, "2 entries for 3"),
        ({"priority": [1]}, ValueError, "1 entries for 3"),
        ({"sampling_params": {"temperature": 0}}, TypeError, "SamplingParams"),
        ({"sampling_params": [None] * 3}, TypeError, "SamplingParams"),
        ({"priority": "high"}, TypeError, "priority"),
    ],
)
def test_arguments_that_fit_no_prompt_are_refused(llm: LLM, arguments: Any, error: type, message: str) -> None:
    with pytest.raises(error, match=message):
        llm.generate(PROMPTS, **{"sampling_params": greedy(), "use_tqdm": False, **arguments})

    assert llm.llm_engine.get_num_unfinished_requests() == 0


def test_enqueued_chats_are_answered_as_chats_are_beside_enqueued_prompts(llm: LLM) -> None:
    chats = [[{"role": "user", "content": text}] for text in PROMPTS[:2]]
    options: dict[str, Any] = {"use_tqdm": False, "chat_template": "{{ messages[0]['content'] }}!"}
    expected = llm.chat(chats, greedy(), **options)

    ids = llm.enqueue_chat(chats, [greedy(), greedy(3)], priority=[1, 0], **options)
    ids += llm.enqueue(PROMPTS[2], greedy(2), use_tqdm=False)
    ids += llm.enqueue_chat(chats[0], greedy(), use_tqdm=False)
    *outputs, with_own_template = llm.wait_for_completion(use_tqdm=False)

    assert len(set(ids)) == 4
    assert [output.prompt for output in outputs] == [PROMPTS[0] + "!", PROMPTS[1] + "!", PROMPTS[2]]
    assert [output.prompt_token_ids for output in outputs[:2]] == [output.prompt_token_ids for output in expected]
    first, second = (output.outputs[0].token_ids for output in expected)
    assert [output.outputs[0].token_ids for output in outputs[:2]] == [first, second[:3]]
    (own,) = llm.chat(chats[0], greedy(), use_tqdm=False)
    assert with_own_template.outputs[0].token_ids == own.outputs[0].token_ids


def test_the_models_generation_config_is_the_default_and_explicit_params_win(
    make_llm: Any, tmp_path: Any, tiny_llama_dir: str
) -> None:
    import shutil

    from tiny_llama import write_generation_config

    folder = tmp_path / "with_defaults"
    shutil.copytree(tiny_llama_dir, folder)
    write_generation_config(folder, repetition_penalty=1.3, top_k=5, temperature=0.7, max_new_tokens=9)

    llm = make_llm(model=str(folder))
    ignoring = make_llm(model=str(folder), generation_config="vllm")
    overriding = make_llm(model=str(folder), override_generation_config={"top_k": 7})

    expected = SamplingParams(repetition_penalty=1.3, top_k=5, temperature=0.7, max_tokens=9)
    assert llm.get_default_sampling_params() == expected
    assert ignoring.get_default_sampling_params() == SamplingParams()
    assert overriding.get_default_sampling_params().top_k == 7
    assert len(llm.generate("hi", use_tqdm=False)[0].outputs[0].token_ids) <= 9
    seeded = SamplingParams(seed=1, max_tokens=12)
    assert (
        llm.generate("hi", seeded, use_tqdm=False)[0].outputs[0].token_ids
        == ignoring.generate("hi", seeded, use_tqdm=False)[0].outputs[0].token_ids
    )


def test_progress_bars_count_prompts_and_show_rates_while_they_run(llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("corespan.engine.progress.REFRESH_INTERVAL", 0.0)
    bars: list[Any] = []
    shown: list[str] = []

    class Bar:
        def __init__(self, items: Iterable[Any] = (), *, total: int, desc: str, **_: Any) -> None:
            self.items, self.total, self.desc, self.count, self.postfix = items, total, desc, 0, ""
            bars.append(self)

        def __iter__(self) -> Any:
            return iter(self.items)

        def update(self, count: int) -> None:
            self.count += count

        def refresh(self) -> None:
            shown.append(self.postfix)

        def close(self) -> None:
            self.closed = True

    llm.generate(PROMPTS, greedy(9), use_tqdm=Bar)

    adding, processed = bars
    assert (adding.total, processed.total, processed.count) == (3, 3, 3)
    assert len(shown) == 9
    assert all("input: " in postfix and "output: " in postfix for postfix in (*shown, processed.postfix))
    assert processed.closed


@pytest.mark.parametrize("wrong", ["no", 5])
def test_what_makes_no_progress_bar_is_refused_and_leaves_nothing_queued(llm: LLM, wrong: Any) -> None:
    llm.enqueue(PROMPTS[0], greedy(300), use_tqdm=False)
    for call in (llm.wait_for_completion, functools.partial(llm.generate, PROMPTS[1], greedy())):
        with pytest.raises(TypeError, match="^use_tqdm must be True, False or what makes a bar, got "):
            call(use_tqdm=wrong)

    assert not llm.llm_engine.has_unfinished_requests()
    assert llm.wait_for_completion(use_tqdm=False) == []


def test_an_asleep_engine_says_so_and_goes_on_after_waking(llm: LLM) -> None:
    (expected,) = llm.generate(PROMPTS[0], greedy(), use_tqdm=False)

    llm.sleep(1)
    llm.enqueue(PROMPTS[0], greedy(), use_tqdm=False)
    with pytest.raises(RuntimeError, match="wake_up"):
        llm.generate(PROMPTS[1], greedy(), use_tqdm=False)
    llm.wake_up()

    (output,) = llm.wait_for_completion(use_tqdm=False)
    assert output.outputs[0].token_ids == expected.outputs[0].token_ids
    assert output.num_cached_tokens == 0


@pytest.mark.parametrize("multiprocess", [False, True])
def test_sleeping_with_abort_hands_out_the_aborted_outputs(make_llm: Any, multiprocess: bool) -> None:
    llm = make_llm(multiprocess=multiprocess)
    llm.pause_generation("keep")  # lest they end by themselves
    llm.enqueue(PROMPTS, greedy(300), use_tqdm=False)

    llm.sleep(1, mode="abort")

    outputs = llm.wait_for_completion(use_tqdm=False)
    assert [output.outputs[0].finish_reason for output in outputs] == ["abort"] * 3
    assert not llm.llm_engine.has_unfinished_requests()


def test_metrics_need_statistics(llm: LLM) -> None:
    with pytest.raises(RuntimeError, match="disable_log_stats"):
        llm.get_metrics()


def test_from_engine_args_builds_the_same_engine(tiny_llama_dir: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("VLLM_ENABLE_V1_MULTIPROCESSING", "0")

    with LLM.from_engine_args(EngineArgs(model=tiny_llama_dir, max_model_len=128)) as llm:
        assert llm.model_config.max_model_len == 128

    with pytest.raises(EngineDeadError):
        llm.generate("hi", greedy(), use_tqdm=False)


def test_an_engine_on_token_ids_alone_takes_and_gives_no_text(make_llm: Any) -> None:
    llm = make_llm(skip_tokenizer_init=True)

    (output,) = llm.generate([5, 6, 7], greedy(4, detokenize=False), use_tqdm=False)

    assert (len(output.outputs[0].token_ids), output.outputs[0].text) == (4, "")
    with pytest.raises(ValueError, match="tokenizer"):
        llm.generate("text", greedy(), use_tqdm=False)
    with pytest.raises(ValueError, match="tokenizer"):
        llm.get_tokenizer()


def test_the_engines_sizes_are_told(llm: LLM) -> None:
    assert llm.model_config.get_vocab_size() == llm.model_config.vocab_size
    assert llm.get_world_size() == llm.llm_engine.vllm_config.parallel_config.world_size == 1
