"""The engine controls, on `LLM`, `LLMEngine` and `AsyncLLM` alike, around a real model."""

import asyncio
import ctypes
import gc
import inspect
import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from clients import ATTEMPTS, Runner
from deadlines import DEADLINE
from tiny_llama import build_tiny_llama

from corespan import LLM, AsyncLLM, RequestOutput, RequestOutputKind, SamplingParams
from corespan.engine.llm_engine import LLMEngine

NUM_BLOCKS = 129
PROMPT_LENGTH = 512
KV_BYTES = 128 * 16 * 2 * 2 * 8 * 128 * 4  # tokens, layers, keys and values, heads, head size, bytes
WEIGHT_BYTES = 2 * 65536 * 128 * 4  # embedding and head, vocabulary, hidden size, bytes
MOST = 0.5  # of some memory, of which the allocator may keep or reuse a part

FACES = [("inproc", LLM), ("sync_mp", LLMEngine), ("async_mp", AsyncLLM), ("inproc", LLMEngine), ("sync_mp", LLM)]
FEW_FACES = pytest.mark.parametrize("face", FACES[:3], indirect=True, ids=lambda face: f"{face[1].__name__}-{face[0]}")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model whose cache and vocabulary take memory enough to be measured."""
    return build_tiny_llama(
        tmp_path_factory.mktemp("wide"),
        vocab_size=65536,
        hidden_size=128,
        num_key_value_heads=8,
        head_dim=128,
        num_attention_heads=8,
    )


@pytest.fixture(scope="module")
def traces(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("engine") / "traces"


@pytest.fixture(scope="module")
def runners(folder: Path, traces: Path) -> Iterator[dict[str, Runner]]:
    """One engine a client, each made when it is first asked for."""
    runners: dict[str, Runner] = {}
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("VLLM_ALLOW_INSECURE_SERIALIZATION", "1")
        patch.setenv("VLLM_TORCH_PROFILER_DIR", str(traces))
        yield runners
        for runner in runners.values():
            runner.shutdown()


class Face:
    """One of the engines' classes over one of the clients."""

    def __init__(self, runner: Runner, engine: Any) -> None:
        self.runner = runner
        self.engine = engine

    def call(self, method: str, *args: Any, **kwargs: Any) -> Any:
        result = getattr(self.engine, method)(*args, **kwargs)
        return self.runner._loop.run(result) if asyncio.iscoroutine(result) else result

    def generate(self, num_prompts: int = 1) -> list[list[int]]:
        """Greedy tokens of prompts that together fill the whole cache when there are four of them."""
        prompts = [[4 + (7 * i + n) % 500 for i in range(PROMPT_LENGTH - 4)] for n in range(num_prompts)]
        params = SamplingParams(temperature=0, max_tokens=4, ignore_eos=True)
        outputs = self.runner.generate([{"prompt_token_ids": prompt} for prompt in prompts], params)
        return [list(output.outputs[0].token_ids) for output in outputs]

    def start(self, prompts: list[Any], params: SamplingParams) -> Callable[[], list[RequestOutput]]:
        """Queues requests; the result waits for their final outputs."""
        if not isinstance(self.engine, AsyncLLM):
            self.runner.llm.enqueue(prompts, params, use_tqdm=False)
            return lambda: self.runner.llm.wait_for_completion(use_tqdm=False)
        params = params.clone()
        params.output_kind = RequestOutputKind.FINAL_ONLY
        collectors = [self.call("add_request", f"own-{n}", prompt, params) for n, prompt in enumerate(prompts)]
        return lambda: [self.runner._loop.run(collector.get()) for collector in collectors]

    def memory(self) -> int:
        """Bytes that the core's process has in memory, those of files left out, which the system drops as it likes."""
        (rss,) = self.call("collective_rpc", resident_bytes)
        return int(rss)


def resident_bytes(worker: Any) -> int:
    gc.collect()
    ctypes.CDLL(None).malloc_trim(0)
    status = dict(line.split(":") for line in Path("/proc/self/status").read_text().splitlines())
    return int(status["RssAnon"].removesuffix("kB")) * 1024


def what_is_there(worker: Any) -> list[bool]:
    return [worker.runtime.weights is not None, bool(worker.runtime.kv_caches)]


@pytest.fixture(params=FACES, ids=lambda face: f"{face[1].__name__}-{face[0]}")
def face(request: pytest.FixtureRequest, runners: dict[str, Runner], folder: Path) -> Face:
    kind, engine_class = request.param
    if kind not in runners:
        runners[kind] = Runner(
            kind,
            model=str(folder),
            max_model_len=PROMPT_LENGTH,
            max_num_seqs=4,
            num_gpu_blocks_override=NUM_BLOCKS,
        )
    runner = runners[kind]
    return Face(runner, runner.llm.llm_engine if engine_class is LLMEngine else runner.engine)


