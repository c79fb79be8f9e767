"""The shortest transformers program that streams a completion, for scripts/bench_startup: HF_FOLDER PROMPT"""

import sys

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, TextStreamer


class CharacterStreamer(TextStreamer):
    """Prints each token's text at once; the stock one waits for the end of a word."""

    def put(self, value: torch.Tensor) -> None:
        if self.next_tokens_are_prompt:
            self.next_tokens_are_prompt = False
            return
        print(self.tokenizer.decode(value.tolist()), end="", flush=True)

    def end(self) -> None:
        print()


folder, prompt = sys.argv[1:]
tokenizer = AutoTokenizer.from_pretrained(folder)
model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.bfloat16)
streamer = CharacterStreamer(tokenizer, skip_prompt=True)
model.generate(**tokenizer(prompt, return_tensors="pt"), max_new_tokens=8, do_sample=False, streamer=streamer)
