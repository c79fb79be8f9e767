"""The same answers again, from one process."""

import os
import random
import sys

os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"

from vllm.utils.torch_utils import set_random_seed  # noqa: E402

from vllm import LLM, SamplingParams  # noqa: E402

SEED = 42


def generate():
    set_random_seed(SEED)
    llm = LLM(model=sys.argv[1], seed=SEED, max_model_len=512, num_gpu_blocks_override=64)
    sampling_params = SamplingParams(temperature=0.8, top_p=0.95, max_tokens=12)
    outputs = llm.generate(["Hello, my name is", "The future of AI is"], sampling_params)
    return [output.outputs[0].text for output in outputs], random.randint(0, 100)


def main():
    print(f"The same twice: {generate() == generate()}")


if __name__ == "__main__":
    main()
