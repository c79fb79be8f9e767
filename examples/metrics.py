"""Shows what an engine counts. Needs corespan[metrics]. Usage: python examples/metrics.py [MODEL]"""

import sys

from corespan import LLM, SamplingParams


def main(model: str = "smollm2-135m") -> None:
    with LLM(model, max_model_len=512, disable_log_stats=False) as llm:
        llm.generate(["The capital of France is"] * 4, SamplingParams(max_tokens=16))
        for metric in llm.get_metrics():
            if (value := getattr(metric, "value", None)) is not None:
                print(f"{metric.name} {value}")


if __name__ == "__main__":
    main(*sys.argv[1:])
