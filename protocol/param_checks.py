"""Checks of single parameter values. Called by the structs in `params`; each returns the value in its wire type.

Every function raises VLLMValidationError (a ValueError) that names the field, what was given and what is legal.
"""

import math
import operator
from collections.abc import Iterable, Mapping
from typing import NoReturn

import msgspec

from .errors import VLLMValidationError

NOT_ENCODABLE = (TypeError, ValueError, OverflowError, RecursionError, msgspec.MsgspecError)
"""What encoding raises for a value that cannot travel in a message."""

_INT64 = range(-(2**63), 2**63)
"""What an integer field may hold at all: messages carry 64 bits."""


def reject(field: str, value: object, legal: str) -> NoReturn:
    """Raise the one error text all checks share."""
    raise VLLMValidationError(_complaint(field, value, legal), parameter=field, value=value)


def reject_type(field: str, value: object, legal: str) -> NoReturn:
    """The same text as a TypeError, for what is not even of the right kind."""
    raise TypeError(_complaint(field, value, legal))


def _complaint(field: str, value: object, legal: str) -> str:
    try:
        shown = repr(value)
    except RecursionError:
        shown = f"a {type(value).__name__} too deeply nested to show"
    except Exception:
        shown = f"a {type(value).__name__} that cannot be shown"
    if len(shown) > 80:
        shown = shown[:77] + "..."
    return f"{field} must be {legal}, got {shown}"


def as_int(field: str, value: object, legal: str) -> int:
    """Signed 64-bit integers of any kind (numpy's too), never booleans or floats."""
    if isinstance(value, bool) or not hasattr(value, "__index__"):
        reject(field, value, legal)
    try:
        number = operator.index(value)
    except TypeError:
        reject(field, value, legal)
    if number not in _INT64:
        reject(field, value, legal)
    return number


def check_end_ids(field: str, value: object, vocab_size: int) -> None:
    """What a model's files name as its end tokens: None, an id or a list of ids, each below `vocab_size`."""
    for token_id in value if isinstance(value, list | tuple) else [] if value is None else [value]:
        if isinstance(token_id, bool) or not isinstance(token_id, int) or not 0 <= token_id < vocab_size:
            reject(field, value, f"a token id of the model (0..{vocab_size - 1}) or a list of such ids")


def int_at_least(field: str, value: object, lowest: int, legal: str | None = None) -> int:
    legal = legal or f"an integer of at least {lowest}"
    number = as_int(field, value, legal)
    if number < lowest:
        reject(field, value, legal)
    return number


def as_finite_float(field: str, value: object, legal: str) -> float:
    """Real numbers of any kind, never booleans, strings, NaN or infinities."""
    if type(value) is not float:
        if isinstance(value, (bool, str, bytes)) or not hasattr(value, "__float__"):
            reject(field, value, legal)
        try:
            value = float(value)
        except (TypeError, ValueError, OverflowError):
            reject(field, value, legal)
    if not math.isfinite(value):
        reject(field, value, legal)
    return value


def float_in(field: str, value: object, low: float, high: float, *, low_open: bool = False) -> float:
    """A finite number in [low, high], or in (low, high] with `low_open`."""
    legal = f"a number in {'(' if low_open else '['}{low:g}, {high:g}]"
    number = as_finite_float(field, value, legal)
    if number > high or number < low or (low_open and number == low):
        reject(field, value, legal)
    return number


def as_seconds(field: str, value: object) -> float:
    """How long something may take; more than sixty years are refused, which no timer takes."""
    legal = "a number of seconds from 0 to 2**31"
    seconds = as_finite_float(field, value, legal)
    if not 0 <= seconds <= 2**31:
        reject(field, value, legal)
    return seconds


def as_bool(field: str, value: object) -> bool:
    if value is not True and value is not False:
        reject(field, value, "True or False")
    return value


def token_id_list(field: str, value: object) -> list[int]:
    """A new list of token ids; the upper bound depends on the model and is checked by `verify`."""
    legal = "a list of token ids (integers of at least 0)"
    if isinstance(value, (str, bytes, Mapping)) or not isinstance(value, Iterable):
        reject(field, value, legal)
    ids = []
    for item in value:
        if type(item) is not int:
            item = as_int(field, item, legal)
        if not 0 <= item < _INT64.stop:
            reject(field, item, legal)
        ids.append(item)
    return ids


def text_list(field: str, value: object) -> list[str]:
    """A new list of non-empty strings; one string stands for a list of itself."""
    legal = "a string or a list of strings, none of them empty, all of them valid Unicode"
    if isinstance(value, str):
        value = [value]
    if isinstance(value, (bytes, Mapping)) or not isinstance(value, Iterable):
        reject(field, value, legal)
    texts = list(value)
    for text in texts:
        if not isinstance(text, str) or not text or not is_encodable(text):
            reject(field, text, legal)
    return texts


def is_encodable(value: object) -> bool:
    """Whether it can travel in a message: plain data, integers of 64 bits."""
    try:
        msgspec.msgpack.encode(value)
    except NOT_ENCODABLE:
        return False
    return True


def is_plain_dict(value: object) -> bool:
    return isinstance(value, dict) and all(isinstance(key, str) for key in value) and is_encodable(value)


def below_vocab(field: str, token_ids: Iterable[int], vocab_size: int) -> None:
    """Raise unless every id is one the model can produce."""
    outside = [token_id for token_id in token_ids if not 0 <= token_id < vocab_size]
    if outside:
        reject(field, outside, f"token ids within the vocabulary, 0..{vocab_size - 1}")


def logprob_count(field: str, value: object) -> int | None:
    """True stands for 1 and False for none, as in OpenAI's chat requests."""
    if value is None or value is False:
        return None
    if value is True:
        return 1
    return int_at_least(field, value, -1, "None, -1 (the whole vocabulary) or an integer of at least 0")


def check_logprob_limit(field: str, count: int | None, max_logprobs: int, vocab_size: int) -> None:
    limit = vocab_size if max_logprobs == -1 else min(max_logprobs, vocab_size)
    if count is not None and (vocab_size if count == -1 else count) > limit:
        reject(field, count, f"at most {limit} (max_logprobs)")


def checked_logit_bias(value: object) -> dict[int, float]:
    """A new dict; the upper bound of the ids depends on the model and is checked by `verify`."""
    legal = "a dict from token ids (integers of at least 0) to finite numbers"
    if not isinstance(value, Mapping):
        reject("logit_bias", value, legal)
    return {
        int_at_least("logit_bias", token_id, 0, legal): as_finite_float("logit_bias", bias, legal)
        for token_id, bias in value.items()
    }


def logit_bias_from_text(value: object) -> dict[int, float]:
    """Keys may be text; values are clamped to [-100, 100]."""
    if not isinstance(value, Mapping):
        reject("logit_bias", value, "a dict from token ids to numbers")
    bad_keys = [key for key in value if isinstance(key, bool) or not _is_integer_text(key)]
    if bad_keys:
        raise VLLMValidationError(
            f"logit_bias must have token ids as keys, got {bad_keys}", parameter="logit_bias", value=bad_keys
        )
    biases = ((int(key), as_finite_float("logit_bias", bias, "finite numbers")) for key, bias in value.items())
    return {token_id: min(100.0, max(-100.0, bias)) for token_id, bias in biases}


def _is_integer_text(key: object) -> bool:
    try:
        int(str(key))
    except ValueError:
        return False
    return True
