"""OpenVINO GenAI's continuous batching on the CPU, from the GGUF: run_openvino.py FILE.gguf"""

import sys

from workloads import Conversation, Request

conversation = Conversation()
import numpy as np  # noqa: E402  the conversation's clock counts the imports
import openvino as ov  # noqa: E402
import openvino_genai as genai  # noqa: E402

scheduler = genai.SchedulerConfig()
scheduler.max_num_seqs = 64
scheduler.max_num_batched_tokens = 2048
scheduler.cache_size = 2  # GiB
scheduler.enable_prefix_caching = False
pipeline = genai.ContinuousBatchingPipeline(sys.argv[1], scheduler, "CPU", {}, {})


def generation_config(made: int) -> "genai.GenerationConfig":
    config = genai.GenerationConfig()
    config.max_new_tokens = config.min_new_tokens = made
    config.ignore_eos = True
    config.do_sample = config.apply_chat_template = False
    return config


def run(requests: list[Request]) -> int:
    prompts = [ov.Tensor(np.array([prompt], dtype=np.int64)) for prompt, _ in requests]
    results = pipeline.generate(prompts, [generation_config(made) for _, made in requests])
    return sum(len(result.m_generation_ids[0]) for result in results)


conversation.serve("openvino-genai", genai.__version__, run)
