"""Classes of the user's, found again in a core: the script runs there as far as it defines things, and no further."""

import sys
from pathlib import Path

import pytest

from corespan.protocol import user_classes
from corespan.protocol.errors import ProtocolError
from corespan.protocol.user_classes import UserMain, accept_user_code, find_class, path_of, pickles_for_core

DEFINITION = "import sys, __main__\nclass Own:\n    argv = list(sys.argv)\n    name = __name__\n"
ENGINE = """
from corespan import EngineArgs
try:
    EngineArgs("/no/model").create_engine_config()
except Exception:
    pass
"""


@pytest.fixture
def as_core(monkeypatch: pytest.MonkeyPatch) -> None:
    """What a core's process finds at its start: no class of the user's, and no script that ran."""
    monkeypatch.setattr(user_classes, "_known", {})
    monkeypatch.setattr(user_classes, "_main", None)
    monkeypatch.setattr(user_classes, "_main_module", None)
    monkeypatch.setitem(sys.modules, "__mp_main__", sys.modules["__main__"])  # as multiprocessing has it
    monkeypatch.setattr(sys, "argv", ["-c"])


def script(folder: Path, text: str) -> UserMain:
    path = folder / "script.py"
    path.write_text(text, encoding="utf-8")
    return UserMain(str(path), None, [str(path), "--flag"])


def test_a_class_of_the_script_is_found_by_running_it_under_another_name(as_core: None, tmp_path: Path) -> None:
    text = f"{DEFINITION}if __name__ == '__main__':\n    raise AssertionError('it runs what it is for')\n"
    main = script(tmp_path, text)
    accept_user_code(main, {})

    found = find_class("__main__:Own")

    assert found.argv == main.argv and found.name == "__mp_main__"  # type: ignore[attr-defined]
    assert find_class("__mp_main__:Own") is found  # and the script runs once


def test_a_script_without_a_guard_runs_up_to_its_engine(as_core: None, tmp_path: Path) -> None:
    accept_user_code(script(tmp_path, f"{DEFINITION}{ENGINE}raise AssertionError('it goes on')\n"), {})

    assert find_class("__main__:Own").name == "__mp_main__"  # type: ignore[attr-defined]


@pytest.mark.parametrize("text", [f"{ENGINE}{DEFINITION}", "if __name__ == '__main__':\n    class Own: pass\n"])
def test_a_class_that_stands_behind_the_engine_or_nowhere_is_not_found(
    as_core: None, tmp_path: Path, text: str
) -> None:
    accept_user_code(script(tmp_path, text), {})

    with pytest.raises(AttributeError, match="'Own'; .* outside of `if __name__ == '__main__':`"):
        find_class("__main__:Own")


@pytest.mark.parametrize("end", ["raise SystemExit(3)", "1 / 0", "def"])
def test_a_script_that_fails_names_what_to_do(as_core: None, tmp_path: Path, end: str) -> None:
    accept_user_code(script(tmp_path, f"{DEFINITION}{end}\n"), {})

    with pytest.raises(ImportError, match=r"script\.py fails .* under `if __name__ == '__main__':`, or the class into"):
        find_class("__main__:Own")


def test_a_local_class_is_found_in_this_process_and_reaches_another_only_as_a_pickle(
    as_core: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Local:
        answer = 42

    path = path_of(Local)
    assert find_class(path) is Local

    monkeypatch.delenv("VLLM_ALLOW_INSECURE_SERIALIZATION", raising=False)
    with pytest.raises(ValueError, match="Local.*VLLM_ENABLE_V1_MULTIPROCESSING=0.*VLLM_ALLOW_INSECURE_SERIALIZATION"):
        pickles_for_core([path])
    monkeypatch.setenv("VLLM_ALLOW_INSECURE_SERIALIZATION", "1")
    pickles = pickles_for_core([path, "package.module:Class"])
    user_classes._known.clear()
    accept_user_code(None, pickles)
    assert find_class(path).answer == 42  # type: ignore[attr-defined]

    monkeypatch.delenv("VLLM_ALLOW_INSECURE_SERIALIZATION")
    with pytest.raises(ProtocolError, match="VLLM_ALLOW_INSECURE_SERIALIZATION"):
        accept_user_code(None, pickles)


def test_without_a_script_its_classes_are_refused_before_a_core_starts(
    as_core: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delattr(sys.modules["__main__"], "__file__", raising=False)  # a test's worker process has none

    assert user_classes.user_main() is None
    with pytest.raises(ValueError, match="top level of a module or script"):
        pickles_for_core(["__main__:Own"])


def test_a_scripts_classes_are_sent_as_pickles_where_these_are_allowed(
    as_core: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """So that one behind the script's guard gets there too."""
    monkeypatch.setattr(sys.modules["__main__"], "__file__", __file__, raising=False)
    path = path_of(type("Own", (), {"__module__": "__main__", "answer": 42}))

    monkeypatch.delenv("VLLM_ALLOW_INSECURE_SERIALIZATION", raising=False)
    assert pickles_for_core([path]) == {}
    monkeypatch.setenv("VLLM_ALLOW_INSECURE_SERIALIZATION", "1")
    pickles = pickles_for_core([path])

    user_classes._known.clear()
    accept_user_code(None, pickles)
    assert find_class("__main__:Own").answer == 42  # type: ignore[attr-defined]
