"""LoRA adapters over every client: whose answer a request gets, what is refused, what stays in memory."""

import os
import re
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from adapters import write_adapter
from clients import SMALL_ENGINE, Runner

from corespan import LoRARequest, SamplingParams

PROMPT = "The quick brown fox"
PARAMS = SamplingParams(temperature=0, max_tokens=12, ignore_eos=True)


@pytest.fixture(scope="module")
def adapters(tmp_path_factory: pytest.TempPathFactory) -> list[LoRARequest]:
    folder = tmp_path_factory.mktemp("adapters")
    return [LoRARequest(f"a{n}", n, write_adapter(folder / str(n), seed=n)) for n in (1, 2, 3)]


@pytest.fixture(scope="module")
def lora_runners(tiny_llama_dir: str) -> Any:
    runners: dict[str, Runner] = {}
    yield runners
    for runner in runners.values():
        runner.shutdown()


@pytest.fixture
def lora_runner(client_kind: Any, lora_runners: dict[str, Runner], tiny_llama_dir: str) -> Runner:
    """Two adapters in a step, three in memory."""
    if client_kind not in lora_runners:
        options = {**SMALL_ENGINE, "enable_lora": True, "max_loras": 2, "max_cpu_loras": 3}
        lora_runners[client_kind] = Runner(client_kind, model=tiny_llama_dir, **options)
    return lora_runners[client_kind]


def answer(runner: Runner, adapter: LoRARequest | None, prompt: str = PROMPT) -> list[int]:
    (output,) = generate(runner, [prompt], [adapter])
    return list(output.outputs[0].token_ids)


def control(runner: Runner, method: str, *args: Any) -> Any:
    """A call of the engine itself: `LLM` has none of these."""
    engine = runner.engine if runner.kind == "async_mp" else runner.engine.llm_engine
    return runner.result_of(getattr(engine, method)(*args))


def generate(runner: Runner, prompts: list[str], adapters: list[LoRARequest | None]) -> list[Any]:
    return runner.generate(prompts, PARAMS, lora_requests=adapters)


def test_each_request_gets_its_own_adapters_answer_alone_and_among_others(
    lora_runner: Runner, adapters: list[LoRARequest]
) -> None:
    alone = [answer(lora_runner, adapter) for adapter in (None, *adapters)]
    assert len(set(map(tuple, alone))) == 4, "the adapters change nothing"

    mixed = generate(lora_runner, [PROMPT] * 8, [None, *adapters] * 2)

    assert [list(output.outputs[0].token_ids) for output in mixed] == alone * 2
    assert [output.lora_request for output in mixed] == [None, *adapters] * 2
    assert mixed[1].outputs[0].lora_request == adapters[0]


def test_adapters_come_and_go(lora_runner: Runner, adapters: list[LoRARequest], tmp_path: Path) -> None:
    for known in control(lora_runner, "list_loras"):
        control(lora_runner, "remove_lora", known)
    for adapter in adapters:
        assert control(lora_runner, "add_lora", adapter) is True
    assert control(lora_runner, "list_loras") == {1, 2, 3}
    assert control(lora_runner, "pin_lora", 1) is True

    fourth = LoRARequest("a4", 4, write_adapter(tmp_path, seed=4))
    control(lora_runner, "add_lora", fourth)
    assert control(lora_runner, "list_loras") == {1, 3, 4}, "the oldest that is not pinned makes room"

    assert answer(lora_runner, adapters[1]), "what was dropped is read again"
    assert control(lora_runner, "list_loras") == {1, 2, 4}
    assert control(lora_runner, "remove_lora", 1) is True
    assert control(lora_runner, "remove_lora", 1) is False
    with pytest.raises(ValueError, match="pinning failed: no adapter with lora_int_id 1"):
        control(lora_runner, "pin_lora", 1)


def test_new_weights_under_an_old_name_meet_no_old_blocks(lora_runner: Runner, tmp_path: Path) -> None:
    prompt = PROMPT * 8  # whole blocks of it
    adapter = LoRARequest("changing", 9, write_adapter(tmp_path, seed=9))
    first = answer(lora_runner, adapter, prompt)
    write_adapter(tmp_path, seed=10)
    assert answer(lora_runner, adapter, prompt) == first, "it is in memory"

    reloaded = LoRARequest("changing", 9, str(tmp_path), load_inplace=True)
    second = answer(lora_runner, reloaded, prompt)
    assert second != first
    lora_runner.call("reset_prefix_cache")
    assert answer(lora_runner, adapter, prompt) == second


def test_files_that_change_behind_the_engine_end_the_request_alone(
    lora_runner: Runner, adapters: list[LoRARequest], tmp_path: Path
) -> None:
    adapter = LoRARequest("changed", 8, write_adapter(tmp_path, seed=8))
    answer(lora_runner, adapter)
    for other in adapters:
        control(lora_runner, "add_lora", other)
    write_adapter(tmp_path, seed=18)

    failed, good = generate(lora_runner, [PROMPT] * 2, [adapter, adapters[2]])

    assert failed.outputs[0].finish_reason == "error"
    assert "have changed since it was added" in failed.outputs[0].stop_reason
    assert good.outputs[0].finish_reason == "length"


