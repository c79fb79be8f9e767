"""From logits to tokens: the batch's parameters, logits processors, penalties, the draw itself and logprobs."""
