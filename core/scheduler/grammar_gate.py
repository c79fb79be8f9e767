"""Structured outputs as the scheduler deals with them: who waits for a grammar, which tokens are allowed in a step, and
whether a sampled token was. The grammars themselves are the structured-output manager's.
"""

from typing import Protocol

import numpy as np

from ...protocol.errors import text_of
from .output import SchedulerOutput
from .request import Request, RequestStatus


class GrammarManager(Protocol):
    """The part of the structured-output manager that the scheduler needs. `grammar_init` was called before."""

    def is_grammar_ready(self, request: Request) -> bool:
        """Whether compilation is done. Raises what made it fail."""
        ...

    def grammar_bitmask(self, requests: list[Request]) -> np.ndarray:
        """[len(requests), ceil(vocab_size / 32)] int32, bit set = token allowed."""
        ...

    def accept_token(self, request: Request, token_id: int) -> bool:
        """Advance the request's grammar; False when the token breaks it."""
        ...


class GrammarGate:
    """Holds the requests whose grammar is being compiled."""

    def __init__(self, manager: GrammarManager | None) -> None:
        self._manager = manager
        self._compiling: dict[str, Request] = {}

    def __len__(self) -> int:
        return len(self._compiling)

    def add(self, request: Request) -> None:
        self._compiling[request.request_id] = request

    def remove(self, request: Request) -> None:
        self._compiling.pop(request.request_id, None)

    def poll(self) -> tuple[list[Request], list[tuple[Request, str]]]:
        """Let go the requests that need wait no longer: those with a grammar, and those whose grammar failed."""
        ready: list[Request] = []
        failed: list[tuple[Request, str]] = []
        for request in self._compiling.values():
            try:
                if self._the_manager.is_grammar_ready(request):
                    ready.append(request)
            except BaseException as error:  # whatever a grammar compiler raises is this request's fault alone
                failed.append((request, text_of(error)))
        for request in [*ready, *(request for request, _ in failed)]:
            del self._compiling[request.request_id]
        return ready, failed

    def constrain(self, output: SchedulerOutput, requests: list[Request]) -> None:
        """Say in the plan which tokens the requests' grammars allow, for those that sample one in this step."""
        constrained = [request for request in requests if request.num_computed_tokens == request.num_tokens]
        if constrained:
            output.structured_req_ids = [request.request_id for request in constrained]
            output.grammar_bitmask = self._the_manager.grammar_bitmask(constrained)

    def accept(self, request: Request, token_id: int) -> bool:
        """Advance the grammar; a token that breaks it ends the request with an error."""
        if self._the_manager.accept_token(request, token_id):
            return True
        request.status = RequestStatus.FINISHED_ERROR
        request.stop_reason = f"token {token_id} breaks the grammar of the structured output"
        return False

    @property
    def _the_manager(self) -> GrammarManager:
        if self._manager is None:
            raise ValueError("structured outputs need a structured-output manager")
        return self._manager
