"""Logits processors of the script's own: one for the batch, one that wraps a function for each request."""

import sys
from typing import Any

import torch
from vllm.config import VllmConfig
from vllm.v1.sample.logits_processor import (
    AdapterLogitsProcessor,
    BatchUpdate,
    LogitsProcessor,
    RequestLogitsProcessor,
    process_dict_updates,
)

from vllm import LLM, SamplingParams


class DummyLogitsProcessor(LogitsProcessor):
    """Masks all but extra_args["target_token"]."""

    @classmethod
    def validate_params(cls, params: SamplingParams):
        target_token: Any | None = params.extra_args and params.extra_args.get("target_token")
        if target_token is not None and not isinstance(target_token, int):
            raise ValueError(f"target_token value {target_token} is not int")

    def __init__(self, vllm_config: VllmConfig, device: torch.device, is_pin_memory: bool):
        self.req_info: dict[int, int] = {}

    def is_argmax_invariant(self) -> bool:
        return False

    def update_state(self, batch_update: BatchUpdate | None):
        process_dict_updates(
            self.req_info,
            batch_update,
            lambda params, _, __: params.extra_args and params.extra_args.get("target_token"),
        )

    def apply(self, logits: torch.Tensor) -> torch.Tensor:
        if not self.req_info:
            return logits
        cols = torch.tensor(list(self.req_info.values()), dtype=torch.long, device=logits.device)
        rows = torch.tensor(list(self.req_info.keys()), dtype=torch.long, device=logits.device)
        values_to_keep = logits[rows, cols].clone()
        logits[rows] = float("-inf")
        logits[rows, cols] = values_to_keep
        return logits


class OneTokenOnly:
    def __init__(self, token_id: int) -> None:
        self.token_id = token_id

    def __call__(self, output_ids: list[int], logits: torch.Tensor) -> torch.Tensor:
        value = logits[self.token_id].item()
        logits[:] = float("-inf")
        logits[self.token_id] = value
        return logits


class WrappedProcessor(AdapterLogitsProcessor):
    def is_argmax_invariant(self) -> bool:
        return False

    def new_req_logits_processor(self, params: SamplingParams) -> RequestLogitsProcessor | None:
        token_id = params.extra_args and params.extra_args.get("wrapped_token")
        return None if token_id is None else OneTokenOnly(token_id)


def main():
    llm = LLM(
        model=sys.argv[1],
        max_model_len=512,
        num_gpu_blocks_override=64,
        logits_processors=[DummyLogitsProcessor, WrappedProcessor],
    )
    params_list = [
        SamplingParams(temperature=0.0, max_tokens=3, extra_args={"target_token": 128}),
        SamplingParams(temperature=0.0, max_tokens=3),
        SamplingParams(temperature=0.0, max_tokens=3, extra_args={"wrapped_token": 67}),
    ]
    outputs = llm.generate(["Hello, my name is", "The capital is", "The future is"], params_list)
    print(*(list(output.outputs[0].token_ids) for output in outputs), sep="\n")


if __name__ == "__main__":
    main()
