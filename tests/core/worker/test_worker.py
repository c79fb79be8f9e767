"""The worker and its executor: sleep and wake, memory, RPC, profiles, and that nothing outlives the executor."""

import gc
import json
import weakref
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from step_driver import StepDriver, make_vllm_config
from tiny_models import build_tiny_model

from corespan.core.attention.torch_backend import TorchAttentionBackend
from corespan.core.dtypes import DType
from corespan.core.executor.uniproc_executor import UniProcExecutor
from corespan.core.runtime import cpu_memory
from corespan.core.worker.worker import Worker

PROMPT = [(5 * i) % 300 for i in range(35)]


def answer(driver: StepDriver, req_id: str) -> list[int]:
    driver.add(req_id, PROMPT)
    driver.run(8)
    return driver.requests[req_id].output


@pytest.mark.parametrize("level", [1, 2])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_after_sleep_and_wake_the_answers_are_the_same(
    make_worker: Callable[..., Worker], level: int, dtype: str
) -> None:
    worker = make_worker(dtype=dtype)
    driver = StepDriver(worker, num_blocks=32)
    before = answer(driver, "before")
    driver.remove("before")
    worker.sleep(level)
    assert worker.is_sleeping()
    worker.wake_up()
    assert not worker.is_sleeping()
    assert answer(driver, "after") == before


def test_sleep_lets_go_of_the_memory_it_promises(make_worker: Callable[..., Worker]) -> None:
    worker = make_worker()
    driver = StepDriver(worker, num_blocks=32)
    answer(driver, "r")
    runtime = worker.runtime
    cache, weights = weakref.ref(runtime.kv_caches[0]), weakref.ref(runtime.weights)
    worker.sleep(1)
    gc.collect()
    assert cache() is None
    assert weights() is runtime.weights
    worker.sleep(2)
    gc.collect()
    assert weights() is None


def test_waking_piece_by_piece_ends_the_sleep_with_the_last(make_worker: Callable[..., Worker]) -> None:
    worker = make_worker()
    driver = StepDriver(worker, num_blocks=32)
    before = answer(driver, "before")
    worker.sleep(2)
    worker.wake_up(["weights"])
    assert worker.is_sleeping()
    worker.wake_up(["kv_cache"])
    assert not worker.is_sleeping()
    assert answer(driver, "after") == before


def test_the_cache_may_wake_before_the_weights(make_worker: Callable[..., Worker]) -> None:
    worker = make_worker()
    driver = StepDriver(worker, num_blocks=32)
    before = answer(driver, "before")
    worker.sleep(2)
    worker.wake_up(["kv_cache"])
    worker.wake_up(["weights"])
    assert answer(driver, "after") == before


def test_unknown_levels_and_tags_are_refused(worker: Worker) -> None:
    with pytest.raises(ValueError, match="level is 3"):
        worker.sleep(3)
    with pytest.raises(ValueError, match="known are kv_cache and weights"):
        worker.wake_up(["scheduling"])


def test_dropping_the_executor_frees_model_and_cache(llama: Any) -> None:
    executor = UniProcExecutor(make_vllm_config(str(llama[0]), llama[1]))
    assert executor.driver_worker is not None
    answer(StepDriver(executor.driver_worker, num_blocks=32), "r")
    runtime = executor.driver_worker.runtime
    alive = [weakref.ref(thing) for thing in (executor, runtime, runtime.weights, runtime.kv_caches[0])]
    del executor, runtime
    gc.collect()
    assert [ref() for ref in alive] == [None] * 4


def test_rpc_calls_methods_by_name_and_functions_with_the_worker(llama: Any) -> None:
    executor = UniProcExecutor(make_vllm_config(str(llama[0]), llama[1]))
    assert executor.collective_rpc("is_sleeping") == [False]
    assert executor.collective_rpc(lambda worker, x, y: (type(worker).__name__, x, y), args=(1,), kwargs={"y": 2}) == [
        ("Worker", 1, 2)
    ]
    for name in ("no_such_method", "vllm_config", "_asleep"):
        with pytest.raises(NotImplementedError, match=name):
            executor.collective_rpc(name)
    executor.shutdown()
    executor.shutdown()
    with pytest.raises(RuntimeError, match="shut down"):
        executor.collective_rpc("is_sleeping")


def test_a_profile_is_written_where_the_prefix_says(
    make_worker: Callable[..., Worker], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    worker = make_worker()
    worker.profile(True, "mine")
    answer(StepDriver(worker, num_blocks=32), "r")
    path = worker.profile(False)
    assert path is not None and Path(path).parent == tmp_path and Path(path).name.startswith("mine-")
    assert json.loads(Path(path).read_text())["traceEvents"]
    with pytest.raises(ValueError, match="not running"):
        worker.profile(False)


def test_block_bytes_are_what_a_block_takes(worker: Worker) -> None:
    worker.initialize_kv_cache(10)
    caches = worker.runtime.kv_caches
    assert worker.kv_block_bytes() * 10 == sum(cache.nbytes for cache in caches)


def test_the_cache_gets_half_of_what_is_free_less_what_a_step_needs(
    worker: Worker, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(cpu_memory, "available_memory", lambda: 10 << 30)
    step = cpu_memory.activation_bytes(worker.runtime.spec, DType.FLOAT32, 4096, 32)
    assert worker.determine_available_memory() == int((10 << 30) * 0.5 * 0.92) - step
    monkeypatch.setattr(cpu_memory, "available_memory", lambda: 1 << 10)
    assert worker.determine_available_memory() == 0


def test_more_query_heads_to_a_kv_head_than_the_kernels_take_are_left_to_torch(tmp_path: Path) -> None:
    build_tiny_model(tmp_path, "llama_with_64_heads_to_one")
    worker = Worker(make_vllm_config(str(tmp_path), json.loads((tmp_path / "config.json").read_text())))
    assert isinstance(worker.runtime.attention[0], TorchAttentionBackend)
    assert len(answer(StepDriver(worker, num_blocks=32), "r")) == 8
