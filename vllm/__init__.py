"""vLLM's public names at vLLM's import paths: `corespan.vllm.sampling_params.SamplingParams` and so on.

`corespan run-vllm script.py` runs an unmodified vLLM script, to which `vllm` means this package. What stands where is
one table, `_table.py`; the modules are made of it when this package is imported, the names when they are used.
"""

if __name__ == "vllm":  # the checkout's root is on the path, and this is no installed vLLM
    raise ImportError("this folder is corespan.vllm; `corespan run-vllm script.py` lets scripts import it as vllm")

from typing import Any

from ._modules import make_modules, value_of

__version__ = "0.25.1"
"""Of the vLLM whose names these are: what scripts compare."""

make_modules(__name__)


def __getattr__(name: str) -> Any:
    return value_of(__name__, "", name)
