"""The exceptions a caller can meet. All of them are raised in the user's process."""


class EngineDeadError(Exception):
    """The engine core is gone: nothing in flight will finish and nothing new is accepted.

    `cause` is the core's own last words (a traceback, an exit code), when it left any.
    """

    def __init__(self, cause: str | None = None) -> None:
        message = "The engine core has died; see the log or the cause for the reason."
        super().__init__(f"{message} Cause: {cause}" if cause else message)
        self.cause = cause


class EngineGenerateError(Exception):
    """One request failed inside `generate()`; the engine and every other request go on."""


class ProtocolError(Exception):
    """A frame that does not decode to the message expected: truncated, oversized, of another shape or type."""


class VLLMValidationError(ValueError):
    """A parameter outside its legal range. `parameter` names the field, `value` is what was given."""

    def __init__(self, message: str, *, parameter: str | None = None, value: object = None) -> None:
        super().__init__(message)
        self.parameter = parameter
        self.value = value
