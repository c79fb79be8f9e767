"""Messages to frames and back: one msgpack frame, plus a frame of its own for every large array.

Used on both ends of the bridge. An array becomes an extension holding (dtype, shape, bytes or frame number). Decoding
is typed, checks every claim a frame makes, and executes nothing: whatever does not fit raises `ProtocolError`.
"""

import importlib
import math
from collections.abc import Sequence
from types import BuiltinFunctionType, FunctionType, MethodType
from typing import Any, Generic, TypeVar

import msgspec
import numpy as np

from . import envs
from .errors import ProtocolError

T = TypeVar("T")
Buffer = bytes | bytearray | memoryview

EXT_ARRAY = 1
EXT_FUNCTION = 2

ARRAY_DTYPES: dict[str, np.dtype[Any]] = {
    np.dtype(name).str: np.dtype(name)
    for name in ("bool", "i1", "i2", "i4", "i8", "u1", "u2", "u4", "u8", "f2", "f4", "f8")
}
MAX_ARRAY_DIMS = 32
MAX_FRAME_BYTES = 1 << 31
"""The longest frame that crosses, and the same on every socket: whoever encodes a longer one gets an error, and whoever
sends one all the same loses the connection.
"""

_FUNCTION_TYPES = (FunctionType, MethodType, BuiltinFunctionType)
_NOT_DECODABLE = (msgspec.MsgspecError, RecursionError, ValueError, TypeError, OverflowError)


class _ArrayHeader(msgspec.Struct, array_like=True, gc=False):
    """An array on the wire. `content` holds its bytes, or the number of the frame that does (the first is 1)."""

    dtype: str
    shape: list[int]
    content: bytes | int


_HEADER_DECODER = msgspec.msgpack.Decoder(_ArrayHeader)


class MsgpackEncoder:
    """Turns a message into frames. Arrays of at least `zero_copy_threshold` bytes are not copied: they must not change
    until the frames are sent. Not thread-safe: one encoder per thread.
    """

    def __init__(self, zero_copy_threshold: int | None = None) -> None:
        self._threshold = envs.VLLM_MSGPACK_ZERO_COPY_THRESHOLD if zero_copy_threshold is None else zero_copy_threshold
        self._encoder = msgspec.msgpack.Encoder(enc_hook=self._encode_custom)
        self._aux_frames: list[Buffer] = []

    def encode(self, message: object) -> list[Buffer]:
        """The main frame, then the array frames.

        Raises TypeError for an object that cannot cross, OverflowError for an integer of more than 64 bits, ValueError
        for a frame of more than MAX_FRAME_BYTES.
        """
        self._aux_frames = []
        frames = [self._encoder.encode(message), *self._aux_frames]
        longest = max(map(len, frames))
        if longest > MAX_FRAME_BYTES:
            raise ValueError(
                f"a {type(message).__name__} with a part of {longest} bytes; at most {MAX_FRAME_BYTES} can cross "
                "between shell and core in one piece"
            )
        return frames

    def _encode_custom(self, value: object) -> Any:
        if isinstance(value, np.ndarray):
            return self._encode_array(value)
        if isinstance(value, np.generic):
            return value.item()
        if isinstance(value, _FUNCTION_TYPES):
            return _encode_function(value)
        raise TypeError(f"a {type(value).__module__}.{type(value).__qualname__} cannot cross between shell and core")

    def _encode_array(self, array: np.ndarray) -> msgspec.msgpack.Ext:
        dtype = array.dtype.str
        if dtype not in ARRAY_DTYPES:
            raise TypeError(f"an array of dtype {array.dtype} cannot cross between shell and core")
        contiguous = np.ascontiguousarray(array)
        content: bytes | int
        if array.nbytes < self._threshold:
            content = contiguous.tobytes()
        else:
            self._aux_frames.append(contiguous.reshape(-1).view(np.uint8).data)
            content = len(self._aux_frames)
        header = _ArrayHeader(dtype, list(array.shape), content)
        return msgspec.msgpack.Ext(EXT_ARRAY, msgspec.msgpack.encode(header))


