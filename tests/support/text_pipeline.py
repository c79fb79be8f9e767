"""The shell's text side without a core: tokenizers built on the spot, and requests fed token by token."""

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from gguf_files import sentencepiece_vocabulary, write_gguf

from corespan.engine.model_files.gguf_tokenizer import convert_gguf_tokenizer
from corespan.engine.outputs.output_collector import RequestOutputCollector
from corespan.engine.outputs.output_processor import OutputProcessor
from corespan.engine.outputs.request_output import RequestOutput
from corespan.engine.requests.input_processor import InputProcessor
from corespan.engine.requests.prepared_request import PreparedRequest
from corespan.engine.text.loading import load_tokenizer
from corespan.engine.text.tokenizer import Tokenizer
from corespan.protocol.config import CacheConfig, ModelConfig, SchedulerConfig, VllmConfig
from corespan.protocol.outputs import EngineCoreOutput, FinishReason, LogprobsArrays
from corespan.protocol.params import SamplingParams

VOCAB_SIZE = 512


def make_config(max_model_len: int = 128, **model_config: Any) -> VllmConfig:
    fields: dict[str, Any] = {
        "model": "/nowhere",
        "served_model_name": "tiny",
        "tokenizer": None,
        "hf_config": {"vocab_size": VOCAB_SIZE, "hidden_size": 8},
    }
    return VllmConfig(
        model_config=ModelConfig(max_model_len=max_model_len, **(fields | model_config)),
        cache_config=CacheConfig(),
        scheduler_config=SchedulerConfig(max_num_batched_tokens=64, max_num_seqs=8, max_model_len=max_model_len),
    )


def byte_fallback_tokenizer(folder: Path) -> Tokenizer:
    """Of the sentencepiece kind: a space before the first word, characters it does not know as bytes."""
    path = write_gguf(folder / "tiny.gguf", "llama", sentencepiece_vocabulary(with_merges=True), {})
    convert_gguf_tokenizer(path, folder / "converted")
    return load_tokenizer(str(folder / "converted"))


def make_request(
    processor: InputProcessor, prompt: Any, params: SamplingParams, request_id: str = "r"
) -> PreparedRequest:
    prepared = processor.process_inputs(request_id, prompt, params)
    processor.assign_request_id(prepared)
    return prepared


def logprobs_of(token_ids: Sequence[int], top: Sequence[Sequence[int]] | None = None) -> LogprobsArrays:
    """Made-up values: column c of position p has -(p + 1) - c / 10; the rank of column 0 is 7."""
    columns = [[token_id, *(top[at] if top else ())] for at, token_id in enumerate(token_ids)]
    width = len(columns[0]) if columns else 1
    values = -(np.arange(len(columns))[:, None] + 1.0) - np.arange(width)[None, :] / 10
    return LogprobsArrays(
        np.array(columns, dtype=np.int32).reshape(len(columns), width),
        values.astype(np.float32),
        np.full(len(columns), 7, dtype=np.int32),
    )


def stream(
    tokenizer: Tokenizer | None,
    request: PreparedRequest,
    token_ids: Sequence[int],
    *,
    finish_reason: FinishReason = FinishReason.LENGTH,
    tokens_per_step: int = 1,
    stream_interval: int = 1,
    logprobs: bool = False,
) -> Iterator[RequestOutput]:
    """Every output of one request whose core yields `token_ids` and then ends with `finish_reason`.

    Ends early, as a core does on the abort, where a stop string is found.
    """
    processor = OutputProcessor(tokenizer, log_stats=False, stream_interval=stream_interval)
    processor.add_request(request)
    for start in range(0, len(token_ids), tokens_per_step):
        step = list(token_ids[start : start + tokens_per_step])
        last = start + tokens_per_step >= len(token_ids)
        output = EngineCoreOutput(
            request.request_id,
            step,
            finish_reason if last else None,
            new_logprobs=logprobs_of(step) if logprobs else None,
        )
        processed = processor.process_outputs([output])
        yield from processed.request_outputs
        assert processed.reqs_to_abort == ([] if last or processor.request_states else [request.request_id])
        if not processor.request_states:
            break
    assert not processor.request_states and not processor.external_req_ids and not processor.parent_requests


def add(processor: OutputProcessor, request: PreparedRequest, queue: RequestOutputCollector | None = None) -> list[str]:
    """Registers the request and its children; returns the internal ids that outputs come under."""
    return [child.request_id for child in processor.add_request(request, queue)]
