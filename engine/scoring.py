"""Scores of pairs of texts: what is pooled for them, and what comes of it. Used by `LLM.score` and the server."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import msgspec

from ..protocol.config import ModelConfig
from ..protocol.param_checks import reject, reject_type
from ..protocol.pooling import PoolingParams
from .outputs.pooling_output import PoolingOutput, PoolingRequestOutput, ScoringRequestOutput
from .requests.pooling_resolver import for_task
from .text.prompts import PromptType, TextPrompt, TokensPrompt
from .text.tokenizer import Tokenizer


@dataclass(frozen=True, slots=True)
class ScoringPlan:
    """`prompts` are to be pooled with `params`. `pairs`: the two prompts of each score, None where each is a pair."""

    prompts: list[PromptType]
    params: PoolingParams
    pairs: list[tuple[int, int]] | None

    def scores(self, outputs: Sequence[PoolingRequestOutput[PoolingOutput]]) -> list[ScoringRequestOutput]:
        """Raises RuntimeError where one of the requests failed."""
        if self.pairs is None:
            return [ScoringRequestOutput.from_base(output) for output in outputs]
        return [ScoringRequestOutput.of_pair(outputs[one], outputs[other]) for one, other in self.pairs]


def plan_scores(
    model_config: ModelConfig,
    tokenizer: Tokenizer | None,
    data_1: Any,
    data_2: Any,
    params: PoolingParams,
    template: str | None,
) -> ScoringPlan:
    """One text goes with each of several, or as many with as many. A model with one class reads both texts of a pair as
    one prompt, any other each by itself.

    Raises TypeError and ValueError for what is no text, for numbers of texts that do not match, and for a model that
    gives no scores.
    """
    ones, others = _paired(_texts("data_1", data_1), _texts("data_2", data_2))
    pooler = model_config.pooler
    if pooler is None:
        raise ValueError(
            f"scores need a model that pools; {model_config.served_model_name} generates. Start the engine with "
            "runner='pooling'"
        )
    if pooler.task == "embed":
        if template is not None:
            reject("chat_template", template, "None: this model reads each text by itself")
        number = {text: index for index, text in enumerate(dict.fromkeys([*ones, *others]))}
        pairs = [(number[one], number[other]) for one, other in zip(ones, others, strict=True)]
        return ScoringPlan(list(number), params if params.task else for_task(params, "embed"), pairs)
    if pooler.num_labels != 1:
        raise ValueError(f"scores need a model with one class, and this one has {pooler.num_labels}; use classify()")
    if tokenizer is None:
        raise ValueError("scores of pairs need a tokenizer, and this engine has none")
    keep = params.truncate_prompt_tokens
    if keep is not None:  # it is done here, to the second text alone
        params = msgspec.structs.replace(params, truncate_prompt_tokens=None)
    limit = model_config.max_model_len if keep == -1 else keep
    has_types = pooler.is_encoder and int(model_config.hf_config.get("type_vocab_size", 2)) > 1
    prompts = [_pair_prompt(tokenizer, *pair, template, limit, has_types) for pair in zip(ones, others, strict=True)]
    return ScoringPlan(prompts, for_task(params, "classify"), None)


def _pair_prompt(
    tokenizer: Tokenizer, query: str, document: str, template: str | None, limit: int | None, has_types: bool
) -> PromptType:
    """By the template, which sees messages of the roles "query" and "document", or as the tokenizer puts two texts
    together. `limit`: tokens in all, beyond which the document is cut."""
    if template is None:
        options: dict[str, Any] = {} if limit is None else {"truncation": "only_second", "max_length": limit}
        encoded = tokenizer(query, document, return_token_type_ids=True, **options)
        prompt = TokensPrompt(prompt_token_ids=encoded["input_ids"])
        if has_types:
            prompt["token_type_ids"] = encoded["token_type_ids"]
        return prompt
    text = _templated(tokenizer, query, document, template)
    if limit is None:
        return TextPrompt(prompt=text)
    document_ids = tokenizer.encode(document, add_special_tokens=False)
    while (excess := len(tokenizer.encode(text)) - limit) > 0 and document_ids:
        del document_ids[-excess:]
        cut = tokenizer.decode(document_ids).rstrip("\N{REPLACEMENT CHARACTER}")  # half a character
        text = _templated(tokenizer, query, cut, template)
    return TextPrompt(prompt=text)


def _templated(tokenizer: Tokenizer, query: str, document: str, template: str) -> str:
    messages = [{"role": "query", "content": query}, {"role": "document", "content": document}]
    return str(tokenizer.apply_chat_template(messages, chat_template=template, tokenize=False))


def _paired(ones: list[str], others: list[str]) -> tuple[list[str], list[str]]:
    if not ones or not others:
        raise ValueError("data_1 and data_2 must hold at least one text each")
    if len(ones) == 1:
        ones = ones * len(others)
    if len(ones) != len(others):
        raise ValueError(f"data_1 has {len(ones)} texts and data_2 {len(others)}: give one and several, or as many")
    return ones, others


def _texts(name: str, given: Any) -> list[str]:
    texts = [given] if isinstance(given, str) else given
    if not isinstance(texts, Sequence) or not all(isinstance(text, str) for text in texts):
        reject_type(name, given, "a text or a list of texts")
    return list(texts)
