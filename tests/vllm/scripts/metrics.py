"""The engine's figures as objects."""

import sys

from vllm.v1.metrics.reader import Counter, Gauge, Histogram, Vector

from vllm import LLM, SamplingParams


def main():
    llm = LLM(model=sys.argv[1], max_model_len=512, num_gpu_blocks_override=64, disable_log_stats=False)
    llm.generate(["Hello, my name is", "The capital of France is"], SamplingParams(max_tokens=8, ignore_eos=True))

    for metric in llm.get_metrics():
        if isinstance(metric, Gauge):
            print(f"{metric.name} (gauge) = {metric.value}")
        elif isinstance(metric, Counter):
            print(f"{metric.name} (counter) = {metric.value}")
        elif isinstance(metric, Vector):
            print(f"{metric.name} (vector) = {metric.values}")
        elif isinstance(metric, Histogram):
            print(f"{metric.name} (histogram) sum = {metric.sum} count = {metric.count}")


if __name__ == "__main__":
    main()
