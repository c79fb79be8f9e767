"""Gives a prompt as embeddings instead of tokens. Usage: python examples/prompt_embeds.py [MODEL]"""

import sys

import numpy as np

from corespan import LLM, SamplingParams


def main(model: str = "smollm2-135m") -> None:
    with LLM(model, max_model_len=512, enable_prompt_embeds=True) as llm:
        hidden_size = int(llm.model_config.hf_config["hidden_size"])
        noise = np.random.default_rng(0).normal(scale=0.05, size=(6, hidden_size)).astype(np.float32)
        (output,) = llm.generate({"prompt_embeds": noise}, SamplingParams(temperature=0, max_tokens=16))
        print(f"six vectors of {hidden_size} -> {output.outputs[0].text!r}")


if __name__ == "__main__":
    main(*sys.argv[1:])
