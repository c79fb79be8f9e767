"""Checks a structured output's grammar where the request is made. Called by the input processor."""

from ...protocol.errors import VLLMValidationError
from ...protocol.params import SamplingParams
from ...protocol.structured_outputs import StructuredOutputsParams


def validate_structured_outputs(params: SamplingParams, *, has_tokenizer: bool = True) -> None:
    """Raise VLLMValidationError, a ValueError, if the constraint is malformed, unsupported or impossible to meet."""
    if params.structured_outputs is None:
        return
    if not isinstance(params.structured_outputs, StructuredOutputsParams):
        raise TypeError(
            f"structured_outputs must be StructuredOutputsParams, got {type(params.structured_outputs).__name__}"
        )
    if not has_tokenizer:
        raise VLLMValidationError(
            "structured_outputs need a tokenizer, and the engine has none", parameter="structured_outputs"
        )
    from ...shared.grammar import check_grammar  # llguidance, only for requests that need it

    check_grammar(params.structured_outputs)