def _damage(folder: Path, case: str) -> None:
    if case == "no_config":
        (folder / "adapter_config.json").unlink()
    elif case == "no_weights":
        (folder / "adapter_model.safetensors").unlink()
    elif case == "cut_short":
        path = folder / "adapter_model.safetensors"
        path.write_bytes(path.read_bytes()[:-100])
    elif case == "bad_json":
        (folder / "adapter_config.json").write_text("{")


REFUSALS: dict[str, tuple[dict[str, Any], str]] = {
    "no_config": ({}, "lacks adapter_config.json"),
    "no_weights": ({}, "lacks adapter_model.safetensors"),
    "cut_short": ({}, "truncated or damaged"),
    "bad_json": ({}, "is not valid JSON"),
    "dora": ({"use_dora": True}, "DoRA"),
    "whole modules": ({"modules_to_save": ["lm_head"]}, "modules_to_save"),
    "bias": ({"bias": "all"}, "biases"),
    "high rank": ({"rank": 24}, "rank 24; max_lora_rank is 16: raise it"),
    "pissa": ({"init_lora_weights": "pissa"}, "changed base weights"),
}


@pytest.mark.parametrize("case", REFUSALS)
@pytest.mark.parametrize("client_kind", ["inproc"], indirect=True)
def test_what_cannot_be_applied_is_refused_by_name(lora_runner: Runner, tmp_path: Path, case: str) -> None:
    config, message = REFUSALS[case]
    folder = write_adapter(tmp_path, **config)
    _damage(tmp_path, case)

    with pytest.raises(ValueError, match=message):
        control(lora_runner, "add_lora", LoRARequest("bad", 20, folder))

    assert 20 not in control(lora_runner, "list_loras")


def test_a_bad_adapter_is_refused_at_the_caller_and_hurts_nobody(lora_runner: Runner, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="adapter 'gone' cannot be loaded: .*nowhere does not exist"):
        answer(lora_runner, LoRARequest("gone", 21, str(tmp_path / "nowhere")))
    with pytest.raises(TypeError, match="lora_request"):
        answer(lora_runner, {"lora_name": "a"})  # type: ignore[arg-type]
    assert answer(lora_runner, None)


def test_a_request_for_an_adapter_is_refused_where_there_are_none(runner: Runner) -> None:
    with pytest.raises(ValueError, match="enable_lora=True"):
        answer(runner, LoRARequest("a", 1, "/a"))


@pytest.mark.parametrize("client_kind", ["inproc"], indirect=True)
def test_beams_and_several_answers_have_the_adapter(lora_runner: Runner, adapters: list[LoRARequest]) -> None:
    from corespan import BeamSearchParams

    llm = lora_runner.llm
    beams = llm.beam_search([PROMPT] * 2, BeamSearchParams(beam_width=1, max_tokens=6), [adapters[0], None])
    num_prompt = len(beams[0].sequences[0].tokens) - 6
    for adapter, found in zip([adapters[0], None], beams, strict=True):
        assert found.sequences[0].tokens[num_prompt:] == answer(lora_runner, adapter)[:6]
    params = SamplingParams(n=2, temperature=1, seed=3, max_tokens=6, ignore_eos=True)
    first = llm.generate(PROMPT, params, use_tqdm=False, lora_request=adapters[0])[0]
    other = llm.generate(PROMPT, params, use_tqdm=False, lora_request=adapters[1])[0]
    assert [each.token_ids for each in first.outputs] != [each.token_ids for each in other.outputs]
    with pytest.raises(ValueError, match="lora_request has 1 entries for 2 prompts"):
        llm.generate([PROMPT] * 2, params, use_tqdm=False, lora_request=[None])


@pytest.mark.parametrize("client_kind", ["inproc"], indirect=True)
def test_sleeping_engines_keep_their_adapters(lora_runner: Runner, adapters: list[LoRARequest]) -> None:
    before = answer(lora_runner, adapters[0])
    lora_runner.llm.sleep(2)
    lora_runner.llm.wake_up()
    assert answer(lora_runner, adapters[0]) == before


@pytest.mark.parametrize("client_kind", ["inproc"], indirect=True)
def test_preempted_requests_go_on_with_their_adapter(
    lora_runner: Runner, make_llm: Callable[..., Any], adapters: list[LoRARequest]
) -> None:
    small = make_llm(enable_lora=True, max_loras=3, num_gpu_blocks_override=5, max_model_len=64, max_num_seqs=4)
    params = SamplingParams(temperature=0, max_tokens=40, ignore_eos=True)
    expected = [lora_runner.llm.generate(PROMPT, params, use_tqdm=False, lora_request=each)[0] for each in adapters]
    got = small.generate([PROMPT] * 3, params, use_tqdm=False, lora_request=adapters)
    assert [each.outputs[0].token_ids for each in got] == [each.outputs[0].token_ids for each in expected]


