"""Programs around a real model: what they did before the engine, and where they hold it, changes nothing."""

import ast
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import psutil
import pytest

SUPPORT = str(Path(__file__).parent / "support")
PROMPT = "Once upon a time"
GENERATE = """
import multiprocessing
import sys

def generate(folder):
    from clients import SMALL_ENGINE
    from corespan import LLM, SamplingParams
    params = SamplingParams(temperature=0, max_tokens=8, ignore_eos=True)
    (output,) = LLM(folder, **SMALL_ENGINE).generate("Once upon a time", params, use_tqdm=False)
    return output.outputs[0].token_ids

def busy_torch():
    import torch
    torch.set_num_threads(4)
    matrix = torch.rand(1000, 1000)
    return float((matrix @ matrix).sum())

if __name__ == "__main__":
    folder = sys.argv[1]
"""
PROGRAMS = {
    "after torch": "    busy_torch()\n    print(generate(folder))\n",
    "forked worker": (
        "    with multiprocessing.get_context('fork').Pool(1) as pool:\n        print(pool.apply(generate, [folder]))\n"
    ),
    "worker forked after torch": (
        "    busy_torch()\n"
        "    with multiprocessing.get_context('fork').Pool(1) as pool:\n"
        "        print(pool.apply(generate, [folder]))\n"
    ),
}


STREAMING = """
import asyncio, sys
from clients import SMALL_ENGINE
from corespan import AsyncEngineArgs, AsyncLLM, SamplingParams

async def main():
    engine = AsyncLLM.from_engine_args(AsyncEngineArgs(sys.argv[1], **SMALL_ENGINE))
    params = SamplingParams(max_tokens=400, ignore_eos=True)
    stream = engine.generate("Once upon a time", params, "only")
    await anext(stream)
    await engine.pause_generation("keep")
    print(engine.engine_core._supervisor.link.addresses.core_pid, flush=True)
    async for _ in stream:
        pass

asyncio.run(main())
"""


@pytest.mark.parametrize("sent", [signal.SIGINT, signal.SIGTERM, signal.SIGKILL])
def test_a_signal_to_a_program_that_streams_ends_it_and_its_core(
    tiny_llama_dir: str, tmp_path: Path, sent: signal.Signals
) -> None:
    sockets = tmp_path / "s"
    sockets.mkdir()
    path = os.pathsep.join(filter(None, [SUPPORT, os.environ.get("PYTHONPATH")]))
    environment = {**os.environ, "PYTHONPATH": path, "VLLM_RPC_BASE_PATH": str(sockets)}
    program = subprocess.Popen(
        [sys.executable, "-c", STREAMING, tiny_llama_dir],
        env=environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )
    assert program.stdout is not None
    core = psutil.Process(int(program.stdout.readline()))

    os.killpg(program.pid, sent)

    _, errors = program.communicate(timeout=60)
    assert program.returncode == -sent, errors
    psutil.wait_procs([core], timeout=60)
    assert not core.is_running()
    assert list(sockets.iterdir()) == []


@pytest.mark.parametrize("program", PROGRAMS.values(), ids=PROGRAMS)
def test_an_engine_works_after_torch_and_in_a_worker(
    tiny_llama_dir: str, reference: Any, make_llm: Any, tmp_path: Path, program: str
) -> None:
    script = tmp_path / "script.py"
    script.write_text(GENERATE + program)
    path = os.pathsep.join(filter(None, [SUPPORT, os.environ.get("PYTHONPATH")]))
    environment = {**os.environ, "PYTHONPATH": path, "VLLM_ENABLE_V1_MULTIPROCESSING": "1"}

    done = subprocess.run(
        [sys.executable, str(script), tiny_llama_dir], env=environment, capture_output=True, text=True, timeout=60
    )

    assert done.returncode == 0, done.stderr
    ids = make_llm().get_tokenizer().encode(PROMPT)
    assert ast.literal_eval(done.stdout) == reference.greedy(ids, 8, eos_token_id=None)
