"""A user's processor whose exceptions end the requests they concern, and nothing else. Used by `SamplingBatch`."""

from typing import TYPE_CHECKING

from ....protocol.errors import may_be_ctrl_c, raised_in
from ....protocol.params import SamplingParams
from ....shared.logits_processors import BatchUpdate, LogitsProcessor, RowsFailed

if TYPE_CHECKING:
    import torch


class GuardedProcessor(LogitsProcessor):
    """Passes everything on. Where that raises, the logits of the rows in question become NaN and `failures` says why,
    until each row has another request: a processor that missed a change of the batch is not trusted with its rows.
    """

    def __init__(self, processor: LogitsProcessor) -> None:
        self.processor = processor
        self.failures: dict[int, str] = {}  # by row
        self._name = type(processor).__qualname__
        self._rows: set[int] = set()  # that have a request

    def check_params(self, params: SamplingParams) -> None:
        """`validate_params` of the class. Raises ValueError, whatever that raises."""
        try:
            type(self.processor).validate_params(params)
        except ValueError:
            raise
        except BaseException as error:
            if may_be_ctrl_c(error):
                raise
            raise ValueError(raised_in(f"{self._name}.validate_params", error)) from error

    def is_argmax_invariant(self) -> bool:
        try:
            return not self.failures and self.processor.is_argmax_invariant()
        except BaseException as error:
            self._fail("is_argmax_invariant", error)
            return False

    def is_active(self) -> bool:
        try:
            return bool(self.failures) or self.processor.is_active()
        except BaseException as error:
            self._fail("is_active", error)
            return True

    def update_state(self, batch_update: BatchUpdate | None) -> None:
        if batch_update is not None:
            self._follow(batch_update)
        try:
            self.processor.update_state(batch_update)
        except BaseException as error:
            self._fail("update_state", error)

    def apply(self, logits: "torch.Tensor") -> "torch.Tensor":
        try:
            result = self.processor.apply(logits)
            if result is not logits:
                logits.copy_(result)
        except RowsFailed as failed:
            self.failures |= {row: raised_in(f"{self._name}.apply", error) for row, error in failed.errors.items()}
        except BaseException as error:
            self._fail("apply", error)
        if self.failures:
            logits[list(self.failures)] = float("nan")
        return logits

    def _follow(self, update: BatchUpdate) -> None:
        for row in update.removed:
            self._rows.discard(row)
            self.failures.pop(row, None)
        for request in update.added:
            self._rows.add(request.row)
            self.failures.pop(request.row, None)

    def _fail(self, method: str, error: BaseException) -> None:
        if may_be_ctrl_c(error):
            raise error
        self.failures |= dict.fromkeys(self._rows, raised_in(f"{self._name}.{method}", error))
