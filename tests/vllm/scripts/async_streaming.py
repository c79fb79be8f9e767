"""Tokens as they come, over asyncio."""

import asyncio
import sys

from vllm.engine.arg_utils import AsyncEngineArgs
from vllm.sampling_params import RequestOutputKind
from vllm.utils import random_uuid
from vllm.v1.engine.async_llm import AsyncLLM

from vllm import SamplingParams


async def stream_response(engine: AsyncLLM, prompt: str, request_id: str) -> None:
    sampling_params = SamplingParams(
        max_tokens=12, temperature=0.8, seed=42, ignore_eos=True, output_kind=RequestOutputKind.DELTA
    )
    num_tokens = 0
    async for output in engine.generate(request_id=request_id, prompt=prompt, sampling_params=sampling_params):
        for completion in output.outputs:
            num_tokens += len(completion.token_ids)
            print(completion.text, end="", flush=True)
        if output.finished:
            print(f"\nGeneration complete: {num_tokens} tokens")


async def main() -> None:
    engine = AsyncLLM.from_engine_args(
        AsyncEngineArgs(model=sys.argv[1], enforce_eager=True, max_model_len=512, num_gpu_blocks_override=64)
    )
    try:
        for prompt in ("The future of artificial intelligence is", "In a galaxy far, far away"):
            await stream_response(engine, prompt, f"stream-{random_uuid()}")
    finally:
        engine.shutdown()


if __name__ == "__main__":
    asyncio.run(main())
