"""Streams several completions at once. Usage: python examples/async_streaming.py [MODEL]"""

import asyncio
import sys

from corespan import AsyncEngineArgs, AsyncLLM, RequestOutputKind, SamplingParams


async def stream(engine: AsyncLLM, prompt: str, request_id: str) -> None:
    params = SamplingParams(temperature=0, max_tokens=24, output_kind=RequestOutputKind.DELTA)
    async for output in engine.generate(prompt, params, request_id=request_id):
        print(f"{request_id}: {output.outputs[0].text!r}")


async def generate_all(model: str) -> None:
    engine = AsyncLLM.from_engine_args(AsyncEngineArgs(model=model, max_model_len=512, disable_log_stats=True))
    try:
        prompts = ["The capital of France is", "Once upon a time"]
        await asyncio.gather(*(stream(engine, prompt, str(number)) for number, prompt in enumerate(prompts)))
    finally:
        engine.shutdown()


def main(model: str = "smollm2-135m") -> None:
    asyncio.run(generate_all(model))


if __name__ == "__main__":
    main(*sys.argv[1:])
