"""The logits processor in the documentation does what it says."""

import re
import sys
import types
from pathlib import Path

import pytest
import torch
from sampler_driver import Loop, generate_alone, new_request

from corespan.core.sampling.logits_processors import BatchUpdate, MoveDirectionality
from corespan.protocol.params import SamplingParams

DOCUMENT = Path(__file__).parents[3] / "docs" / "sampling.md"


@pytest.fixture
def documented(monkeypatch: pytest.MonkeyPatch) -> str:
    """The example's import path, once its text is a module."""
    (code,) = re.findall(r"```python\n(.*?)```", DOCUMENT.read_text(), re.DOTALL)
    module = types.ModuleType("documented_processor")
    exec(code, module.__dict__)
    monkeypatch.setitem(sys.modules, module.__name__, module)
    return "documented_processor:NoRepeat"


def test_the_documented_processor_never_repeats_a_token(documented: str) -> None:
    always_seven = {7: 50.0, 8: 40.0}
    asks = SamplingParams(temperature=0, logit_bias=always_seven, extra_args={"no_repeat": True})
    plain = SamplingParams(temperature=0, logit_bias=always_seven)
    assert generate_alone(new_request(asks), 4, 100, logits_processors=[documented])[3:] == [7, 8, 7, 8]
    assert generate_alone(new_request(plain), 4, 100, logits_processors=[documented])[3:] == [7, 7, 7, 7]


def test_the_documented_processor_follows_its_requests(documented: str) -> None:
    loop = Loop(100, logits_processors=[documented])
    asks = SamplingParams(temperature=0, logit_bias={7: 50.0, 8: 40.0}, extra_args={"no_repeat": True})
    loop.add(0, new_request(SamplingParams(temperature=0, logit_bias={7: 50.0})))
    loop.add(1, new_request(asks))
    loop.step([0, 1])
    (processor,) = (guarded.processor for guarded in loop.batch.processors)
    moves = [(0, 1, MoveDirectionality.SWAP), (1, 4, MoveDirectionality.UNIDIRECTIONAL)]
    processor.update_state(BatchUpdate(5, moved=moves))
    logits = torch.zeros(5, 100)
    assert processor.apply(logits)[0, 7] == float("-inf")
    assert processor.apply(logits)[4].isfinite().all()
    with pytest.raises(ValueError, match="no_repeat must be True or False"):
        loop.batch.add(2, new_request(SamplingParams(extra_args={"no_repeat": "yes"})))
