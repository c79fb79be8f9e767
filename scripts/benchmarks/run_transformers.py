"""transformers' generate() on one static left-padded batch, bf16: run_transformers.py HF_FOLDER"""

import sys

from workloads import Conversation, Request

conversation = Conversation()
import torch  # noqa: E402  the conversation's clock counts the imports
import transformers  # noqa: E402

model = transformers.AutoModelForCausalLM.from_pretrained(sys.argv[1], dtype=torch.bfloat16).eval()


def run(requests: list[Request]) -> int:
    """What a request did not ask for (padding, tokens past its own end) is this engine's own cost."""
    longest = max(len(prompt) for prompt, _ in requests)
    most = max(made for _, made in requests)
    ids = torch.tensor([[0] * (longest - len(prompt)) + prompt for prompt, _ in requests])
    mask = torch.tensor([[0] * (longest - len(prompt)) + [1] * len(prompt) for prompt, _ in requests])
    with torch.inference_mode():
        model.generate(ids, attention_mask=mask, max_new_tokens=most, min_new_tokens=most, do_sample=False)
    return sum(made for _, made in requests)


conversation.serve("transformers", transformers.__version__, run)
