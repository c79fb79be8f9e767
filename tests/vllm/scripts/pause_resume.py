"""A generation that is frozen in the middle and goes on."""

import asyncio
import sys

from vllm.engine.arg_utils import AsyncEngineArgs
from vllm.v1.engine.async_llm import AsyncLLM

from vllm import SamplingParams


async def main():
    engine = AsyncLLM.from_engine_args(
        AsyncEngineArgs(model=sys.argv[1], enforce_eager=True, max_model_len=512, num_gpu_blocks_override=64)
    )
    started = asyncio.Event()

    async def generator_task():
        tokens = 0
        params = SamplingParams(max_tokens=200, ignore_eos=True)
        async for output in engine.generate("Once upon a time", params, request_id="demo"):
            tokens = len(output.outputs[0].token_ids)
            if tokens >= 5:
                started.set()
        return tokens

    async def controller_task():
        await started.wait()
        await engine.pause_generation(mode="keep")
        print(f"Paused: {await engine.is_paused()}")
        await engine.resume_generation()
        print(f"Paused: {await engine.is_paused()}")

    tokens, _ = await asyncio.gather(generator_task(), controller_task())
    print(f"Total tokens: {tokens}")
    engine.shutdown()


if __name__ == "__main__":
    asyncio.run(main())
