"""The house rules that a machine can hold: who imports whom, what an import costs, what the shell never loads."""

import ast
import os
import re
import subprocess
import sys
from collections.abc import Iterable, Iterator
from graphlib import CycleError, TopologicalSorter
from pathlib import Path

import pytest
from deadlines import DEADLINE

import corespan

ROOT = Path(corespan.__file__).parent
ROOMS = ("protocol", "shared", "core", "client", "engine", "vllm", "server")  # each may import those before it
SHELL = ("protocol", "shared", "client", "engine", "vllm", "server")
HEAVY = ("torch", "transformers")


def modules(room: str) -> Iterator[tuple[Path, ast.Module]]:
    for path in sorted((ROOT / room).rglob("*.py")):
        yield path, ast.parse(path.read_text(encoding="utf-8"))


MODULES = {
    ".".join(path.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__"): path
    for room in ROOMS
    for path in sorted((ROOT / room).rglob("*.py"))
}


def imported_modules(path: Path, node: ast.AST) -> set[str]:
    """The modules of the package that an import statement reaches, without the package's own name."""
    if isinstance(node, ast.Import):
        names = [alias.name.split(".") for alias in node.names]
        return {".".join(name[1:]) for name in names if name[0] == "corespan" and len(name) > 1}
    if not isinstance(node, ast.ImportFrom):
        return set()
    base = (node.module or "").split(".") if node.module else []
    if node.level:
        package = path.relative_to(ROOT).parts[:-1]
        base = [*package[: len(package) - node.level + 1], *base]
    elif base[:1] == ["corespan"]:
        base = base[1:]
    else:
        return set()
    named = {".".join([*base, alias.name]) for alias in node.names}
    return {name if name in MODULES else ".".join(base) for name in named} & set(MODULES)


def imported_rooms(path: Path, node: ast.AST) -> set[str]:
    return {module.partition(".")[0] for module in imported_modules(path, node)}


def all_imports(name: str) -> set[str]:
    """What a module imports anywhere: at once, within functions, or for type checkers."""
    path = MODULES[name]
    tree = ast.parse(path.read_text(encoding="utf-8"))
    return {module for node in ast.walk(tree) for module in imported_modules(path, node)} - {name}


def rooms_in_the_docs() -> dict[str, set[str]]:
    """By room or room within a room, the ones that docs/architecture.md lets it import."""
    text = (ROOT / "docs" / "architecture.md").read_text(encoding="utf-8")
    rows = re.findall(r"^\| `([\w/]+)/` \| .* \| (.*) \|$", text, re.MULTILINE)
    names = [name for name, _ in rows]
    below = {name: set(names[position + 1 :]) for position, name in enumerate(names)}
    return {
        name: below[name] if allowed == "everything below" else set(re.findall(r"`([\w/]+)/`", allowed))
        for name, allowed in rows
    }


def room_of(module: str, rooms: Iterable[str]) -> str:
    """The innermost of `rooms` that the module lies in."""
    return max((room for room in rooms if f"{module}.".startswith(room.replace("/", ".") + ".")), key=len)


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


def test_no_room_imports_one_above_it() -> None:
    for name in MODULES:
        room = name.partition(".")[0]
        above = ROOMS[ROOMS.index(room) + 1 :]
        for imported in all_imports(name):
            assert imported.partition(".")[0] not in above, f"{name} imports {imported}"


def test_each_room_imports_what_the_docs_say() -> None:
    rooms = rooms_in_the_docs()
    assert set(ROOMS) <= set(rooms)
    assert {f"engine/{path.name}" for path in (ROOT / "engine").iterdir() if (path / "__init__.py").is_file()} <= set(
        rooms
    )
    for name in MODULES:
        room = room_of(name, rooms)
        for imported in all_imports(name):
            reached = room_of(imported, rooms)
            allowed = reached == room or any(f"{reached}/".startswith(f"{other}/") for other in rooms[room])
            assert allowed, f"{name} imports {imported}: {room}/ may not import {reached}/"


def test_no_imports_go_in_circles() -> None:
    try:
        TopologicalSorter({name: all_imports(name) for name in MODULES}).prepare()
    except CycleError as circle:
        pytest.fail(" imports ".join(reversed(circle.args[1])))


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
