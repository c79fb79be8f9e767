"""A long prefix that many prompts share is computed once."""

import sys

from vllm.distributed import cleanup_dist_env_and_memory

from vllm import LLM, SamplingParams

PREFIX = "You are an expert school principal, and you have been asked to interview a new teacher. " * 3
PROMPTS = [PREFIX + prompt for prompt in ("Hello, my name is", "The president is", "The future of AI is")]


def main():
    sampling_params = SamplingParams(temperature=0.0, max_tokens=8)
    options = {"max_model_len": 512, "num_gpu_blocks_override": 128, "gpu_memory_utilization": 0.4}

    regular_llm = LLM(model=sys.argv[1], enable_prefix_caching=False, **options)
    regular = [output.outputs[0].text for output in regular_llm.generate(PROMPTS, sampling_params)]
    del regular_llm
    cleanup_dist_env_and_memory()

    prefix_cached_llm = LLM(model=sys.argv[1], enable_prefix_caching=True, **options)
    prefix_cached_llm.generate(PROMPTS[0], sampling_params)
    outputs = prefix_cached_llm.generate(PROMPTS, sampling_params)
    cached = [output.outputs[0].text for output in outputs]

    print(f"Generated answers are the same: {regular == cached}")
    print(f"All prompts hit the cache: {all(output.num_cached_tokens > 0 for output in outputs)}")


if __name__ == "__main__":
    main()
