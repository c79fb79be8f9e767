"""Reads csrc/args.h, where what Python and the kernels both know is written once: the arguments of every operation, the
names of kinds and formats, and the kernels' limits. `library.py` makes its ctypes of it."""

import ctypes
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

_HEADER = Path(__file__).with_name("csrc") / "args.h"
_COMMENT = re.compile(r"//.*")
_CONSTANT = re.compile(r"constexpr int (\w+) = (\d+);")
_ENUM = re.compile(r"enum \w+ : int64_t \{(.*?)\};", re.DOTALL)
_STRUCT = re.compile(r"struct (\w+) \{(.*?)\};", re.DOTALL)
_FIELD = re.compile(r"([\w* ]+?[ *])(\w+)")

Fields = list[tuple[str, Any]]


def read(text: str) -> tuple[Mapping[str, int], Mapping[str, Fields]]:
    """The numbers by the names of constants and of enums' entries, and the fields of each struct of 8-byte fields.

    Raises ValueError for a field or an entry that is written in another way.
    """
    text = _COMMENT.sub("", text)
    numbers = {name: int(value) for name, value in _CONSTANT.findall(text)}
    for entries in _ENUM.findall(text):
        for entry in filter(None, map(str.strip, entries.split(","))):
            name, _, value = entry.partition(" = ")
            numbers[name] = int(value)
    structs = {name: _fields(body) for name, body in _STRUCT.findall(text) if "uint16_t bits" not in body}
    return numbers, structs


def _fields(body: str) -> Fields:
    return [_field(declaration) for declaration in filter(None, map(str.strip, body.split(";")))]


def _field(declaration: str) -> tuple[str, Any]:
    match = _FIELD.fullmatch(declaration)
    kinds = {"int64_t": ctypes.c_int64, "double": ctypes.c_double}
    kind = match and (ctypes.c_void_p if "*" in match[1] else kinds.get(match[1].strip()))
    if match is None or kind is None:
        raise ValueError(f"{_HEADER.name}: cannot read the field {declaration!r}")
    return match[2], kind


NUMBERS, STRUCTS = read(_HEADER.read_text(encoding="utf-8"))
