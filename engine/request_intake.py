"""The steps that both engines take between a processed request and the core."""

import logging

from ..protocol.requests import EngineCoreRequest
from .parallel_sampling import ParentRequest

logger = logging.getLogger("corespan.engine")


class RequestIntake:
    """Takes in prepared requests and fans requests with n > 1 out."""

    def __init__(self) -> None:
        self._warned = False

    def adopt(self, request_id: str, request: EngineCoreRequest) -> EngineCoreRequest:
        """A request that the caller prepared; its own id wins. Warns once that rendered prompts are the way."""
        if not self._warned:
            self._warned = True
            logger.warning("add_request() was handed an EngineCoreRequest; pass a rendered prompt instead")
        if request.request_id != request_id:
            logger.warning("The prepared request's own id %r wins over %r", request.request_id, request_id)
        return request

    def fan_out(self, request: EngineCoreRequest) -> tuple[ParentRequest | None, list[EngineCoreRequest]]:
        """The requests to send: itself, or a child for each of its n answers, and their parent."""
        n = request.sampling_params.n
        if n == 1:
            return None, [request]
        parent = ParentRequest(request)
        return parent, [parent.make_child(index) for index in range(n)]
