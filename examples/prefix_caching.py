"""Shares the computation of a long common prefix. Usage: python examples/prefix_caching.py [MODEL]"""

import sys

from corespan import LLM, SamplingParams


def main(model: str = "smollm2-135m") -> None:
    prefix = "These are the rules of the house. " * 10
    params = SamplingParams(temperature=0, max_tokens=8)
    with LLM(model, max_model_len=512) as llm:
        llm.generate(prefix + "First question?", params)
        (output,) = llm.generate(prefix + "Second question?", params)
        print(f"{output.num_cached_tokens} of {len(output.prompt_token_ids or ())} prompt tokens were cached")


if __name__ == "__main__":
    main(*sys.argv[1:])
