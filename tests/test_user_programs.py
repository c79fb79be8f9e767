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
from deadlines import DEADLINE

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

FORKING = """
import asyncio, gc, os, sys
from async_llm import PROMPT, build_async_llm, collect
from clients import SMALL_ENGINE
from corespan import LLM
from prompts import greedy

def generate():
    if isinstance(engine, LLM):
        (output,) = engine.generate(PROMPT, greedy(), use_tqdm=False)
    else:
        output = asyncio.run(collect(engine, "only", greedy()))[-1]
    return output.outputs[0].token_ids

kind, folder = sys.argv[1:]
engine = build_async_llm(folder) if kind == "async" else LLM(folder, **SMALL_ENGINE)
before = generate()
for ending in ("exits", "dropped"):
    if os.fork() == 0:
        try:
            generate()
        except RuntimeError as error:
            print(error, flush=True)
        if ending == "dropped":
            del engine
            gc.collect()
        sys.exit(3)
    assert os.waitstatus_to_exitcode(os.wait()[1]) == 3
    assert generate() == before
print("parent", os.getpid())
"""


STREAMING = """
import asyncio, sys
from clients import SMALL_ENGINE
from corespan import AsyncEngineArgs, AsyncLLM, SamplingParams

async def main():
    engine = AsyncLLM.from_engine_args(AsyncEngineArgs(sys.argv[1], **SMALL_ENGINE))
    params = SamplingParams(max_tokens=400, ignore_eos=True)
    stream = engine.generate("Once upon a time", params, "first")
    await anext(stream)
    print(engine.engine_core._connection.addresses.core_pid, flush=True)
    while True:  # until the signal
        async for _ in stream:
            pass
        stream = engine.generate("Once upon a time", params, "next")

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

    _, errors = program.communicate(timeout=DEADLINE)
    assert program.returncode == -sent, errors
    psutil.wait_procs([core], timeout=DEADLINE)
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
        [sys.executable, str(script), tiny_llama_dir], env=environment, capture_output=True, text=True, timeout=DEADLINE
    )

    assert done.returncode == 0, done.stderr
    ids = make_llm().get_tokenizer().encode(PROMPT)
    assert ast.literal_eval(done.stdout) == reference.greedy(ids, 8, eos_token_id=None)


@pytest.mark.parametrize("kind", ["inproc", "sync_mp", "async"])
def test_a_fork_is_refused_and_its_end_leaves_the_engine_alone(tiny_llama_dir: str, kind: str) -> None:
    path = os.pathsep.join(filter(None, [SUPPORT, os.environ.get("PYTHONPATH")]))
    multiprocess = "0" if kind == "inproc" else "1"
    environment = {**os.environ, "PYTHONPATH": path, "VLLM_ENABLE_V1_MULTIPROCESSING": multiprocess}

    done = subprocess.run(
        [sys.executable, "-c", FORKING, kind, tiny_llama_dir],
        env=environment,
        capture_output=True,
        text=True,
        timeout=DEADLINE,
    )

    assert done.returncode == 0, done.stderr
    *refusals, owner = done.stdout.splitlines()
    assert len(refusals) == 2
    assert all(f"belongs to process {owner.split()[1]}" in refusal for refusal in refusals)
