"""What the shell keeps of one running request that pools. Owned and driven by the output processor."""

import numpy as np

from ...protocol.outputs import EngineCoreOutput, FinishReason
from ...protocol.requests import EngineCoreRequest
from ..metrics.stats import RequestStateStats
from .output_collector import RequestOutputCollector
from .pooling_output import PoolingOutput, PoolingRequestOutput


class PoolingState:
    """To the output processor what `RequestState` is of a request that generates; there is one output, at the end."""

    parent = None
    session_open = False
    num_generated = 0
    max_tokens = None

    def __init__(
        self,
        request: EngineCoreRequest,
        queue: RequestOutputCollector | None,
        stats: RequestStateStats | None,
    ) -> None:
        self.request = request
        self.request_id = request.request_id
        self.external_req_id = request.external_req_id or request.request_id
        self.prompt_token_ids = request.prompt_token_ids
        self.queue = queue
        self.stats = stats
        self.num_cached_tokens: int | None = None
        self._data = np.empty(0, dtype=np.float32)

    def absorb(self, output: EngineCoreOutput) -> None:
        if output.prefill_stats is not None and self.num_cached_tokens is None:
            self.num_cached_tokens = output.prefill_stats.num_cached_tokens
        if output.pooling_output is not None:
            self._data = output.pooling_output

    def make_output(
        self, finish_reason: FinishReason | None, stop_reason: int | str | None
    ) -> PoolingRequestOutput[PoolingOutput] | None:
        """None before the end."""
        if finish_reason is None:
            return None
        return PoolingRequestOutput(
            self.external_req_id,
            PoolingOutput(self._data),
            self.prompt_token_ids,
            self.num_cached_tokens,
            True,
            str(finish_reason),
            stop_reason,
            self.stats,
            None if self.request.adapter is None else self.request.adapter.request,
        )
