"""Answers held to a choice, an expression, a schema and a grammar."""

import sys

from vllm.sampling_params import StructuredOutputsParams

from vllm import LLM, SamplingParams

SCHEMA = {
    "type": "object",
    "properties": {"brand": {"enum": ["Audi", "BMW"]}, "sold": {"type": "boolean"}},
    "required": ["brand", "sold"],
    "additionalProperties": False,
}
CONSTRAINTS = {
    "Choice": StructuredOutputsParams(choice=["Positive", "Negative"]),
    "Regex": StructuredOutputsParams(regex=r"[a-z]{3}@[a-z]{4}\.com"),
    "JSON": StructuredOutputsParams(json=SCHEMA, disable_any_whitespace=True),
    "Grammar": StructuredOutputsParams(grammar='root ::= "SELECT " column\ncolumn ::= "col_1" | "col_2"'),
}


def main():
    llm = LLM(
        model=sys.argv[1],
        max_model_len=512,
        num_gpu_blocks_override=64,
        structured_outputs_config={"backend": "auto"},
    )
    for title, constraint in CONSTRAINTS.items():
        outputs = llm.generate(
            prompts="Say something", sampling_params=SamplingParams(structured_outputs=constraint, max_tokens=60)
        )
        print(f"{title}: {outputs[0].outputs[0].text}")


if __name__ == "__main__":
    main()
