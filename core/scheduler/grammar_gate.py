"""Structured outputs as the scheduler deals with them: whose grammar is ready, which tokens are allowed in a step, and
whether a sampled token was. The grammars themselves are the structured-output manager's.
"""

from collections.abc import Iterable
from typing import Protocol

import numpy as np

from ...protocol.errors import text_of
from .request import Request, RequestStatus
from .runner_messages import SchedulerOutput


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

    def is_complete(self, request: Request) -> bool:
        """Whether the text has ended, and no token that the model can draw would say so."""
        ...


class GrammarGate:
    """The scheduler's questions to the manager; None where there is no manager, and then no request has a grammar."""

    def __init__(self, manager: GrammarManager | None) -> None:
        self._manager = manager

    def poll(self, compiling: Iterable[Request]) -> tuple[list[Request], list[tuple[Request, str]]]:
        """Those of the requests that need wait no longer: with a grammar, and with the error that took its place."""
        ready: list[Request] = []
        failed: list[tuple[Request, str]] = []
        for request in compiling:
            try:
                if self._the_manager.is_grammar_ready(request):
                    ready.append(request)
            except BaseException as error:  # whatever a grammar compiler raises is this request's fault alone
                failed.append((request, text_of(error)))
        return ready, failed

    def constrain(self, output: SchedulerOutput, requests: list[Request]) -> None:
        """Say in the plan which tokens the requests' grammars allow, for those that sample one in this step."""
        constrained = [request for request in requests if request.num_computed_tokens == request.num_tokens]
        if constrained:
            output.structured_rows = [request.row for request in constrained]
            output.grammar_bitmask = self._the_manager.grammar_bitmask(constrained)

    def accept(self, request: Request, token_id: int) -> bool:
        """Advance the grammar; whether that ends the request: with an error where the token breaks the grammar."""
        if not self._the_manager.accept_token(request, token_id):
            request.status = RequestStatus.FINISHED_ERROR
            request.stop_reason = f"token {token_id} breaks the grammar of the structured output"
        elif self._the_manager.is_complete(request):
            request.status = RequestStatus.FINISHED_STOPPED
        return request.is_finished

    @property
    def _the_manager(self) -> GrammarManager:
        if self._manager is None:
            raise ValueError("structured outputs need a structured-output manager")
        return self._manager
