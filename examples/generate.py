"""Completes a batch of prompts. Usage: python examples/generate.py [MODEL]"""

import sys

from corespan import LLM, SamplingParams


def main(model: str = "smollm2-135m") -> None:
    prompts = ["The capital of France is", "Once upon a time"]
    params = SamplingParams(temperature=0.8, top_p=0.95, max_tokens=32, seed=1)
    with LLM(model, max_model_len=512) as llm:
        for output in llm.generate(prompts, params):
            print(f"{output.prompt!r} -> {output.outputs[0].text!r}")


if __name__ == "__main__":
    main(*sys.argv[1:])
