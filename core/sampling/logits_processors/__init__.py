"""Logits processors: the interface for users' own (`interface`, `row_states`), and every engine's (`builtin`)."""

from .interface import AddedRequest, BatchUpdate, LogitsProcessor, MoveDirectionality
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
