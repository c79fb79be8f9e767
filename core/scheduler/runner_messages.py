"""What the scheduler tells the model runner at each step, and what the runner answers. Never leaves the core.

Both call a request by its row in the batch, which it is given when it enters.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np

from ...protocol.lora import LoadedAdapter
from ...protocol.multimodal import MultiModalFeatureSpec
from ...protocol.outputs import LogprobsArrays
from ...protocol.pooling import ResolvedPooling
from ...protocol.resolved_sampling import ResolvedSampling


@dataclass(slots=True)
class NewRequestData:
    """A request that enters the batch: for the first time, or again after a preemption.

    `row` is its own until it leaves. `token_ids` are all its tokens so far, prompt first; the first
    `num_computed_tokens` are in the cache already. `block_ids`: by KV group, its blocks in the order of its tokens; 0,
    the null block, for those that are not read.
    """

    row: int
    token_ids: list[int]
    num_prompt_tokens: int
    sampling_params: ResolvedSampling
    noise_seed: int
    block_ids: list[list[int]]
    num_computed_tokens: int
    prompt_embeds: np.ndarray | None = None
    adapter: LoadedAdapter | None = None
    mm_features: Sequence[MultiModalFeatureSpec] = ()
    pooling: ResolvedPooling | None = None


@dataclass(slots=True)
class SchedulerOutput:
    """One step's work, which begins with taking `removed_rows` out of the batch: finished, aborted or preempted since
    the last step. New requests may have their rows.

    rows: [num_reqs] int64, the requests with work, in the order in which they started; num_scheduled_tokens: [num_reqs]
    int64, of each, from where its last step ended. By row: `new_block_ids`, by KV group, of requests that are in the
    batch already; `drafts`, tokens that may follow a request's last one: they are computed behind it, and counted.
    `encoder_inputs`: the arrays of the pictures to be encoded before the model runs, by identifier; `encoder_dropped`:
    those whose embeddings are not needed any more, which go before that.
    `grammar_bitmask`: [len(structured_rows), ceil(vocab_size / 32)] int32, bit set = token allowed.
    """

    scheduled_new_reqs: list[NewRequestData]
    removed_rows: list[int]
    rows: np.ndarray
    num_scheduled_tokens: np.ndarray
    total_num_scheduled_tokens: int
    new_block_ids: dict[int, list[list[int]]] = field(default_factory=dict)
    drafts: dict[int, Sequence[int]] = field(default_factory=dict)
    encoder_inputs: dict[str, dict[str, np.ndarray]] = field(default_factory=dict)
    encoder_dropped: list[str] = field(default_factory=list)
    structured_rows: list[int] = field(default_factory=list)
    grammar_bitmask: np.ndarray | None = None


def no_rows() -> np.ndarray:
    return np.empty(0, dtype=np.int64)


@dataclass(slots=True)
class ModelRunnerOutput:
    """One token for every request whose tokens are all computed now; chunks of a longer prompt give none.

    rows, sampled_token_ids: [n] int64; they may change with the next step. `logprobs` has a line for each of them, with
    columns up to the largest k asked for; a request takes its first k + 1. By row: `further_token_ids`, those that
    follow where a draft held; `prompt_logprobs`, of requests that asked, the prompt positions computed in this step
    (chunk by chunk); `pooled`, the vectors of requests that pool and are through; `failed`, what is wrong with a
    request, which alone ends.
    """

    rows: np.ndarray = field(default_factory=no_rows)
    sampled_token_ids: np.ndarray = field(default_factory=no_rows)
    logprobs: LogprobsArrays | None = None
    further_token_ids: dict[int, list[int]] = field(default_factory=dict)
    prompt_logprobs: dict[int, LogprobsArrays] = field(default_factory=dict)
    pooled: dict[int, np.ndarray] = field(default_factory=dict)
    failed: dict[int, str] = field(default_factory=dict)
