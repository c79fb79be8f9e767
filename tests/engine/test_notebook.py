"""Engines as notebooks use them: cells of a program without a file, run one by one inside a running event loop."""

import os
import subprocess
import sys
from pathlib import Path

from deadlines import DEADLINE

import corespan

NOTEBOOK = """
import ast, asyncio, inspect, sys

CELLS = [
    "from corespan import LLM, AsyncEngineArgs, AsyncLLM, SamplingParams",
    "arguments = dict(model={model!r}, max_model_len=128, num_gpu_blocks_override=33, disable_log_stats=True)",
    "params = SamplingParams(temperature=0, max_tokens=8, ignore_eos=True)",
    "llm = LLM(**arguments)",
    "first = llm.generate('Once', params, use_tqdm=False)[0]",
    "engine = AsyncLLM.from_engine_args(AsyncEngineArgs(**arguments))",
    "second = [output async for output in engine.generate('Once', params, 'only')][-1]",
    "third = llm.generate('Once', params, use_tqdm=False)[0]",
    "print(len({{tuple(output.outputs[0].token_ids) for output in (first, second, third)}}))",
]

async def notebook():
    del sys.modules["__main__"].__spec__
    for cell in CELLS:
        code = compile(cell, "<cell>", "exec", flags=ast.PyCF_ALLOW_TOP_LEVEL_AWAIT)
        result = eval(code, globals())
        if inspect.isawaitable(result):
            await result

asyncio.run(notebook())
"""


def test_two_engines_serve_cells_inside_a_running_event_loop(tiny_llama_dir: str) -> None:
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(Path(corespan.__file__).parent.parent), *sys.path])}

    finished = subprocess.run(
        [sys.executable, "-"],
        input=NOTEBOOK.format(model=tiny_llama_dir),
        env=environment,
        capture_output=True,
        text=True,
        timeout=DEADLINE,
    )

    assert finished.stdout.split() == ["1"], finished.stderr
