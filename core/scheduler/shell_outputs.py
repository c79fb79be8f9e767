"""Turns a step's results into the messages the shell receives, one frame per client. Used by the scheduler."""

import time

import numpy as np

from ...protocol.outputs import EngineCoreOutput, EngineCoreOutputs, LogprobsArrays, SchedulerStats
from .request import Request


class ShellOutputs:
    """Collects the outputs of one step by client."""

    def __init__(self) -> None:
        self._now = time.monotonic()
        self._frames: dict[int, EngineCoreOutputs] = {}

    def add(
        self,
        request: Request,
        new_token_ids: list[int],
        logprobs: LogprobsArrays | None = None,
        pooling_output: np.ndarray | None = None,
    ) -> None:
        """What the step added to the request; what is said once (its end, events, prompt figures) comes along."""
        output = EngineCoreOutput(request.client_request_id, new_token_ids, handle=request.handle)
        if request.is_finished:
            output.finish_reason = request.finish_reason
            output.stop_reason = request.stop_reason
            output.trace_headers = request.trace_headers
        output.new_logprobs = logprobs
        output.pooling_output = pooling_output
        if new_token_ids and not request.prompt_logprobs_sent:
            if request.prompt_logprobs:
                output.new_prompt_logprobs = LogprobsArrays.concatenated(request.prompt_logprobs)
                request.prompt_logprobs = []
            request.prompt_logprobs_sent = True
        if request.events:
            output.events = request.events
            request.events = []
        if request.prefill_stats is not None:
            output.prefill_stats = request.prefill_stats
            request.prefill_stats = None
        request.news_sent()
        self._frame(request.client_index).outputs.append(output)

    def add_plain(self, client_index: int, handles: list[int], token_ids: list[int]) -> None:
        """A token of each of the client's requests, with nothing else to report."""
        frame = self._frame(client_index)
        frame.handles += handles
        frame.token_ids += token_ids

    def _frame(self, client_index: int) -> EngineCoreOutputs:
        frame = self._frames.get(client_index)
        if frame is None:
            frame = self._frames[client_index] = EngineCoreOutputs(timestamp=self._now)
        return frame

    def build(self, stats: SchedulerStats | None) -> dict[int, EngineCoreOutputs]:
        """A frame per client that has outputs. The statistics go to client 0: of gauges, one client has the latest."""
        if stats is not None:
            self._frame(0).scheduler_stats = stats
        return self._frames


def row_of(logprobs: LogprobsArrays, row: int, num_logprobs: int) -> LogprobsArrays:
    """One request's row, cut to the k it asked for; all columns for -1. A copy: in process, the caller keeps it as long
    as the request's output, and a view would keep the whole batch's arrays with it."""
    width = logprobs.token_ids.shape[1] if num_logprobs < 0 else num_logprobs + 1
    return LogprobsArrays(
        logprobs.token_ids[row : row + 1, :width].copy(),
        logprobs.logprobs[row : row + 1, :width].copy(),
        logprobs.ranks[row : row + 1].copy(),
    )
