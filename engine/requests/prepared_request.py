"""`PreparedRequest`: what the input processor makes of a prompt and its params, and what the engines take in place of a
prompt.
"""

from dataclasses import dataclass

from ...protocol.params import RequestOutputKind, SamplingParams
from ...protocol.pooling import PoolingParams
from ...protocol.requests import EngineCoreRequest


@dataclass(slots=True)
class PreparedRequest:
    """`request` is for the core. By the rest the shell shapes its outputs: `params`, the engine's own copy, which other
    requests share; `prompt`, the prompt's text if known.
    """

    request: EngineCoreRequest
    params: SamplingParams | PoolingParams
    prompt: str | None
    output_kind: RequestOutputKind

    @property
    def n(self) -> int:
        """How many answers are wanted."""
        return 1 if isinstance(self.params, PoolingParams) else self.params.n

    @property
    def request_id(self) -> str:
        return self.request.request_id