class MsgpackDecoder(Generic[T]):
    """Turns frames back into a `message_type`. Arrays are views of their frames. Not thread-safe."""

    def __init__(self, message_type: type[T]) -> None:
        self._decoder: msgspec.msgpack.Decoder[T] = msgspec.msgpack.Decoder(
            message_type, ext_hook=self._decode_ext, dec_hook=_check_custom
        )
        self._frames: Sequence[Buffer] = ()

    def decode(self, frames: Sequence[Buffer]) -> T:
        """The message in `frames`. Raises ProtocolError, whatever is wrong with them."""
        if not frames:
            raise ProtocolError("a message without a frame")
        self._frames = frames
        try:
            return self._decoder.decode(frames[0])
        except _NOT_DECODABLE as error:
            raise ProtocolError(f"undecodable frame: {error}") from error
        finally:
            self._frames = ()

    def _decode_ext(self, code: int, payload: memoryview) -> object:
        if code == EXT_ARRAY:
            return self._decode_array(payload)
        if code == EXT_FUNCTION:
            return _decode_function(payload)
        raise ProtocolError(f"unknown extension type {code}")

    def _decode_array(self, payload: memoryview) -> np.ndarray:
        header = _HEADER_DECODER.decode(payload)
        dtype = ARRAY_DTYPES.get(header.dtype)
        if dtype is None:
            raise ProtocolError(f"an array of dtype {header.dtype[:32]!r}")
        if len(header.shape) > MAX_ARRAY_DIMS or any(size < 0 for size in header.shape):
            raise ProtocolError("an array of impossible shape")
        content = self._array_content(header)
        num_bytes = math.prod(header.shape) * dtype.itemsize
        if content.nbytes != num_bytes:
            raise ProtocolError(f"an array of {num_bytes} bytes whose content has {content.nbytes}")
        if num_bytes == 0:
            return np.empty(header.shape, dtype)
        return np.frombuffer(content, dtype).reshape(header.shape)

    def _array_content(self, header: _ArrayHeader) -> memoryview:
        if isinstance(header.content, bytes):
            return memoryview(header.content)
        if not 1 <= header.content < len(self._frames):
            raise ProtocolError(f"an array in frame {header.content} of {len(self._frames)}")
        return memoryview(self._frames[header.content]).cast("B")


def _check_custom(expected: type, value: object) -> object:
    """msgspec asks for every field of a type it does not know: arrays, and `object`, which is anything."""
    if expected is object or isinstance(value, expected):
        return value
    raise TypeError(f"expected {expected.__name__}, got {type(value).__name__}")


def _encode_function(function: object) -> msgspec.msgpack.Ext:
    if not envs.VLLM_ALLOW_INSECURE_SERIALIZATION:
        raise TypeError(
            "a function cannot cross between shell and core; pass a method's name, or set "
            "VLLM_ALLOW_INSECURE_SERIALIZATION=1 if you trust everyone who can reach the engine's sockets"
        )
    return msgspec.msgpack.Ext(EXT_FUNCTION, cloudpickle().dumps(function))


def _decode_function(payload: memoryview) -> object:
    if not envs.VLLM_ALLOW_INSECURE_SERIALIZATION:
        raise ProtocolError("a pickled function, which VLLM_ALLOW_INSECURE_SERIALIZATION=1 would allow")
    try:
        return cloudpickle().loads(payload)
    except Exception as error:  # unpickling can raise anything
        raise ProtocolError(f"a function that does not unpickle: {error}") from error


def cloudpickle() -> Any:
    try:
        return importlib.import_module("cloudpickle")
    except ImportError as error:
        raise TypeError("sending functions and classes to the core needs the package cloudpickle") from error
