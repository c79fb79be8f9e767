"""Pooling: what a caller asks of a model that gives vectors instead of tokens, and what the core is told of it."""

from typing import Annotated, Any, Literal, get_args

import msgspec
from msgspec import Meta

from .param_checks import as_bool, as_int, float_in, reject
from .params import RequestOutputKind

PoolingTask = Literal["embed", "classify", "token_embed", "token_classify"]
"""A vector or class scores for each text, or for each of its tokens."""

SequencePooling = Literal["CLS", "LAST", "MEAN"]
"""The first token's state, the last one's, or the mean of all."""

PoolingActivation = Literal["identity", "normalize", "softmax", "sigmoid"]
"""What follows the last matrix: nothing, or a vector brought to length 1, or scores made into probabilities."""

DenseActivation = Literal["identity", "tanh", "relu", "gelu", "sigmoid"]


class PoolingParams(msgspec.Struct, omit_defaults=True):
    """How one prompt is pooled, in vLLM's fields.

    `truncate_prompt_tokens`: keep the last so many tokens of the prompt, -1: what the model takes; what the tokenizer
    puts around a text is kept too, and counts. `dimensions`: keep
    the first so many of the vector's, for models made for that. `use_activation`: whether the vector is brought to
    length 1, or class scores become probabilities; None: as the model's files say, and if they are silent, yes.
    `task`: what is asked for; the methods of `LLM` set it. `skip_reading_prefix_cache`: compute what is cached, too;
    None: where the pooling needs all tokens.

    Checked when it is made: raises VLLMValidationError naming field, value and what is allowed.
    """

    truncate_prompt_tokens: int | None = None
    dimensions: int | None = None
    use_activation: bool | None = None
    task: PoolingTask | None = None
    skip_reading_prefix_cache: bool | None = None
    output_kind: RequestOutputKind = RequestOutputKind.FINAL_ONLY

    def __post_init__(self) -> None:
        if self.truncate_prompt_tokens is not None:
            legal = "None, -1, or a number of tokens of at least 1"
            count = as_int("truncate_prompt_tokens", self.truncate_prompt_tokens, legal)
            if count != -1 and count < 1:
                reject("truncate_prompt_tokens", count, legal)
        _check_dimensions(self.dimensions)
        for name in ("use_activation", "skip_reading_prefix_cache"):
            if getattr(self, name) is not None:
                as_bool(name, getattr(self, name))
        if self.task is not None and self.task not in get_args(PoolingTask):
            reject("task", self.task, f"None or one of {', '.join(get_args(PoolingTask))}")
        if self.output_kind != RequestOutputKind.FINAL_ONLY:
            reject("output_kind", self.output_kind, "RequestOutputKind.FINAL_ONLY: a vector comes as a whole")

    def clone(self) -> "PoolingParams":
        return msgspec.structs.replace(self)


class PoolerConfig(msgspec.Struct, frozen=True, kw_only=True):
    """How a model pools, as an engine is told; what is None here, its files say.

    `pooling_type` is another name of `seq_pooling_type`. `dimensions`: how many of a vector's a request without a wish
    gets. `logit_mean`, `logit_sigma`: class scores become (score - mean) / sigma.

    Raises VLLMValidationError naming field, value and what is allowed.
    """

    pooling_type: SequencePooling | None = None
    seq_pooling_type: SequencePooling | None = None
    use_activation: bool | None = None
    dimensions: int | None = None
    logit_mean: float | None = None
    logit_sigma: float | None = None

    def __post_init__(self) -> None:
        if self.pooling_type is not None and self.seq_pooling_type is not None:
            reject("pooling_type", self.pooling_type, "None where seq_pooling_type is given")
        for name in ("pooling_type", "seq_pooling_type"):
            if getattr(self, name) not in (None, *get_args(SequencePooling)):
                reject(name, getattr(self, name), f"None or one of {', '.join(get_args(SequencePooling))}")
        if self.use_activation is not None:
            as_bool("use_activation", self.use_activation)
        _check_dimensions(self.dimensions)
        if self.logit_mean is not None:
            float_in("logit_mean", self.logit_mean, -1e30, 1e30)
        if self.logit_sigma is not None:
            float_in("logit_sigma", self.logit_sigma, 0, 1e30, low_open=True)


class DenseLayer(msgspec.Struct, frozen=True, array_like=True):
    """One matrix behind the pooled states: activation(weight @ x + bias).

    The tensors are `name`.weight [rows, columns] and `name`.bias [rows], in the safetensors files of `folder`, or with
    "" in the model's own checkpoint.
    """

    name: str
    rows: int
    columns: int
    bias: bool = False
    activation: DenseActivation = "identity"
    folder: str = ""


class PoolerSpec(msgspec.Struct, frozen=True, kw_only=True):
    """How an engine's model pools: the result of `PoolerConfig`, of the model's files and of what models do by default.

    `dense`: applied one after the other to the pooled states. `head_token_ids`: instead of a classifier of its own the
    model has a head, whose rows for these tokens score the classes; `difference`: of two, and the one class is by how
    much the second exceeds the first. `use_activation`, `dimensions`: of requests that do not say. `num_labels`: 0 of a
    model that classifies nothing. `prompts`: by name, what the model was trained to see in front of a text.
    `whole_prompts`: tokens see those behind them, so a prompt is computed in one step, and nothing of it is cached.
    """

    task: Literal["embed", "classify"]
    pooling: SequencePooling
    activation: PoolingActivation
    dense: list[DenseLayer] = []
    head_token_ids: list[int] = []
    difference: bool = False
    use_activation: bool = True
    dimensions: int | None = None
    num_labels: int = 0
    is_encoder: bool = False
    logit_mean: float = 0.0
    logit_sigma: float = 1.0
    prompts: dict[str, str] = {}
    whole_prompts: bool = False

    @property
    def supported_tasks(self) -> tuple[str, ...]:
        return (self.task, f"token_{self.task}")


class ResolvedPooling(msgspec.Struct, frozen=True, array_like=True, tag="pooling", gc=False):
    """What the core needs to know of one request: which states of the last layer are pooled, "ALL" being each by
    itself; whether the result is cut to `dimensions`; what becomes of it then. `second_start`: of a pair, where its
    second text begins.
    """

    pooling: Literal["CLS", "LAST", "MEAN", "ALL"]
    activation: PoolingActivation = "identity"
    dimensions: Annotated[int, Meta(ge=1)] | None = None
    skip_reading_prefix_cache: bool = False
    second_start: Annotated[int, Meta(ge=0)] = 0


def _check_dimensions(dimensions: Any) -> None:
    if dimensions is not None and as_int("dimensions", dimensions, "None or at least 1") < 1:
        reject("dimensions", dimensions, "None or at least 1")