@pytest.mark.parametrize("options", [{"max_lora_rank": 0}, {"max_lora_rank": 513}, {"lora_dtype": "float16"}], ids=str)
def test_options_are_checked_by_name(tiny_llama_dir: str, options: dict[str, Any]) -> None:
    from corespan import EngineArgs

    with pytest.raises(ValueError, match=next(iter(options))):
        EngineArgs(model=tiny_llama_dir, enable_lora=True, **options).create_engine_config()
    with pytest.raises(ValueError, match=r"max_cpu_loras \(1\) must be at least max_loras \(2\)"):
        EngineArgs(model=tiny_llama_dir, enable_lora=True, max_loras=2, max_cpu_loras=1).create_engine_config()


@pytest.mark.parametrize(
    ("field", "values"), [("lora_int_id", ("a", 0, "/a")), ("lora_path", ("a", 1)), ("lora_name", ("", 1, "/a"))]
)
def test_a_request_for_an_adapter_is_checked(field: str, values: tuple[Any, ...]) -> None:
    with pytest.raises(ValueError, match=field):
        LoRARequest(*values)
    assert LoRARequest("a", 1, "/a") == LoRARequest("a", 2, "/b")


@pytest.mark.parametrize("client_kind", ["sync_mp"], indirect=True)
def test_a_new_core_goes_on_with_the_adapters_of_the_one_that_died(
    make_runner: Callable[..., Runner], adapters: list[LoRARequest], tmp_path: Path
) -> None:
    runner = make_runner(enable_lora=True, max_loras=3, engine_restart=3)
    params = SamplingParams(temperature=0, max_tokens=60, ignore_eos=True)
    gone = LoRARequest("gone", 30, write_adapter(tmp_path / "gone", seed=30))
    engine = runner.llm.llm_engine
    expected = runner.generate([PROMPT] * 2, params, lora_requests=[adapters[0], None])
    for adapter in (adapters[0], gone):
        engine.add_lora(adapter)
    engine.pin_lora(1)
    for number, adapter in enumerate((adapters[0], None, gone)):
        engine.add_request(str(number), PROMPT, params, lora_request=adapter)
    engine.step()
    (tmp_path / "gone" / "adapter_config.json").unlink()
    os.kill(engine.engine_core._connection.current.process.ready.pid, signal.SIGKILL)

    finished = {}
    while engine.has_unfinished_requests():
        finished.update({output.request_id: output for output in engine.step() if output.finished})

    for number in (0, 1):
        assert finished[str(number)].outputs[0].token_ids == expected[number].outputs[0].token_ids
    assert finished["2"].outputs[0].finish_reason == "error"
    assert "lacks adapter_config.json" in finished["2"].outputs[0].stop_reason
    assert engine.list_loras() == {1}
    for other in (2, 3, 4):
        engine.add_lora(LoRARequest(str(other), other, adapters[1].lora_path))
    assert engine.list_loras() == {1, 3, 4}, "the pinned one is pinned again"


@pytest.mark.parametrize("client_kind", ["inproc"], indirect=True)
def test_the_metrics_name_the_adapters_of_requests(
    make_runner: Callable[..., Runner], adapters: list[LoRARequest]
) -> None:
    engine = make_runner(enable_lora=True, disable_log_stats=False).llm.llm_engine
    for number, adapter in enumerate(adapters[:2]):
        engine.add_request(str(number), PROMPT, PARAMS, lora_request=adapter)
    while not engine.step():
        pass
    engine.step()
    (info,) = [each for each in engine.get_metrics() if each.name == "vllm:lora_requests_info"]
    assert info.labels == {"max_lora": "1", "waiting_lora_adapters": "a2", "running_lora_adapters": "a1"}
    engine.abort_request(["0", "1"])


@pytest.mark.parametrize("client_kind", ["inproc"], indirect=True)
def test_a_newcomer_is_refused_where_all_are_pinned(
    make_runner: Callable[..., Runner], adapters: list[LoRARequest]
) -> None:
    runner = make_runner(enable_lora=True)
    control(runner, "add_lora", adapters[0])
    control(runner, "pin_lora", 1)
    with pytest.raises(ValueError, match="adapter 'a2' has no room: all of max_cpu_loras=1 adapters are pinned"):
        answer(runner, adapters[1])
    with pytest.raises(ValueError, match="lora_int_id 1 of adapter 'a2' is that of 'a1'"):
        answer(runner, LoRARequest("a2", 1, adapters[1].lora_path))
    assert answer(runner, adapters[0]) != answer(runner, None)


def test_the_pages_example_runs(
    tiny_llama_dir: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any
) -> None:
    page = (Path(__file__).parent.parent / "docs" / "lora.md").read_text(encoding="utf-8")
    example = re.findall(r"```python\n(.*?)```", page, re.DOTALL)[0]
    for seed, name in enumerate(("polite", "terse")):
        write_adapter(tmp_path / "adapters" / name, seed=seed)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("VLLM_ENABLE_V1_MULTIPROCESSING", "0")

    exec(compile(example.replace("smollm2-135m", tiny_llama_dir), "example", "exec"), {})

    names = [line.split(" -> ")[0] for line in capsys.readouterr().out.splitlines() if " -> " in line]
    assert names == ["polite", "terse", "the model as it is"]
