"""corespan as the subject of a benchmark: run_corespan.py MODEL KIND ENGINE_ARGS, KIND inproc, multiprocess or async,
ENGINE_ARGS a JSON object of EngineArgs fields."""

import asyncio
import json
import os
import sys

from workloads import Conversation, Request

GREEDY = {"temperature": 0, "ignore_eos": True}


def sync_runner(model: str, engine_args: dict):
    from corespan import LLM, SamplingParams

    llm = LLM(model, **engine_args)

    def run(requests: list[Request], **sampling) -> int:
        params = [SamplingParams(**GREEDY | sampling, max_tokens=made) for _, made in requests]
        prompts = [{"prompt_token_ids": prompt} for prompt, _ in requests]
        return sum(read(output.outputs[0]) for output in llm.generate(prompts, params, use_tqdm=False))

    return run


def async_runner(model: str, engine_args: dict):
    """One open stream a request; every delta is read."""
    from corespan import AsyncEngineArgs, AsyncLLM, RequestOutputKind, SamplingParams

    loop = asyncio.new_event_loop()

    async def build() -> AsyncLLM:
        return AsyncLLM.from_engine_args(AsyncEngineArgs(model=model, **engine_args))

    engine = loop.run_until_complete(build())

    async def read_stream(number: int, prompt: list[int], made: int, sampling: dict) -> int:
        params = SamplingParams(**GREEDY | sampling, max_tokens=made, output_kind=RequestOutputKind.DELTA)
        count = 0
        async for output in engine.generate({"prompt_token_ids": prompt}, params, str(number)):
            count += read(output.outputs[0])
        return count

    async def read_all(requests: list[Request], sampling: dict) -> int:
        streams = (read_stream(number, *request, sampling) for number, request in enumerate(requests))
        return sum(await asyncio.gather(*streams))

    return lambda requests, **sampling: loop.run_until_complete(read_all(requests, sampling))


def read(completion) -> int:
    """Looks at logprobs too, where there are any: they are laid out only then. Returns the number of tokens."""
    for entries in completion.logprobs or ():
        len(entries)
    return len(completion.token_ids)


def main() -> None:
    model, kind, engine_args = sys.argv[1], sys.argv[2], json.loads(sys.argv[3])
    os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0" if kind == "inproc" else "1"
    os.environ.setdefault("VLLM_LOGGING_LEVEL", "WARNING")
    conversation = Conversation()
    import corespan

    engine_args = {"max_model_len": 2048, "max_num_seqs": 64, "enable_prefix_caching": False} | engine_args
    run = (async_runner if kind == "async" else sync_runner)(model, {"disable_log_stats": True} | engine_args)
    conversation.serve(f"corespan {kind}", corespan.__version__, run)


if __name__ == "__main__":
    main()
