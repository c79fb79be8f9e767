"""Environment variables: what each is without a text, with one, and with one that will not do."""

from typing import Any

import pytest

from corespan.protocol import envs

FLAGS = [name for name, variable in envs.VARIABLES.items() if isinstance(variable.default, bool)]
NUMBERS = [name for name, variable in envs.VARIABLES.items() if type(variable.default) in (int, float)]


@pytest.mark.parametrize("name", envs.VARIABLES)
def test_an_unset_variable_has_its_default(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(name, raising=False)
    assert getattr(envs, name) == envs.VARIABLES[name].default


@pytest.mark.parametrize(
    ("name", "text", "value"),
    [
        *((name, text, value) for name in FLAGS for text, value in (("1", True), ("0", False), ("", False))),
        ("VLLM_BATCH_INVARIANT", " True ", True),
        ("VLLM_CPU_KVCACHE_SPACE", "0.5", 0.5),
        ("VLLM_LOG_STATS_INTERVAL", "1e-6", 1e-6),
        ("VLLM_MAX_N_SEQUENCES", "7", 7),
        ("VLLM_LOGGING_LEVEL", "debug", "DEBUG"),
        ("CORESPAN_CACHE", "~/x", "~/x"),
    ],
)
def test_a_text_is_read_when_it_is_asked_for(name: str, text: str, value: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(name, text)
    assert getattr(envs, name) == value


@pytest.mark.parametrize(
    ("name", "text", "legal"),
    [
        *((name, text, "0 or 1") for name in FLAGS for text in ("2", "yes")),
        *((name, text, "(a finite number|an integer)") for name in NUMBERS for text in ("", "many", "nan", "inf")),
        ("VLLM_CPU_KVCACHE_SPACE", "4GB", "a finite number"),
        ("VLLM_MAX_N_SEQUENCES", "1.5", "an integer"),
        ("VLLM_LOGGING_LEVEL", "LOUD", "one of DEBUG, INFO, WARNING, ERROR"),
    ],
)
def test_a_text_that_will_not_do_is_an_error_that_names_variable_text_and_what_will(
    name: str, text: str, legal: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(name, text)
    with pytest.raises(ValueError, match=f"^{name} must be {legal}, got '{text}' "):
        getattr(envs, name)


def test_a_variable_that_is_not_listed_is_no_attribute() -> None:
    with pytest.raises(AttributeError, match="VLLM_NO_SUCH_THING"):
        _ = envs.VLLM_NO_SUCH_THING
