"""Checks of single parameter values. Called by the structs in `params`; each returns the value in its wire type.

Every function raises VLLMValidationError (a ValueError) that names the field, what was given and what is legal.
"""

import math
import operator
from collections.abc import Iterable, Mapping
from typing import NoReturn

from .errors import VLLMValidationError

MAX_SEED = 2**63 - 1
MIN_SEED = -(2**63)


def reject(field: str, value: object, legal: str) -> NoReturn:
    """Raise the one error text all checks share."""
    shown = repr(value)
    if len(shown) > 80:
        shown = shown[:77] + "..."
    raise VLLMValidationError(f"{field} must be {legal}, got {shown}", parameter=field, value=value)


def as_int(field: str, value: object, legal: str) -> int:
    """Integers of any kind (numpy's too), never booleans or floats."""
    if type(value) is int:
        return value
    if isinstance(value, bool) or not hasattr(value, "__index__"):
        reject(field, value, legal)
    try:
        return operator.index(value)
    except TypeError:
        reject(field, value, legal)


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
        if item < 0:
            reject(field, item, legal)
        ids.append(item)
    return ids


def text_list(field: str, value: object) -> list[str]:
    """A new list of non-empty strings; one string stands for a list of itself."""
    legal = "a string or a list of strings, none of them empty"
    if isinstance(value, str):
        value = [value]
    if isinstance(value, (bytes, Mapping)) or not isinstance(value, Iterable):
        reject(field, value, legal)
    texts = list(value)
    for text in texts:
        if not isinstance(text, str) or not text:
            reject(field, text, legal)
    return texts


def below_vocab(field: str, token_ids: Iterable[int], vocab_size: int) -> None:
    """Raise unless every id is one the model can produce."""
    outside = [token_id for token_id in token_ids if not 0 <= token_id < vocab_size]
    if outside:
        reject(field, outside, f"token ids within the vocabulary, 0..{vocab_size - 1}")
