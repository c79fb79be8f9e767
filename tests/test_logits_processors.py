"""A user's logits processor, named to the engine by import path, at work in the core behind each client."""

import os
import subprocess
import sys
from collections.abc import Callable
from importlib.metadata import EntryPoint, EntryPoints
from pathlib import Path
from typing import Any

import pytest
from odd_errors import ODD_ERRORS
from sampler_driver import OnlyMultiplesProcessor

from corespan import SamplingParams
from corespan.core.sampling.logits_processors import (
    AdapterLogitsProcessor,
    AddedRequest,
    BatchUpdate,
    MoveDirectionality,
    process_dict_updates,
)

MULTIPLES = "sampler_driver:OnlyMultiplesProcessor"


def multiples_of(number: int | None) -> SamplingParams:
    extra_args = None if number is None else {"multiple": number}
    return SamplingParams(temperature=0, max_tokens=6, ignore_eos=True, extra_args=extra_args)


def test_a_users_processor_changes_the_requests_that_ask_for_it(make_runner: Callable[..., Any], runner: Any) -> None:
    (expected,) = runner.generate(["one two"], multiples_of(None))

    of_a_path = make_runner(logits_processors=[MULTIPLES])
    outputs = of_a_path.generate(["one two"] * 3, [multiples_of(3), multiples_of(None), multiples_of(5)])

    for output, multiple in ((outputs[0], 3), (outputs[2], 5)):
        ids = output.outputs[0].token_ids
        assert [token_id % (multiple + count) for count, token_id in enumerate(ids)] == [0] * 6
    assert list(outputs[1].outputs[0].token_ids) == list(expected.outputs[0].token_ids)


def test_what_the_processor_refuses_is_refused_at_the_caller_and_harms_no_neighbour(
    make_runner: Callable[..., Any],
) -> None:
    runner = make_runner(logits_processors=[OnlyMultiplesProcessor])
    (alone,) = runner.generate("one two", multiples_of(3))

    def ask_for_what_is_refused() -> None:
        with pytest.raises(ValueError, match="must not be 0"):
            runner.stream("one two", multiples_of(0))

    together = runner.with_neighbour("one two", multiples_of(3), ask_for_what_is_refused)

    assert together.outputs[0].token_ids == alone.outputs[0].token_ids
    assert runner.is_idle()


