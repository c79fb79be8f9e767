"""What n-gram speculation brings a single stream: where the answer copies from its prompt, and where nothing matches.

Both engines run in turn in this process, so that a drifting machine counts against both; ratios are what to quote.
"""

import argparse
import os
import statistics
import time

os.environ.setdefault("VLLM_ENABLE_V1_MULTIPROCESSING", "0")

from corespan import LLM, SamplingParams

SENTENCES = (
    "The quick brown fox jumps over the lazy dog. A journey of a thousand miles begins with a single step. "
    "All that glitters is not gold, and not all those who wander are lost. "
)
COPIES = f"Repeat the following text word by word, again and again.\n{SENTENCES * 3}\n{SENTENCES}"
MATCHES_NOTHING = "Once upon a time in a far away land there lived"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="smollm2-135m")
    parser.add_argument("--tokens", type=int, default=128, help="tokens of an answer [%(default)s]")
    parser.add_argument("--repeat", type=int, default=5, help="rounds [%(default)s]")
    parser.add_argument("--drafts", type=int, default=3, help="num_speculative_tokens [%(default)s]")
    options = parser.parse_args()
    config = {"method": "ngram", "num_speculative_tokens": options.drafts}
    engines = [
        LLM(options.model, max_model_len=2048),
        LLM(options.model, max_model_len=2048, speculative_config=config),
    ]
    cases = {
        "copies, greedy": (COPIES, SamplingParams(temperature=0, max_tokens=options.tokens, ignore_eos=True)),
        "nothing matches": (
            MATCHES_NOTHING,
            SamplingParams(temperature=1.5, seed=1, max_tokens=options.tokens, ignore_eos=True),
        ),
    }
    for name, (prompt, params) in cases.items():
        seconds: list[list[float]] = [[], []]
        for _ in range(options.repeat + 1):
            answers = []
            for which, llm in enumerate(engines):
                started = time.perf_counter()
                answers.append(llm.generate(prompt, params, use_tqdm=False)[0].outputs[0].token_ids)
                seconds[which].append(time.perf_counter() - started)
            assert answers[0] == answers[1], "speculation changed a token"
        plain, speculating = (options.tokens / statistics.median(each[1:]) for each in seconds)
        ratios = [a / b for a, b in zip(seconds[0][1:], seconds[1][1:], strict=True)]
        print(
            f"{name:16} plain {plain:7.1f} tok/s   speculating {speculating:7.1f} tok/s   "
            f"ratio {statistics.median(ratios):.2f} ({min(ratios):.2f} to {max(ratios):.2f})"
        )


if __name__ == "__main__":
    main()
