"""Users' logits processors: their face, parts for them (`row_states`), and what contains their errors (`guarded`)."""

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
