"""`runner`, `convert` and `pooler_config`, as callers write them, together with what a model's files say, made into the
`PoolerSpec` of an engine that pools. Called by `EngineArgs`."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal

from ..protocol.param_checks import reject
from ..protocol.pooling import DenseLayer, PoolerConfig, PoolerSpec, PoolingActivation, SequencePooling
from ..shared.attention_directions import attends_both_ways
from ..shared.tokenizer_files import read_tokenizer
from .model_files.sentence_transformers import SentenceTransformer

Runner = Literal["auto", "generate", "pooling"]
Convert = Literal["auto", "none", "embed", "classify"]

_EMBEDS = ("Model", "ForTextEncoding")
_CLASSIFIES = ("ForSequenceClassification",)
_ENCODERS = ("Bert", "Roberta", "XLMRoberta")
"""What the architectures' names begin with of models whose tokens attend in both directions."""


def pooler_spec(
    runner: Runner,
    convert: Convert,
    pooler_config: PoolerConfig | Mapping[str, Any] | None,
    hf_config: Mapping[str, Any],
    sentence_transformer: SentenceTransformer | None,
    tokenizer: str | None,
) -> PoolerSpec | None:
    """None of an engine that generates. What is given wins over a sentence-transformers folder, that over what models
    do by default: the last token's state, brought to length 1, or class scores as probabilities.

    Raises VLLMValidationError for options that the model does not allow, ValueError for files that are not supported.
    """
    given = _parsed(pooler_config)
    architecture = str(next(iter(hf_config.get("architectures") or []), ""))
    task = _task(runner, convert, architecture, sentence_transformer is not None, attends_both_ways(hf_config))
    if task is None:
        if pooler_config is not None:
            reject("pooler_config", pooler_config, "None where the engine generates; see runner")
        return None
    files = sentence_transformer if task == "embed" else None
    is_encoder = architecture.startswith(_ENCODERS)
    default: SequencePooling = "CLS" if is_encoder else "LAST"
    pooling: SequencePooling = given.pooling_type or given.seq_pooling_type or (files.pooling if files else default)
    if task == "embed":
        return PoolerSpec(
            task=task,
            pooling=pooling,
            activation="normalize",
            dense=files.dense if files else [],
            use_activation=_first_of(given.use_activation, files.normalize if files else None, True),
            dimensions=given.dimensions,
            prompts=files.prompts if files else {},
            whole_prompts=is_encoder or attends_both_ways(hf_config),
            is_encoder=is_encoder,
        )
    if given.dimensions is not None:
        reject("pooler_config.dimensions", given.dimensions, "None where the engine classifies")
    return _classifier(given, pooling, hf_config, tokenizer, architecture if is_encoder else None)


def _parsed(given: PoolerConfig | Mapping[str, Any] | None) -> PoolerConfig:
    if isinstance(given, PoolerConfig):
        return given
    if given is None:
        return PoolerConfig()
    fields = PoolerConfig.__struct_fields__
    if not isinstance(given, Mapping) or not given.keys() <= set(fields):
        reject("pooler_config", given, f"a PoolerConfig, or a dict with entries among {', '.join(fields)}")
    return PoolerConfig(**given)


def _task(
    runner: Runner, convert: Convert, architecture: str, has_modules: bool, both_ways: bool
) -> Literal["embed", "classify"] | None:
    """`has_modules`: it is a sentence-transformers folder. `both_ways`: its tokens see those behind them."""
    headless = architecture.endswith((*_EMBEDS, *_CLASSIFIES))
    pools = runner == "pooling" or (runner == "auto" and (headless or has_modules or both_ways))
    if not pools:
        if headless or both_ways:
            reason = "has no head to generate with" if headless else "attends to what it would have to generate"
            reject("runner", runner, f"'auto' or 'pooling': {architecture} {reason}")
        if convert not in ("auto", "none"):
            reject("convert", convert, "'auto' or 'none' where the engine generates; say runner='pooling' to pool")
        return None
    if convert == "none" and not headless:
        reject("convert", convert, f"'auto', 'embed' or 'classify': {architecture} generates by itself")
    if convert in ("embed", "classify"):
        return convert
    return "classify" if architecture.endswith(_CLASSIFIES) else "embed"