def test_sleep_of_level_1_gives_the_caches_memory_back_until_waking(face: Face) -> None:
    tokens = face.generate(4)
    awake = face.memory()

    face.call("sleep", level=1)
    asleep = face.memory()
    assert face.call("is_sleeping")
    face.call("wake_up")

    assert awake - asleep > MOST * KV_BYTES
    assert not face.call("is_sleeping")
    assert face.generate(4) == tokens
    assert face.memory() - asleep > MOST * KV_BYTES


def test_sleep_of_level_2_drops_the_weights_too_and_reads_them_again(face: Face) -> None:
    tokens = face.generate(4)
    awake = face.memory()

    face.call("sleep", level=2, mode="keep")
    asleep = face.memory()
    with pytest.raises(RuntimeError, match="asleep"):
        face.call("apply_model", lambda model: None)
    face.call("wake_up", tags=["weights"])
    assert face.call("collective_rpc", what_is_there) == [[True, False]]
    assert face.call("is_sleeping")
    face.call("wake_up", tags=["kv_cache"])
    assert face.call("collective_rpc", what_is_there) == [[True, True]]

    assert awake - asleep > MOST * (KV_BYTES + WEIGHT_BYTES)
    assert not face.call("is_sleeping")
    assert face.generate(4) == tokens
    assert face.memory() - asleep > MOST * (KV_BYTES + WEIGHT_BYTES)


@FEW_FACES
def test_sleeping_again_and_again_takes_no_more_memory(face: Face) -> None:
    face.generate(4)
    before = face.memory()
    for level in (1, 2, 1, 2):
        face.call("sleep", level)
        face.call("wake_up")
        face.generate(4)
    assert face.memory() - before < KV_BYTES + WEIGHT_BYTES / 2


@FEW_FACES
def test_weights_that_are_gone_when_they_are_wanted_leave_the_engine_asleep(face: Face, folder: Path) -> None:
    tokens = face.generate()
    weights, away = folder / "model.safetensors", folder / "away"
    face.call("sleep", 2)
    weights.rename(away)
    try:
        with pytest.raises(FileNotFoundError, match="safetensors"):
            face.call("wake_up")
        assert face.call("is_sleeping")
    finally:
        away.rename(weights)
    face.call("wake_up")
    assert face.generate() == tokens


@FEW_FACES
@pytest.mark.parametrize(
    ("control", "mode", "reason"),
    [
        ("pause_generation", "abort", "abort"),
        ("pause_generation", "wait", "length"),
        ("pause_generation", "keep", "length"),
        ("sleep", "abort", "abort"),
        ("sleep", "keep", "length"),
    ],
)
def test_pausing_and_sleeping_treat_what_is_in_flight_as_their_mode_says(
    face: Face, control: str, mode: str, reason: str
) -> None:
    params = SamplingParams(temperature=0, max_tokens=40, ignore_eos=True)
    (alone,) = face.runner.generate({"prompt_token_ids": [5, 6, 7]}, params)
    if reason == "abort":
        params.max_tokens = 200

    def halt() -> None:
        face.call(control, mode=mode)
        assert face.call("is_paused") and face.call("is_sleeping")
        face.call("resume_generation" if control == "pause_generation" else "wake_up")
        assert not face.call("is_paused") and not face.call("is_sleeping")

    for _ in range(ATTEMPTS):
        output = face.runner.with_neighbour({"prompt_token_ids": [5, 6, 7]}, params, halt).outputs[0]
        if reason == "length" or output.finish_reason != "length":  # else it ended before it was aborted
            break

    assert output.finish_reason == reason
    assert list(output.token_ids)[:40] == list(alone.outputs[0].token_ids)[: len(output.token_ids)]
    assert face.runner.is_idle()


@FEW_FACES
def test_a_profile_is_written_to_the_folder_for_it(face: Face, traces: Path) -> None:
    assert face.call("start_profile", "mine") in ([None], None)
    face.generate()
    (path,) = face.call("stop_profile")

    assert Path(path).parent == traces and Path(path).name.startswith("mine-")
    names = {event.get("name", "") for event in json.loads(Path(path).read_text())["traceEvents"]}
    assert any("execute" in name for name in names)


