"""Shows the likeliest tokens at each position. Usage: python examples/logprobs.py [MODEL]"""

import sys

from corespan import LLM, SamplingParams


def main(model: str = "smollm2-135m") -> None:
    with LLM(model, max_model_len=512) as llm:
        (output,) = llm.generate("The capital of France is", SamplingParams(temperature=0, max_tokens=4, logprobs=3))
        for position in output.outputs[0].logprobs or ():
            print({logprob.decoded_token: round(logprob.logprob, 2) for logprob in position.values()})


if __name__ == "__main__":
    main(*sys.argv[1:])
