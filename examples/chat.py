"""Answers a conversation. Usage: python examples/chat.py [MODEL]"""

import sys

from corespan import LLM, SamplingParams


def main(model: str = "smollm2-135m") -> None:
    conversation = [
        {"role": "system", "content": "Answer in one sentence."},
        {"role": "user", "content": "Why is the sky blue?"},
    ]
    with LLM(model, max_model_len=512) as llm:
        (output,) = llm.chat(conversation, SamplingParams(temperature=0.2, max_tokens=48, seed=1))
        print(output.outputs[0].text)


if __name__ == "__main__":
    main(*sys.argv[1:])
