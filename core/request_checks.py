"""What a request must be for the model to take it. The shell checks more, and says it better; but a client of another
make may send what no shell would.
"""

import math

from ..protocol.config import ModelConfig
from ..protocol.multimodal import check_order
from ..protocol.param_checks import below_vocab, check_logprob_limit, reject
from ..protocol.pooling import ResolvedPooling
from ..protocol.requests import EngineCoreRequest
from ..protocol.resolved_sampling import ResolvedSampling


def check_request(request: EngineCoreRequest, model_config: ModelConfig) -> None:
    """Raises ValueError. What the types of the message alone tell was checked when the request was decoded."""
    vocab_size = model_config.vocab_size
    for name in ("prompt_token_ids", "output_token_ids"):
        token_ids = getattr(request, name)
        if token_ids and not 0 <= min(token_ids) <= max(token_ids) < vocab_size:
            raise ValueError(f"{name} must lie in 0..{vocab_size - 1}")
    embeds = request.prompt_embeds
    if embeds is not None and (embeds.ndim != 2 or embeds.dtype.kind not in "fiu"):
        raise ValueError(f"prompt_embeds must be 2-D and of numbers, got {embeds.dtype} {list(embeds.shape)}")
    check_order(request.mm_features, len(request.prompt_token_ids))
    if not math.isfinite(request.arrival_time):
        reject("arrival_time", request.arrival_time, "finite")
    params = request.params
    if isinstance(params, ResolvedPooling) != (model_config.pooler is not None):
        kind = "generates" if model_config.pooler is None else "pools"
        raise ValueError(f"the engine {kind}, and the request asks for something else")
    if isinstance(params, ResolvedPooling):
        return
    length = params.beam_length
    if length is not None and not 0 <= length < len(request.prompt_token_ids):
        reject("beam_length", length, f"None or in [0, {len(request.prompt_token_ids)}), the prompt's length")
    if model_config.logits_processors and params.for_processors is None:
        reject("for_processors", None, "the caller's params, which the engine's logits processors look at")
    _check_params(params, model_config)


def _check_params(params: ResolvedSampling, model_config: ModelConfig) -> None:
    vocab_size = model_config.vocab_size
    for name in ("logprobs", "prompt_logprobs"):
        check_logprob_limit(name, getattr(params, name), model_config.max_logprobs, vocab_size)
    for name in ("logit_bias", "allowed_token_ids", "logprob_token_ids"):
        below_vocab(name, getattr(params, name) or (), vocab_size)
    for word in params.bad_words_token_ids:
        below_vocab("bad_words_token_ids", word, vocab_size)
