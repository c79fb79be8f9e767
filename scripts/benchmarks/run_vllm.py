"""vLLM's CPU build, bf16: run_vllm.py HF_FOLDER"""

import os
import sys

from workloads import Conversation, Request


def main() -> None:
    os.environ.update(VLLM_CPU_KVCACHE_SPACE="4", HF_HUB_OFFLINE="1", VLLM_LOGGING_LEVEL="ERROR")
    conversation = Conversation()
    import vllm

    limits = {"max_model_len": 2048, "max_num_seqs": 64, "enable_prefix_caching": False}
    llm = vllm.LLM(sys.argv[1], dtype="bfloat16", **limits)

    def run(requests: list[Request]) -> int:
        params = [vllm.SamplingParams(temperature=0, max_tokens=made, ignore_eos=True) for _, made in requests]
        prompts = [{"prompt_token_ids": prompt} for prompt, _ in requests]
        return sum(len(output.outputs[0].token_ids) for output in llm.generate(prompts, params, use_tqdm=False))

    conversation.serve("vllm-cpu", vllm.__version__, run)


if __name__ == "__main__":
    main()
