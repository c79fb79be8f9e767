"""State per row that follows the batch, and `AdapterLogitsProcessor`, which sees one request at a time."""

import inspect
from abc import abstractmethod
from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING, Any, TypeAlias, TypeVar

from ....protocol.config import VllmConfig
from ....protocol.errors import may_be_ctrl_c
from ....protocol.params import SamplingParams
from ....shared.logits_processors import AddedRequest, BatchUpdate, LogitsProcessor, MoveDirectionality, RowsFailed

if TYPE_CHECKING:
    import torch

State = TypeVar("State")

RequestLogitsProcessor: TypeAlias = Callable[[list[int], Any], Any] | Callable[[list[int], list[int], Any], Any]
"""(output token ids, logits) or (prompt token ids, output token ids, logits) -> logits; these are a tensor [vocab]."""


def follow_batch(
    states: dict[int, State], batch_update: BatchUpdate | None, state_of: Callable[[AddedRequest], State | None]
) -> bool:
    """Takes the changes of the batch into `states`, by row; a request of which `state_of` makes None has none there.

    Returns whether anything changed.
    """
    if batch_update is None:
        return False
    changed = False
    for row in batch_update.removed:
        changed |= states.pop(row, None) is not None
    for request in batch_update.added:
        changed |= _place(states, request.row, state_of(request))
    for source, target, direction in batch_update.moved:
        moved, displaced = states.pop(source, None), states.pop(target, None)
        changed |= moved is not None or displaced is not None
        _place(states, target, moved)
        if direction is MoveDirectionality.SWAP:
            _place(states, source, displaced)
    return changed


def _place(states: dict[int, State], row: int, state: State | None) -> bool:
    changed = states.pop(row, None) is not None or state is not None
    if state is not None:
        states[row] = state
    return changed


def process_dict_updates(
    req_entries: dict[int, State],
    batch_update: BatchUpdate | None,
    new_state: Callable[[SamplingParams, list[int] | None, list[int]], State | None],
) -> bool:
    """`follow_batch` under vLLM's name: `new_state` is given a request's params, prompt and (live) output token ids."""
    return follow_batch(
        req_entries,
        batch_update,
        lambda request: new_state(request.params, request.prompt_token_ids, request.output_token_ids),
    )


class AdapterLogitsProcessor(LogitsProcessor):
    """One function a request instead of one for the batch: simpler to write, and slower."""

    def __init__(self, vllm_config: VllmConfig, device: "torch.device", is_pin_memory: bool) -> None:
        self.req_info: dict[int, partial[torch.Tensor]] = {}  # by row

    @abstractmethod
    def new_req_logits_processor(self, params: SamplingParams) -> RequestLogitsProcessor | None:
        """What changes this request's logits; None where nothing does."""

    def is_active(self) -> bool:
        return bool(self.req_info)

    def update_state(self, batch_update: BatchUpdate | None) -> None:
        process_dict_updates(self.req_info, batch_update, self._bound)

    def apply(self, logits: "torch.Tensor") -> "torch.Tensor":
        failed: dict[int, BaseException] = {}
        for row, processor in self.req_info.items():
            try:
                logits[row] = processor(logits[row])
            except BaseException as error:
                if may_be_ctrl_c(error):
                    raise
                failed[row] = error
        if failed:
            raise RowsFailed(failed)
        return logits

    def _bound(
        self, params: SamplingParams, prompt_token_ids: list[int] | None, output_token_ids: list[int]
    ) -> "partial[torch.Tensor] | None":
        try:
            processor = self.new_req_logits_processor(params)
            if processor is None:
                return None
            takes_prompt = len(inspect.signature(processor).parameters) == 3
        except BaseException as error:
            if may_be_ctrl_c(error):
                raise
            return partial(_raise, error)
        args = [prompt_token_ids or [], output_token_ids] if takes_prompt else [output_token_ids]
        return partial(processor, *args)


def _raise(error: BaseException, logits: "torch.Tensor") -> "torch.Tensor":
    """In place of a request's function, of one that could not be made."""
    raise error
