"""Requests that callers processed themselves and hand to `add_request` in place of a prompt."""

import functools
import logging

from ...protocol.requests import EngineCoreRequest

logger = logging.getLogger("corespan.engine")


def adopt(request_id: str, request: EngineCoreRequest) -> EngineCoreRequest:
    """The request, whose own id wins over `request_id`. Warns, the first time, that rendered prompts are the way."""
    _warn_once()
    if request.request_id != request_id:
        logger.warning("The prepared request's own id %r wins over %r", request.request_id, request_id)
    return request


@functools.cache
def _warn_once() -> None:
    logger.warning("add_request() was handed an EngineCoreRequest; pass a prompt rendered by Renderer instead")
