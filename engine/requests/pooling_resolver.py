"""From a caller's `PoolingParams` to what the core is told. Used by the input processor."""

from collections.abc import Mapping, Sequence
from typing import Any, cast

import msgspec

from ...protocol.config import ModelConfig
from ...protocol.param_checks import reject
from ...protocol.pooling import PoolerSpec, PoolingParams, PoolingTask, ResolvedPooling
from ...protocol.resolved_sampling import ResolvedSampling
from ..text.prompts import PromptType, TextPrompt


def resolve_pooling(params: PoolingParams, model_config: ModelConfig) -> ResolvedPooling:
    """`params` may have been changed since it was made, and are checked again.

    Raises VLLMValidationError for what this model cannot do, ValueError where it does not pool at all.
    """
    params.__post_init__()
    spec = model_config.pooler
    if spec is None:
        raise ValueError(f"{model_config.served_model_name} generates; start the engine with runner='pooling' to pool")
    task = params.task or spec.task
    if task not in spec.supported_tasks:
        reject("task", task, f"one of {', '.join(spec.supported_tasks)}, which this model does")
    pooling = "ALL" if task.startswith("token_") else spec.pooling
    use_activation = spec.use_activation if params.use_activation is None else params.use_activation
    skip = params.skip_reading_prefix_cache
    needs_all = pooling != "LAST"  # the states of cached tokens are not kept
    if skip is False and needs_all:
        reject("skip_reading_prefix_cache", skip, f"None or True: {pooling} pooling needs every token's state")
    return ResolvedPooling(
        pooling=pooling,
        activation=spec.activation if use_activation else "identity",
        dimensions=_dimensions(params, spec, model_config),
        skip_reading_prefix_cache=bool(skip) or needs_all,
    )


def with_token_types(
    params: ResolvedPooling | ResolvedSampling, token_types: Sequence[int], num_tokens: int, model_config: ModelConfig
) -> ResolvedPooling:
    """`params` of a pair of texts. Raises VLLMValidationError where the model has no types, or these are none."""
    pooler = model_config.pooler
    if pooler is None or not pooler.is_encoder or not isinstance(params, ResolvedPooling):
        reject("token_type_ids", list(token_types), "absent: this model has no types of tokens")
    second_start = next((index for index, each in enumerate(token_types) if each), 0)
    num_types = int(model_config.hf_config.get("type_vocab_size", 2))
    expected = [0] * second_start + [1] * (num_tokens - second_start)
    if list(token_types) != (expected if second_start and num_types > 1 else [0] * num_tokens):
        kinds = "0 for each token of the first text, then 1 for each of the second" if num_types > 1 else "all 0"
        reject("token_type_ids", list(token_types), f"{kinds}, {num_tokens} in all")
    return msgspec.structs.replace(params, second_start=second_start)


def for_task(params: PoolingParams, task: PoolingTask | None) -> PoolingParams:
    """`params` with the task that is asked for; None: as they are. Raises VLLMValidationError for another."""
    if task is None or params.task == task:
        return params
    if params.task is not None:
        reject("task", params.task, f"None or {task!r}, which is what is asked for")
    return msgspec.structs.replace(params, task=task)


def behind_prompt(prompts: Sequence[PromptType], name: str, spec: PoolerSpec | None) -> list[PromptType]:
    """The texts with the model's prompt of that name in front. Raises VLLMValidationError for what has no such."""
    known = {} if spec is None else spec.prompts
    if name not in known:
        reject(
            "prompt_name", name, f"one of {', '.join(known)}" if known else "None: the model's files name no prompts"
        )
    behind: list[PromptType] = []
    for prompt in prompts:
        fields: Any = {"prompt": prompt} if isinstance(prompt, str) else prompt
        if not isinstance(fields, Mapping) or "prompt_token_ids" in fields or not isinstance(fields.get("prompt"), str):
            reject("prompt_name", name, "None where prompts are not texts")
        behind.append(cast(TextPrompt, {**fields, "prompt": known[name] + fields["prompt"]}))
    return behind


def _dimensions(params: PoolingParams, spec: PoolerSpec, model_config: ModelConfig) -> int | None:
    """How many the vector keeps; None: all."""
    dimensions = spec.dimensions if params.dimensions is None else params.dimensions
    if dimensions is None:
        return None
    if spec.task != "embed":
        reject("dimensions", dimensions, "None: scores of classes are not cut")
    hf_config = model_config.hf_config
    made_for = hf_config.get("matryoshka_dimensions")
    if not made_for and not hf_config.get("is_matryoshka"):
        legal = "None: the model was not made for shorter vectors (hf_overrides={'is_matryoshka': True} says it was)"
        reject("dimensions", dimensions, legal)
    if made_for and dimensions not in made_for:
        reject("dimensions", dimensions, f"one of {', '.join(map(str, made_for))}")
    size = spec.dense[-1].rows if spec.dense else int(hf_config["hidden_size"])
    if dimensions > size:
        reject("dimensions", dimensions, f"in 1..{size}")
    return dimensions