def _classifier(
    given: PoolerConfig,
    pooling: SequencePooling,
    hf_config: Mapping[str, Any],
    tokenizer: str | None,
    encoder: str | None,
) -> PoolerSpec:
    """The classes' scores come of a matrix of its own, or of rows of the head for the tokens that the config names.
    `encoder`: the architecture of one."""
    tokens = hf_config.get("classifier_from_token")
    difference = bool(hf_config.get("is_original_qwen3_reranker")) or hf_config.get("method") == "from_2_way_softmax"
    head_token_ids = [] if tokens is None else _token_ids(tokens, tokenizer)
    if difference and len(head_token_ids) != 2:
        reject("classifier_from_token", tokens, "two tokens, whose scores' difference is the result")
    if head_token_ids:
        num_labels = 1 if difference else len(head_token_ids)
    else:
        num_labels = _num_labels(hf_config)
    dense = [] if head_token_ids else _classifier_layers(encoder, num_labels, int(hf_config["hidden_size"]))
    return PoolerSpec(
        task="classify",
        pooling=pooling,
        activation=_class_activation(hf_config, num_labels),
        dense=dense,
        head_token_ids=head_token_ids,
        difference=difference,
        use_activation=_first_of(given.use_activation, None, True),
        num_labels=num_labels,
        logit_mean=given.logit_mean or 0.0,
        logit_sigma=given.logit_sigma or 1.0,
        whole_prompts=encoder is not None or attends_both_ways(hf_config),
        is_encoder=encoder is not None,
    )


def _classifier_layers(encoder: str | None, num_labels: int, size: int) -> list[DenseLayer]:
    """Encoders' classifiers stand on a dense layer with a tanh."""
    if encoder is None:
        return [DenseLayer("score", num_labels, size)]
    if encoder.startswith("Bert"):
        pooler = DenseLayer("bert.pooler.dense", size, size, True, "tanh")
        return [pooler, DenseLayer("classifier", num_labels, size, True)]
    dense = DenseLayer("classifier.dense", size, size, True, "tanh")
    return [dense, DenseLayer("classifier.out_proj", num_labels, size, True)]


def _num_labels(hf_config: Mapping[str, Any]) -> int:
    labels = hf_config.get("id2label")
    count = len(labels) if isinstance(labels, Mapping) else hf_config.get("num_labels", 2)
    if isinstance(count, bool) or not isinstance(count, int) or count < 1:
        reject("num_labels", count, "a number of classes")
    return count


def _class_activation(hf_config: Mapping[str, Any], num_labels: int) -> PoolingActivation:
    """As the config says of its problem, or of a cross-encoder's scores; else by the number of classes."""
    cross_encoder = hf_config.get("sentence_transformers")
    function = cross_encoder.get("activation_fn") if isinstance(cross_encoder, Mapping) else None
    function = function or hf_config.get("sbert_ce_default_activation_function")
    if function is not None:
        known: dict[str, PoolingActivation] = {"Identity": "identity", "Sigmoid": "sigmoid", "Softmax": "softmax"}
        module, _, name = str(function).rpartition(".")
        if not module.startswith("torch.nn.modules.") or name not in known:
            reject("activation_fn", function, f"one of torch.nn.modules' {', '.join(known)}")
        return known[name]
    problem = hf_config.get("problem_type")
    of_problem: dict[Any, PoolingActivation] = {
        "regression": "identity",
        "single_label_classification": "softmax",
        "multi_label_classification": "sigmoid",
    }
    return of_problem.get(problem, "sigmoid" if num_labels < 2 else "softmax")


def _token_ids(tokens: Any, tokenizer: str | None) -> list[int]:
    legal = "a list of tokens of the model's tokenizer"
    if not isinstance(tokens, list) or not tokens:
        reject("classifier_from_token", tokens, legal)
    if tokenizer is None:
        raise ValueError("classifier_from_token names tokens, and the engine has no tokenizer to look them up in")
    backend, _ = read_tokenizer(Path(tokenizer))
    ids = [backend.token_to_id(str(token)) for token in tokens]
    for token, token_id in zip(tokens, ids, strict=True):
        if token_id is None:
            reject("classifier_from_token", token, legal)
    return [token_id for token_id in ids if token_id is not None]


def _first_of(*values: bool | None) -> bool:
    return next(value for value in values if value is not None)
