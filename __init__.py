"""corespan: a language-model inference engine split into a thin shell and a core that owns the model.

Every name below is imported on first use, so that `import corespan` costs milliseconds and loads no torch.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

__version__ = "0.1.0"

_EXPORTS = {
    "LLM": ".engine.llm",
    "LLMEngine": ".engine.llm_engine",
    "AsyncLLM": ".engine.async_llm",
    "AsyncLLMEngine": ".engine.async_llm",
    "EngineArgs": ".engine.engine_args",
    "AsyncEngineArgs": ".engine.engine_args",
    "PoolingRequestOutput": ".engine.outputs.pooling_output",
    "EmbeddingRequestOutput": ".engine.outputs.pooling_output",
    "ClassificationRequestOutput": ".engine.outputs.pooling_output",
    "ScoringRequestOutput": ".engine.outputs.pooling_output",
    "RequestOutput": ".engine.outputs.request_output",
    "CompletionOutput": ".engine.outputs.request_output",
    "StreamingInput": ".engine.requests.streaming_input",
    "PromptType": ".engine.text.prompts",
    "TextPrompt": ".engine.text.prompts",
    "TokensPrompt": ".engine.text.prompts",
    "EmbedsPrompt": ".engine.text.prompts",
    "SamplingParams": ".protocol.params",
    "PoolingParams": ".protocol.pooling",
    "PoolerConfig": ".protocol.pooling",
    "BeamSearchParams": ".protocol.params",
    "RequestOutputKind": ".protocol.params",
    "StructuredOutputsParams": ".protocol.structured_outputs",
    "RepetitionDetectionParams": ".protocol.repetition",
    "LoRARequest": ".protocol.lora",
    "EngineDeadError": ".protocol.errors",
    "EngineGenerateError": ".protocol.errors",
    "VLLMValidationError": ".protocol.errors",
}

__all__ = ["__version__", *_EXPORTS]


def __getattr__(name: str) -> Any:
    module = _EXPORTS.get(name)
    if module is None:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = getattr(import_module(module, __name__), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted([*globals(), *_EXPORTS])


if TYPE_CHECKING:
    from .engine.async_llm import AsyncLLM as AsyncLLM
    from .engine.async_llm import AsyncLLMEngine as AsyncLLMEngine
    from .engine.engine_args import AsyncEngineArgs as AsyncEngineArgs
    from .engine.engine_args import EngineArgs as EngineArgs
    from .engine.llm import LLM as LLM
    from .engine.llm_engine import LLMEngine as LLMEngine
    from .engine.outputs.pooling_output import ClassificationRequestOutput as ClassificationRequestOutput
    from .engine.outputs.pooling_output import EmbeddingRequestOutput as EmbeddingRequestOutput
    from .engine.outputs.pooling_output import PoolingRequestOutput as PoolingRequestOutput
    from .engine.outputs.pooling_output import ScoringRequestOutput as ScoringRequestOutput
    from .engine.outputs.request_output import CompletionOutput as CompletionOutput
    from .engine.outputs.request_output import RequestOutput as RequestOutput
    from .engine.requests.streaming_input import StreamingInput as StreamingInput
    from .engine.text.prompts import EmbedsPrompt as EmbedsPrompt
    from .engine.text.prompts import PromptType as PromptType
    from .engine.text.prompts import TextPrompt as TextPrompt
    from .engine.text.prompts import TokensPrompt as TokensPrompt
    from .protocol.errors import EngineDeadError as EngineDeadError
    from .protocol.errors import EngineGenerateError as EngineGenerateError
    from .protocol.errors import VLLMValidationError as VLLMValidationError
    from .protocol.lora import LoRARequest as LoRARequest
    from .protocol.params import BeamSearchParams as BeamSearchParams
    from .protocol.params import RequestOutputKind as RequestOutputKind
    from .protocol.params import SamplingParams as SamplingParams
    from .protocol.pooling import PoolerConfig as PoolerConfig
    from .protocol.pooling import PoolingParams as PoolingParams
    from .protocol.repetition import RepetitionDetectionParams as RepetitionDetectionParams
    from .protocol.structured_outputs import StructuredOutputsParams as StructuredOutputsParams
