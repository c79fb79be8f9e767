"""What `LLM` does with a model that pools: vectors, classes, rewards and scores for texts."""

from abc import abstractmethod
from collections.abc import Mapping, Sequence
from typing import Any

from ..client.fair_lock import FairLock
from ..protocol.param_checks import reject
from ..protocol.pooling import PoolingParams, PoolingTask
from .llm_engine import LLMEngine
from .outputs.pooling_output import (
    ClassificationRequestOutput,
    EmbeddingRequestOutput,
    PoolingOutput,
    PoolingRequestOutput,
    ScoringRequestOutput,
)
from .ownership import OwnedByProcess, takes_turns
from .progress import UseTqdm
from .requests.adapters import LoRARequests
from .requests.pooling_resolver import behind_prompt
from .scoring import plan_scores
from .text.prompts import PromptType, to_prompt_list

PoolingParamsEach = PoolingParams | Sequence[PoolingParams] | None


class LLMPooling(OwnedByProcess):
    """A part of `LLM`. Prompts are given as to `generate`; `pooling_params` are one for all or one a prompt; None: as
    the model's files say. A model that generates, or does not do the task, raises ValueError.
    """

    llm_engine: LLMEngine
    turns: FairLock

    @takes_turns
    def encode(
        self,
        prompts: PromptType | Sequence[PromptType],
        pooling_params: PoolingParamsEach = None,
        *,
        use_tqdm: UseTqdm = True,
        lora_request: LoRARequests = None,
        pooling_task: PoolingTask | None = None,
        tokenization_kwargs: Mapping[str, Any] | None = None,
    ) -> list[PoolingRequestOutput[PoolingOutput]]:
        """What the pooler gives, as arrays: [size], or of the tasks "token_embed" and "token_classify" [tokens, size].

        `pooling_task` or each `pooling_params.task` says what is asked for. Raises ValueError where neither does.
        """
        if pooling_task is None and (pooling_params is None or isinstance(pooling_params, PoolingParams)):
            pooling_task = None if pooling_params is None else pooling_params.task
            if pooling_task is None:
                reject("pooling_task", None, "'embed', 'classify', 'token_embed' or 'token_classify'; see LLM.embed")
        batch = to_prompt_list(prompts)
        return self._pool(batch, pooling_params, pooling_task, use_tqdm, lora_request, tokenization_kwargs)

    @takes_turns
    def embed(
        self,
        prompts: PromptType | Sequence[PromptType],
        *,
        use_tqdm: UseTqdm = True,
        pooling_params: PoolingParamsEach = None,
        lora_request: LoRARequests = None,
        tokenization_kwargs: Mapping[str, Any] | None = None,
        prompt_name: str | None = None,
    ) -> list[EmbeddingRequestOutput]:
        """One vector a prompt, of length 1 unless the model's files or `use_activation=False` say otherwise.

        `prompt_name`: which of the prompts in the model's sentence-transformers files goes in front of each text.
        """
        batch = to_prompt_list(prompts)
        if prompt_name is not None:
            batch = behind_prompt(batch, prompt_name, self.llm_engine.model_config.pooler)
        outputs = self._pool(batch, pooling_params, "embed", use_tqdm, lora_request, tokenization_kwargs)
        return [EmbeddingRequestOutput.from_base(output) for output in outputs]

    @takes_turns
    def classify(
        self,
        prompts: PromptType | Sequence[PromptType],
        *,
        use_tqdm: UseTqdm = True,
        pooling_params: PoolingParamsEach = None,
        lora_request: LoRARequests = None,
        tokenization_kwargs: Mapping[str, Any] | None = None,
    ) -> list[ClassificationRequestOutput]:
        """The probability of each class, or its bare score with `use_activation=False`, one list a prompt."""
        batch = to_prompt_list(prompts)
        outputs = self._pool(batch, pooling_params, "classify", use_tqdm, lora_request, tokenization_kwargs)
        return [ClassificationRequestOutput.from_base(output) for output in outputs]

    @takes_turns
    def reward(
        self,
        prompts: PromptType | Sequence[PromptType],
        *,
        use_tqdm: UseTqdm = True,
        pooling_params: PoolingParamsEach = None,
        lora_request: LoRARequests = None,
        tokenization_kwargs: Mapping[str, Any] | None = None,
    ) -> list[PoolingRequestOutput[PoolingOutput]]:
        """The classes' scores for every token of each prompt, [tokens, classes]: of a reward model, its rewards."""
        batch = to_prompt_list(prompts)
        return self._pool(batch, pooling_params, "token_classify", use_tqdm, lora_request, tokenization_kwargs)

    @takes_turns
    def score(
        self,
        data_1: str | Sequence[str],
        data_2: str | Sequence[str],
        /,
        *,
        use_tqdm: UseTqdm = True,
        pooling_params: PoolingParams | None = None,
        lora_request: LoRARequests = None,
        tokenization_kwargs: Mapping[str, Any] | None = None,
        chat_template: str | None = None,
    ) -> list[ScoringRequestOutput]:
        """How well texts go together: one with each of several, or pair by pair.

        A model with a single class reads both as one prompt, by `chat_template` where one is given (it sees messages of
        the roles "query" and "document"). One that embeds gives the cosine of their vectors; with the task
        "token_embed" in `pooling_params`, the sum over the first's tokens of the largest product with one of the
        second's.
        """
        engine = self.llm_engine
        params = pooling_params or PoolingParams()
        plan = plan_scores(engine.model_config, engine.tokenizer, data_1, data_2, params, chat_template)
        outputs = self._pool(plan.prompts, plan.params, None, use_tqdm, lora_request, tokenization_kwargs)
        return plan.scores(outputs)

    @abstractmethod
    def _pool(
        self,
        prompts: Sequence[PromptType],
        pooling_params: PoolingParamsEach,
        task: PoolingTask | None,
        use_tqdm: UseTqdm,
        lora_request: LoRARequests,
        tokenization_kwargs: Mapping[str, Any] | None,
    ) -> list[PoolingRequestOutput[PoolingOutput]]:
        """One output a prompt. `task`: what all are asked for; None: what their params say."""
