"""Logits processors: the interface and the parts for users' own (`row_states`), and every engine's (`builtin`)."""

from ....shared.logits_processors import AddedRequest, BatchUpdate, LogitsProcessor, MoveDirectionality
from .row_states import AdapterLogitsProcessor, RequestLogitsProcessor, process_dict_updates

__all__ = [
    "AdapterLogitsProcessor",
    "AddedRequest",
    "BatchUpdate",
    "LogitsProcessor",
    "MoveDirectionality",
    "RequestLogitsProcessor",
    "process_dict_updates",
]