def test_a_request_that_the_processor_refuses_in_the_core_fails_alone(
    make_runner: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """As one from a client of another make would."""
    accepting = [lambda params: None]
    monkeypatch.setattr("corespan.engine.requests.sampling_resolver._users_validations", lambda paths: accepting)
    runner = make_runner(logits_processors=[MULTIPLES])

    outputs = runner.generate(["one two"] * 2, [multiples_of(0), multiples_of(3)])

    assert [output.outputs[0].finish_reason for output in outputs] == ["error", "length"]


@pytest.mark.parametrize("path", ["no.such.module:Class", "sampler_driver:NoSuchClass", "sampler_driver:Loop"])
def test_a_path_that_leads_to_no_processor_stops_the_start(make_runner: Callable[..., Any], path: str) -> None:
    with pytest.raises(ValueError, match=path):
        make_runner(logits_processors=[path])


class OneToken(AdapterLogitsProcessor):
    """Lets only extra_args["only"] through, where a request has that; "after_prompt": what follows its last token."""

    def is_argmax_invariant(self) -> bool:
        return False

    def new_req_logits_processor(self, params: SamplingParams) -> Any:
        def keep(logits: Any, token_id: int) -> Any:
            kept = logits.new_full(logits.shape, float("-inf"))
            kept[token_id] = logits[token_id]
            return kept

        extra_args = params.extra_args or {}
        if extra_args.get("after_prompt"):
            return lambda prompt, output, logits: keep(logits, prompt[-1] + len(output) + 1)
        if "only" in extra_args:
            return lambda output, logits: keep(logits, extra_args["only"] + len(output))
        return None


def greedy(**extra_args: Any) -> SamplingParams:
    return SamplingParams(temperature=0, max_tokens=3, ignore_eos=True, extra_args=extra_args)


def test_an_adapter_makes_a_function_for_each_request(make_llm: Callable[..., Any]) -> None:
    """Also of a class that another process could not find: with the core in this one there is no need to."""

    class Local(OneToken):
        pass

    llm = make_llm(logits_processors=[Local])
    prompt = {"prompt_token_ids": [5, 6, 7]}

    plain, only, after = llm.generate([prompt] * 3, [greedy(), greedy(only=20), greedy(after_prompt=True)])

    assert list(only.outputs[0].token_ids) == [20, 21, 22]
    assert list(after.outputs[0].token_ids) == [8, 9, 10]
    (alone,) = llm.generate(prompt, greedy())
    assert plain.outputs[0].token_ids == alone.outputs[0].token_ids


def test_a_local_class_reaches_a_core_elsewhere_as_a_pickle_if_that_is_allowed(
    make_llm: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    class Local(OneToken):
        pass

    with pytest.raises(ValueError, match="Local.*VLLM_ALLOW_INSECURE_SERIALIZATION=1"):
        make_llm(multiprocess=True, logits_processors=[Local])
    monkeypatch.setenv("VLLM_ALLOW_INSECURE_SERIALIZATION", "1")
    llm = make_llm(multiprocess=True, logits_processors=[Local])

    (output,) = llm.generate({"prompt_token_ids": [5, 6, 7]}, greedy(only=20))

    assert list(output.outputs[0].token_ids) == [20, 21, 22]


SCRIPT = """
import sys
from clients import SMALL_ENGINE
from corespan import LLM, SamplingParams
from corespan.core.sampling.logits_processors import AdapterLogitsProcessor

class OnlyTwenty(AdapterLogitsProcessor):
    def is_argmax_invariant(self):
        return False

    def new_req_logits_processor(self, params):
        def processor(output_token_ids, logits):
            logits[:20] = float("-inf")
            logits[21:] = float("-inf")
            return logits
        return processor

llm = LLM(sys.argv[1], **SMALL_ENGINE, logits_processors=[OnlyTwenty])
(output,) = llm.generate({"prompt_token_ids": [5, 6, 7]}, SamplingParams(max_tokens=3), use_tqdm=False)
print(output.outputs[0].token_ids)
"""


def test_a_script_uses_its_own_class_in_a_core_elsewhere(tiny_llama_dir: str, tmp_path: Path) -> None:
    """One without a guard: the core runs it, for the class, up to where it builds its engine."""
    script = tmp_path / "script.py"
    script.write_text(SCRIPT)
    support = str(Path(__file__).parent / "support")
    path = os.pathsep.join(filter(None, [support, os.environ.get("PYTHONPATH")]))
    environment = {**os.environ, "PYTHONPATH": path, "VLLM_ENABLE_V1_MULTIPROCESSING": "1"}

    done = subprocess.run([sys.executable, script, tiny_llama_dir], env=environment, capture_output=True, text=True)

    assert done.returncode == 0, done.stderr
    assert done.stdout == "[20, 20, 20]\n"


@pytest.mark.parametrize("group", ["corespan.logits_processors", "vllm.logits_processors"])
def test_installed_packages_bring_processors_along(
    make_llm: Callable[..., Any], monkeypatch: pytest.MonkeyPatch, group: str
) -> None:
    installed = EntryPoints([EntryPoint("multiples", MULTIPLES, group), EntryPoint("other", "no:such", "other.group")])
    monkeypatch.setattr("importlib.metadata.entry_points", lambda: installed)

    llm = make_llm(logits_processors=[OnlyMultiplesProcessor])

    assert llm.model_config.logits_processors == [MULTIPLES]
    (output,) = llm.generate({"prompt_token_ids": [5, 6, 7]}, multiples_of(3))
    assert [token_id % (3 + count) for count, token_id in enumerate(output.outputs[0].token_ids)] == [0] * 6


def test_dict_updates_follow_the_batch() -> None:
    def request(row: int, wanted: int | None) -> AddedRequest:
        return AddedRequest(row, SamplingParams(extra_args={"wanted": wanted}), [1], [])

    def follow(update: BatchUpdate | None) -> bool:
        return process_dict_updates(states, update, lambda params, prompt, output: (params.extra_args or {})["wanted"])

    states: dict[int, int] = {}
    swap, there = MoveDirectionality.SWAP, MoveDirectionality.UNIDIRECTIONAL

    assert follow(BatchUpdate(3, added=[request(0, 10), request(1, None), request(2, 12)]))
    assert states == {0: 10, 2: 12}
    assert not follow(None)
    assert not follow(BatchUpdate(3, removed=[1], added=[request(1, None)]))
    assert follow(BatchUpdate(3, moved=[(0, 1, swap), (2, 0, there)]))
    assert states == {1: 10, 0: 12}
    assert follow(BatchUpdate(2, added=[request(0, None)]))
    assert follow(BatchUpdate(1, removed=[1]))
    assert states == {}


METHODS = ["is_argmax_invariant", "is_active", "update_state", "apply", "result"]
ODD = [name for name in ODD_ERRORS if name != "KeyboardInterrupt"]  # in process, that may be the user's Ctrl-C


def failing(method: str, error: str, **fields: Any) -> SamplingParams:
    extra_args = {"method": method, "error": error}
    return SamplingParams(**{"temperature": 0, "max_tokens": 6, "extra_args": extra_args, "ignore_eos": True} | fields)


def test_whatever_a_processor_raises_ends_the_requests_it_was_to_serve_and_nothing_else(
    make_runner: Callable[..., Any], runner: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also those of the shell's, where a client of another make has let a request through."""
    (expected,) = runner.generate(["one two"], greedy())
    of_a_path = make_runner(logits_processors=["failing_processors:FailingProcessor"])
    with pytest.raises(RuntimeError, match="raised SystemExit"):
        of_a_path.stream("one two", failing("validate_params", "SystemExit"))
    monkeypatch.setattr(of_a_path.engine.input_processor.resolver, "_validate_params", [lambda params: None])
    for method in [*METHODS, "validate_params"]:
        for error in ODD:
            output = of_a_path.stream("one two", failing(method, error))[-1].outputs[0]
            assert output.finish_reason == "error"
            named = "apply raised" if method == "result" else f"FailingProcessor.{method} raised {error}"
            assert named in str(output.stop_reason)
        (after,) = of_a_path.generate(["one two"], greedy())
        assert list(after.outputs[0].token_ids) == list(expected.outputs[0].token_ids)
    assert of_a_path.is_idle()


def test_requests_beside_it_and_all_that_a_failed_update_may_have_missed_end_too(
    make_llm: Callable[..., Any],
) -> None:
    llm = make_llm(logits_processors=["failing_processors:FailingProcessor"], max_num_batched_tokens=64)
    long = {"prompt_token_ids": [5] * 200}  # is computed in chunks, and draws its first token later

    outputs = llm.generate(["one two", "three", long], [greedy(), failing("update_state", "OfTheUsers"), greedy()])

    assert [output.outputs[0].finish_reason for output in outputs] == ["error"] * 3
    for sampled in (greedy(), SamplingParams(max_tokens=3, ignore_eos=True)):
        (after,) = llm.generate("one two", sampled)
        assert after.outputs[0].finish_reason == "length"


@pytest.mark.parametrize("method", ["new_req_logits_processor", "apply"])
def test_what_an_adapters_function_raises_ends_its_own_request_alone(make_llm: Callable[..., Any], method: str) -> None:
    llm = make_llm(logits_processors=["failing_processors:FailingAdapter"])
    (alone,) = llm.generate("one two", greedy())

    outputs = llm.generate(["one two"] * 3, [greedy(), failing(method, "GeneratorExit"), greedy()])

    assert [output.outputs[0].finish_reason for output in outputs] == ["length", "error", "length"]
    assert "FailingAdapter.apply raised GeneratorExit" in str(outputs[1].outputs[0].stop_reason)
    for output in (outputs[0], outputs[2]):
        assert list(output.outputs[0].token_ids) == list(alone.outputs[0].token_ids)
