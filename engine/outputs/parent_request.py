"""One request with `n > 1` answers: the way of its children's outputs back into one stream."""

from ...protocol.params import RequestOutputKind
from ..requests.prepared_request import PreparedRequest
from .request_output import CompletionOutput


class ParentRequest:
    """The children, with one answer each, of a request with n > 1. The output processor knows it until the last has
    ended.
    """

    def __init__(self, prepared: PreparedRequest) -> None:
        self.request_id = prepared.request_id
        self.n = prepared.n
        self.child_ids: set[str] = set()  # running ones
        self.num_finished = 0
        self.max_num_generation_tokens = 0
        final_only = prepared.output_kind is RequestOutputKind.FINAL_ONLY
        self._collected: list[CompletionOutput] | None = [] if final_only else None

    @property
    def finished(self) -> bool:
        return self.num_finished == self.n

    def finish_child(self, child_id: str, num_generation_tokens: int) -> None:
        self.child_ids.discard(child_id)
        self.num_finished += 1
        self.max_num_generation_tokens = max(self.max_num_generation_tokens, num_generation_tokens)

    def collect(self, output: CompletionOutput) -> list[CompletionOutput]:
        """What to hand out now that a child has `output`: itself, or at the end all of them in order of index."""
        if self._collected is None:
            return [output]
        self._collected.append(output)
        if not self.finished:
            return []
        return sorted(self._collected, key=lambda collected: collected.index)
