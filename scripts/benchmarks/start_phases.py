"""One start with the core in this process, its parts measured one after another. `bench_start.py` runs it."""

import time

entered = time.time()

import functools  # noqa: E402 - what is imported when is measured
import importlib  # noqa: E402
import json  # noqa: E402
import os  # noqa: E402
import sys  # noqa: E402
from collections.abc import Callable  # noqa: E402
from typing import Any  # noqa: E402

MEASURED = {
    "configuration": ("engine.engine_args", "EngineArgs.create_engine_config"),
    "tokenizer": ("engine.engine_base", "get_tokenizer"),
    "kernels": ("core.kernels.library", "is_available"),
    "checkpoint": ("core.worker.worker", "open_checkpoint"),
    "weights": ("core.runtime.cpu_native", "NativeRuntime.load"),
    "kv_cache": ("core.worker.worker", "Worker.initialize_kv_cache"),
}
spent: dict[str, float] = {}


def measure(name: str, module: str, path: str) -> None:
    """Adds what the function's first call takes to `spent`."""
    owner: Any = importlib.import_module(f"corespan.{module}")
    *outer, last = path.split(".")
    for each in outer:
        owner = getattr(owner, each)
    function: Callable[..., Any] = getattr(owner, last)

    @functools.wraps(function)
    def timed(*arguments: Any, **options: Any) -> Any:
        began = time.perf_counter()
        try:
            return function(*arguments, **options)
        finally:
            spent.setdefault(name, time.perf_counter() - began)

    setattr(owner, last, timed)


def timed(name: str, action: Callable[[], Any]) -> Any:
    began = time.perf_counter()
    result = action()
    spent[name] = time.perf_counter() - began
    return result


def main() -> None:
    started, model, prompt = sys.argv[1:]
    os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"
    spent["interpreter"] = entered - float(started)
    timed("shell_imports", lambda: importlib.import_module("corespan.engine.llm_engine"))
    timed("core_imports", lambda: importlib.import_module("corespan.core.worker.worker"))
    importlib.import_module("corespan.core.engine_core")
    for name, place in MEASURED.items():
        measure(name, *place)
    from corespan import EngineArgs, LLMEngine, SamplingParams

    began = time.perf_counter()
    engine = LLMEngine.from_engine_args(EngineArgs(model=model, max_num_seqs=1, disable_log_stats=True))
    spent["rest_of_engine"] = time.perf_counter() - began - sum(spent.get(name, 0.0) for name in MEASURED)
    engine.add_request("0", prompt, SamplingParams(max_tokens=8, temperature=0.0))
    timed("first_step", engine.step)
    timed("second_step", engine.step)
    spent["torch_is_loaded"] = float("torch" in sys.modules)
    print(json.dumps(spent))


main()