@FEW_FACES
@pytest.mark.parametrize("prefix", ["../mine", "a/../../mine", "/tmp/mine", "link/mine"])
def test_a_profile_that_would_leave_its_folder_is_refused_before_it_starts(
    face: Face, traces: Path, tmp_path: Path, prefix: str
) -> None:
    traces.mkdir(exist_ok=True)
    if prefix.startswith("link") and not (traces / "link").is_symlink():
        (traces / "link").symlink_to(tmp_path)
    for start in (lambda: face.call("start_profile", prefix), lambda: rpc(face, "profile", True, prefix)):
        with pytest.raises(ValueError, match="profile_prefix must be a name within"):
            start()
    with pytest.raises(ValueError, match="not running"):
        face.call("stop_profile")


def rpc(face: Face, method: str, *args: object) -> Any:
    return face.call("collective_rpc", method, None, args)


@FEW_FACES
@pytest.mark.parametrize(
    "method", ["sleep", "wake_up", "execute_model", "initialize_kv_cache", "__init__", "_next_trace_path", "rank"]
)
def test_workers_methods_that_would_change_them_behind_the_cores_back_are_no_clients(face: Face, method: str) -> None:
    with pytest.raises(NotImplementedError, match=f"{method}.* may call; there are apply_model, "):
        rpc(face, method)


def test_workers_are_reached_by_name_and_by_function(face: Face) -> None:
    assert face.call("collective_rpc", "is_sleeping") == [False]
    assert face.call("collective_rpc", lambda worker, a, b: [type(worker).__name__, a, b], None, (1,), {"b": 2}) == [
        ["Worker", 1, 2]
    ]
    assert face.call("apply_model", lambda model: model.spec.vocab_size) == [65536]
    assert face.call("collective_rpc", lambda worker: worker.rank) == [0]
    assert face.call("collective_rpc", "reload_weights") == [None]


def test_the_tasks_are_known_and_the_cache_can_be_emptied(face: Face) -> None:
    assert list(face.call("get_supported_tasks")) == ["generate"]
    assert face.call("reset_prefix_cache") is True
    assert face.call("reset_prefix_cache", reset_running_requests=True) is True
    assert face.call("reset_mm_cache") is None


def mapped_files(worker: Any) -> list[str]:
    lines = Path("/proc/self/maps").read_text().splitlines()
    return [line.split(maxsplit=5)[5] for line in lines if len(line.split(maxsplit=5)) == 6]


@FEW_FACES
def test_no_memory_is_shared_that_could_be_left_behind(face: Face) -> None:
    (mapped,) = face.call("collective_rpc", mapped_files)
    names = ("/dev/shm", "/SYSV", "/memfd")
    assert mapped
    files = [name for name in mapped + mapped_files(None) if not name.endswith(" (deleted)")]
    assert [name for name in files if name.startswith(names)] == []


@FEW_FACES
def test_draining_brings_everything_to_its_end_and_keeps_the_outputs(face: Face) -> None:
    params = SamplingParams(temperature=0, max_tokens=5, ignore_eos=True)
    prompts = [{"prompt_token_ids": [5, 6, 7 + n]} for n in range(3)]
    expected = [output.outputs[0].token_ids for output in face.runner.generate(prompts, params)]
    take = face.start(prompts, params)
    face.call("wait_for_requests_to_drain", DEADLINE)
    assert list(face.runner.utility("get_request_counts")) == [0, 0]
    assert [output.outputs[0].token_ids for output in take()] == expected


@FEW_FACES
def test_draining_gives_up_on_what_is_paused(face: Face) -> None:
    params = SamplingParams(temperature=0, max_tokens=5, ignore_eos=True)
    face.call("pause_generation", "keep")
    take = face.start([{"prompt_token_ids": [5, 6, 7]}], params)
    with pytest.raises(TimeoutError, match="1 requests"):
        face.call("wait_for_requests_to_drain", 0.05)
    face.call("resume_generation")
    assert [len(output.outputs[0].token_ids) for output in take()] == [5]


CONTROLS = {
    "sleep": ["level", "mode"],
    "wake_up": ["tags"],
    "is_sleeping": [],
    "pause_generation": ["mode", "clear_cache"],
    "resume_generation": [],
    "is_paused": [],
    "reset_prefix_cache": ["reset_running_requests"],
    "reset_mm_cache": [],
    "start_profile": ["profile_prefix"],
    "stop_profile": [],
    "collective_rpc": ["method", "timeout", "args", "kwargs"],
    "apply_model": ["func"],
    "get_supported_tasks": [],
    "wait_for_requests_to_drain": ["drain_timeout"],
}


@pytest.mark.parametrize("engine_class", [LLM, LLMEngine, AsyncLLM])
def test_every_control_is_there_with_the_usual_parameters(engine_class: type) -> None:
    for name, parameters in CONTROLS.items():
        assert list(inspect.signature(getattr(engine_class, name)).parameters) == ["self", *parameters]
