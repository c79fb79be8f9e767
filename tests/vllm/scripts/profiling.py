"""A trace of what the engine does."""

import sys
from pathlib import Path

from vllm import LLM, SamplingParams


def main():
    llm = LLM(
        model=sys.argv[1],
        max_model_len=512,
        num_gpu_blocks_override=64,
        tensor_parallel_size=1,
        profiler_config={"profiler": "torch", "torch_profiler_dir": sys.argv[2]},
    )
    llm.start_profile()
    outputs = llm.generate(["Hello, my name is"], SamplingParams(temperature=0.8, top_p=0.95, max_tokens=4))
    llm.stop_profile()
    print(f"Generated text: {outputs[0].outputs[0].text!r}")
    print(f"Traces: {len(list(Path(sys.argv[2]).glob('*.json')))}")


if __name__ == "__main__":
    main()
