"""The house rules that a machine can hold: who imports whom, what an import costs, what the shell never loads."""

import ast
import os
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from deadlines import DEADLINE

import corespan

ROOT = Path(corespan.__file__).parent
ROOMS = ("protocol", "core", "client", "engine", "vllm", "server")  # each may import those before it
SHELL = ("protocol", "client", "engine", "vllm", "server")
HEAVY = ("torch", "transformers")


def modules(room: str) -> Iterator[tuple[Path, ast.Module]]:
    for path in sorted((ROOT / room).rglob("*.py")):
        yield path, ast.parse(path.read_text(encoding="utf-8"))


def imported_rooms(path: Path, node: ast.AST) -> set[str]:
    """The rooms that an import statement of the package reaches."""
    package = path.relative_to(ROOT).parts[:-1]
    if isinstance(node, ast.ImportFrom):
        if node.level == 0:
            full = (node.module or "").split(".")
            return {full[1]} if full[0] == "corespan" and len(full) > 1 else set()
        base = package[: len(package) - node.level + 1]
        reached = [*base, *(node.module or "").split(".")] if node.module else list(base)
        names = [reached] if reached else [[alias.name] for alias in node.names]
        return {name[0] for name in names if name and name[0] in ROOMS}
    if isinstance(node, ast.Import):
        parts = [alias.name.split(".") for alias in node.names]
        return {part[1] for part in parts if part[0] == "corespan" and len(part) > 1}
    return set()


def top_level_imports(module: ast.Module) -> Iterator[str]:
    """The modules imported when the file is, those under TYPE_CHECKING left out."""
    pending: list[ast.stmt] = list(module.body)
    while pending:
        node = pending.pop()
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.level == 0:
            yield node.module or ""
        elif isinstance(node, ast.If) and "TYPE_CHECKING" not in ast.dump(node.test):
            pending += [*node.body, *node.orelse]
        elif isinstance(node, ast.Try):
            pending += [*node.body, *node.orelse, *node.finalbody, *(s for h in node.handlers for s in h.body)]
        elif isinstance(node, (ast.With, ast.ClassDef)):
            pending += node.body


@pytest.mark.parametrize("room", ROOMS)
def test_no_room_imports_one_above_it(room: str) -> None:
    allowed = set(ROOMS[: ROOMS.index(room) + 1])
    found = False
    for path, module in modules(room):
        for node in ast.walk(module):
            reached = imported_rooms(path, node)
            found = found or bool(reached)
            assert reached <= allowed, f"{path.relative_to(ROOT)}:{getattr(node, 'lineno', 0)} imports {reached}"
    assert found or room == "protocol"


@pytest.mark.parametrize("room", ["client", "engine", "vllm", "server"])
def test_the_shell_imports_the_core_inside_functions_only(room: str) -> None:
    for path, module in modules(room):
        for node in module.body:
            assert "core" not in imported_rooms(path, node), f"{path.relative_to(ROOT)} imports the core at once"


@pytest.mark.parametrize("room", SHELL)
def test_the_shell_imports_nothing_heavy_at_module_level(room: str) -> None:
    for path, module in modules(room):
        heavy = [name for name in top_level_imports(module) if name.split(".")[0] in HEAVY]
        assert not heavy, f"{path.relative_to(ROOT)} imports {heavy}"


@pytest.mark.parametrize("room", ROOMS)
def test_imports_inside_the_package_are_relative(room: str) -> None:
    for path, module in modules(room):
        if path.parent.name == "_alias":  # imported as a module of its own
            continue
        for node in ast.walk(module):
            if isinstance(node, ast.ImportFrom) and node.level == 0:
                assert (node.module or "").split(".")[0] != "corespan", f"{path.relative_to(ROOT)}:{node.lineno}"


def run_python(program: str) -> str:
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(ROOT.parent), *sys.path])}
    finished = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, env=environment, timeout=DEADLINE
    )
    assert finished.returncode == 0, finished.stderr
    return finished.stdout.strip()


def test_importing_the_package_loads_hardly_anything() -> None:
    loaded = run_python("import sys, corespan; print(*sys.modules)").split()

    assert not set(loaded) & {"torch", "transformers", "numpy", "zmq", "msgspec", "tokenizers", "asyncio"}


def test_every_exported_name_exists_and_is_listed() -> None:
    for name in corespan.__all__:
        assert getattr(corespan, name) is not None
    assert set(corespan.__all__) <= set(dir(corespan))
    assert corespan.AsyncLLMEngine is corespan.AsyncLLM
    with pytest.raises(AttributeError, match="no_such_name"):
        _ = corespan.no_such_name


def test_the_exports_for_type_checkers_are_the_real_ones() -> None:
    module = ast.parse((ROOT / "__init__.py").read_text(encoding="utf-8"))
    declared = {
        alias.name: f".{node.module}"
        for branch in module.body
        if isinstance(branch, ast.If)
        for node in branch.body
        if isinstance(node, ast.ImportFrom)
        for alias in node.names
    }

    assert declared == corespan._EXPORTS


def test_a_multiprocess_engine_leaves_torch_out_of_the_users_process(tiny_llama_dir: str) -> None:
    program = f"""
import sys
from corespan import LLM, SamplingParams
processors = ["torchless_processor:Refusing"]
llm = LLM({tiny_llama_dir!r}, max_model_len=128, num_gpu_blocks_override=33, logits_processors=processors)
try:
    llm.generate("hi", SamplingParams(extra_args={{"refuse": True}}))
    sys.exit("what the processor refuses was accepted")
except ValueError:
    pass
outputs = llm.generate(["hi", "there"], SamplingParams(temperature=0, max_tokens=4, logprobs=1), use_tqdm=False)
llm.shutdown()
print(len(outputs), "torch" in sys.modules, "transformers" in sys.modules)
"""

    assert run_python(program) == "2 False False"


def test_no_test_limits_the_time_a_busy_machine_may_take() -> None:
    """Waits for what must come have one limit, `DEADLINE`, which only what hangs reaches."""
    limit = re.compile(r"timeout=[1-9]|\.(?:wait|join|result)\([1-9]")
    lines = [
        f"{path.relative_to(ROOT)}: {line.strip()}"
        for path in sorted((ROOT / "tests").rglob("*.py"))
        for line in path.read_text(encoding="utf-8").splitlines()
        if limit.search(line) and "shutdown" not in line
    ]

    assert lines == [], "write DEADLINE, of tests/support/deadlines.py, instead of a number"
