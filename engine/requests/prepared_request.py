"""`PreparedRequest`: what the input processor makes of a prompt and its params, and what the engines take in place of a
prompt.
"""

import functools
import logging
from dataclasses import dataclass

from ...protocol.params import RequestOutputKind, SamplingParams
from ...protocol.requests import EngineCoreRequest

logger = logging.getLogger("corespan.engine")


@dataclass(slots=True)
class PreparedRequest:
    """`request` is for the core. By the rest the shell shapes its outputs: `params`, the engine's own copy, which other
    requests share; `prompt`, the prompt's text if known.
    """

    request: EngineCoreRequest
    params: SamplingParams
    prompt: str | None
    output_kind: RequestOutputKind

    @property
    def request_id(self) -> str:
        return self.request.request_id


def adopt(request_id: str, prepared: PreparedRequest, prompt_text: str | None) -> PreparedRequest:
    """The request, whose own id wins over `request_id`. Warns, the first time, that rendered prompts are the way."""
    _warn_once()
    if prepared.request_id != request_id:
        logger.warning("The prepared request's own id %r wins over %r", prepared.request_id, request_id)
    if prompt_text is not None:
        prepared.prompt = prompt_text
    return prepared


@functools.cache
def _warn_once() -> None:
    logger.warning("add_request() was handed a prepared request; pass a prompt rendered by Renderer instead")
