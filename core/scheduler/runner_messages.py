"""What the scheduler tells the model runner at each step, and what the runner answers. Never leaves the core."""

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np

from ...protocol.outputs import LogprobsArrays
from ...protocol.params import SamplingParams


@dataclass(slots=True)
class NewRequestData:
    """A request that enters the batch: for the first time, or again after a preemption.

    `token_ids` are all its tokens so far, prompt first; the first `num_computed_tokens` are in the cache already.
    `block_ids`: by KV group, its blocks in the order of its tokens; 0, the null block, for those that are not read.
    """

    req_id: str
    token_ids: list[int]
    num_prompt_tokens: int
    sampling_params: SamplingParams
    noise_seed: int
    block_ids: list[list[int]]
    num_computed_tokens: int
    prompt_embeds: np.ndarray | None = None


@dataclass(slots=True)
class SchedulerOutput:
    """One step's work. `num_scheduled_tokens` lists every scheduled request, in the order of the batch; each goes on
    where its last step ended. `new_block_ids` are for those that are in the batch already, by KV group.

    `drafts`: tokens that may follow a request's last one; they are computed behind it, counted in its scheduled tokens.
    `removed_req_ids` leave the batch before this step: finished, aborted or preempted since the last one.
    `grammar_bitmask`: [len(structured_req_ids), ceil(vocab_size / 32)] int32, bit set = token allowed.
    """

    scheduled_new_reqs: list[NewRequestData]
    new_block_ids: dict[str, list[list[int]]]
    num_scheduled_tokens: dict[str, int]
    total_num_scheduled_tokens: int
    removed_req_ids: set[str]
    structured_req_ids: list[str] = field(default_factory=list)
    grammar_bitmask: np.ndarray | None = None
    drafts: dict[str, Sequence[int]] = field(default_factory=dict)


@dataclass(slots=True)
class ModelRunnerOutput:
    """One token for every request whose tokens are all computed now; chunks of a longer prompt give none. Where a draft
    held, `further_token_ids` has those that follow it.

    `logprobs` has a row per entry of `req_ids`, with columns up to the largest k asked for; a request takes its first
    k + 1 of them.
    `prompt_logprobs`: for requests that asked, the prompt positions computed in this step (chunk by chunk).
    """

    req_ids: list[str]
    sampled_token_ids: list[int]
    logprobs: LogprobsArrays | None = None
    prompt_logprobs: dict[str, LogprobsArrays] = field(default_factory=dict)
    further_token_ids: dict[str, list[int]] = field(default_factory=dict)
    failed_reqs: dict[str, str] = field(default_factory=dict)  # request id -> error; that request alone ends
