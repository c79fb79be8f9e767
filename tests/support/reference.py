"""transformers, as the reference for what the engine must generate."""

from collections.abc import Sequence
from typing import Any


class Reference:
    """The model in a folder, in float32. Token ids in and out."""

    def __init__(self, folder: str) -> None:
        import torch
        from transformers import AutoModelForCausalLM

        self._torch = torch
        self.model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()

    def greedy(self, prompt_token_ids: Sequence[int], max_tokens: int, **options: Any) -> list[int]:
        """The tokens that follow the prompt, the end token included."""
        return self.generate(prompt_token_ids, max_new_tokens=max_tokens, do_sample=False, **options)[0]

    def generate(self, prompt_token_ids: Sequence[int], **options: Any) -> list[list[int]]:
        prompt = self._torch.tensor([list(prompt_token_ids)])
        with self._torch.inference_mode():
            sequences = self.model.generate(
                prompt, attention_mask=self._torch.ones_like(prompt), pad_token_id=0, **options
            )
        return [sequence[prompt.shape[1] :].tolist() for sequence in sequences]

    def logprobs(self, token_ids: Sequence[int]) -> Any:
        """[len(token_ids), vocab_size] float32: row i is the distribution after token i."""
        return self._torch.from_numpy(self.logits(token_ids)).log_softmax(-1).numpy()

    def logits(self, token_ids: Sequence[int]) -> Any:
        """The same before the softmax."""
        with self._torch.inference_mode():
            return self.model(self._torch.tensor([list(token_ids)])).logits[0].numpy()
