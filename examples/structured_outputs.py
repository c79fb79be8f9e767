"""Holds completions to a choice, a pattern and a JSON schema. Usage: python examples/structured_outputs.py [MODEL]"""

import sys

from corespan import LLM, SamplingParams, StructuredOutputsParams

PERSON = {
    "type": "object",
    "properties": {"name": {"type": "string", "maxLength": 12}, "age": {"type": "integer", "minimum": 0}},
    "required": ["name", "age"],
    "additionalProperties": False,
}


def main(model: str = "smollm2-135m") -> None:
    tasks = {
        "Is this review positive or negative? 'I loved it.'": StructuredOutputsParams(choice=["positive", "negative"]),
        "A date:": StructuredOutputsParams(regex=r"\d{4}-\d{2}-\d{2}"),
        "Describe a person in JSON.": StructuredOutputsParams(json=PERSON),
    }
    params = [SamplingParams(temperature=0, max_tokens=64, structured_outputs=held) for held in tasks.values()]
    with LLM(model, max_model_len=512) as llm:
        for output in llm.generate(list(tasks), params):
            print(f"{output.prompt!r} -> {output.outputs[0].text!r}")


if __name__ == "__main__":
    main(*sys.argv[1:])
