"""The parts of a step have names in a profile, and none where nothing is recorded."""

import contextlib
import json
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from corespan import SamplingParams
from corespan.core.profile_ranges import profile_range


@pytest.mark.parametrize("multiprocess", [False, True])
def test_a_profile_names_the_parts_of_every_step(
    make_llm: Callable[..., Any], tmp_path: Path, multiprocess: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("VLLM_TORCH_PROFILER_DIR", str(tmp_path))
    llm = make_llm(multiprocess=multiprocess)
    engine_core = llm.llm_engine.engine_core
    engine_core.profile(True, "trace")
    llm.generate("hello", SamplingParams(temperature=0, max_tokens=3, ignore_eos=True), use_tqdm=False)
    (path,) = engine_core.profile(False)

    events = json.loads(Path(path).read_text())["traceEvents"]
    counts = Counter(event["name"] for event in events if event.get("cat") == "user_annotation")
    assert counts["sample"] == 3
    assert counts["schedule"] == counts["execute"] == counts["prepare"] == counts["update"] >= 3
    assert counts["model"] == 3


def test_without_a_profile_a_range_is_nothing() -> None:
    assert isinstance(profile_range("schedule"), contextlib.nullcontext)
    assert profile_range("schedule") is profile_range("update")
