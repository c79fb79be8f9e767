"""Messages survive the way there and back; whatever else arrives is a ProtocolError and nothing more."""

import os
import pickle
import subprocess
import sys
from pathlib import Path

import msgspec
import numpy as np
import psutil
import pytest
from deadlines import DEADLINE
from fuzzing import DECODERS, frames_of, full_outputs, full_request, fuzz, is_accepted
from hypothesis import given, settings
from hypothesis import strategies as st

from corespan.protocol.codec import ARRAY_DTYPES, EXT_ARRAY, EXT_FUNCTION, MsgpackDecoder, MsgpackEncoder
from corespan.protocol.errors import ProtocolError
from corespan.protocol.outputs import EngineCoreOutputs, UtilityOutput
from corespan.protocol.requests import EngineCoreRequest, UtilityRequest


def assert_same(one, other):
    """Equal, arrays included."""
    if isinstance(one, np.ndarray):
        assert one.dtype == other.dtype
        np.testing.assert_array_equal(one, other)
    elif isinstance(one, msgspec.Struct):
        assert type(one) is type(other)
        for field in one.__struct_fields__:
            assert_same(getattr(one, field), getattr(other, field))
    elif isinstance(one, list):
        assert len(one) == len(other)
        for mine, theirs in zip(one, other, strict=True):
            assert_same(mine, theirs)
    else:
        assert one == other


@pytest.mark.parametrize("message", [full_outputs(), full_request(), UtilityRequest(0, 1, "sleep", [1, "abort"])])
def test_messages_come_back_as_they_were(message):
    assert_same(message, MsgpackDecoder(type(message)).decode(frames_of(message)))


@pytest.mark.parametrize("dtype", list(ARRAY_DTYPES))
@pytest.mark.parametrize("shape", [(), (0,), (1,), (7, 3), (0, 5), (40, 40)])
def test_arrays_come_back_as_they_were(dtype, shape):
    array = np.arange(np.prod(shape, dtype=int)).reshape(shape).astype(dtype)
    answer = MsgpackDecoder(UtilityOutput).decode(frames_of(UtilityOutput(1, result={"x": [array]})))
    assert_same(answer.result["x"][0], array)


def test_arrays_that_are_not_contiguous_come_back_whole():
    array = np.arange(600).reshape(20, 30)[::2, ::3]
    (back,) = MsgpackDecoder(list[np.ndarray]).decode(frames_of([array]))
    np.testing.assert_array_equal(back, array)


def test_only_arrays_from_the_threshold_on_get_a_frame_of_their_own():
    encoder = MsgpackEncoder(zero_copy_threshold=64)
    assert len(encoder.encode([np.zeros(63, np.uint8)])) == 1
    assert len(encoder.encode([np.zeros(64, np.uint8), np.zeros(65, np.uint8)])) == 3


def test_a_large_array_is_not_copied():
    array = np.zeros(100_000, np.float32)
    frames = MsgpackEncoder().encode([array])
    assert np.shares_memory(np.frombuffer(frames[1], np.float32), array)
    (back,) = MsgpackDecoder(list[np.ndarray]).decode(frames)
    assert np.shares_memory(back, array)


def test_numpy_scalars_become_numbers():
    assert MsgpackDecoder(object).decode(frames_of([np.int64(3), np.float32(0.5), np.bool_(True)])) == [3, 0.5, True]


@pytest.mark.parametrize(
    "value",
    [object(), np.array([object()]), np.array(["text"]), np.zeros(2, [("a", "i4")]), np.zeros(2, complex), open],
)
def test_what_cannot_cross_is_a_type_error(value):
    with pytest.raises(TypeError):
        MsgpackEncoder().encode([value])


def array_ext(dtype="<f4", shape=(2,), content=b"\0" * 8):
    return msgspec.msgpack.Ext(EXT_ARRAY, msgspec.msgpack.encode([dtype, list(shape), content]))


@pytest.mark.parametrize(
    "ext",
    [
        array_ext(dtype="|O"),
        array_ext(dtype="|V4"),
        array_ext(dtype="<f4,<i4"),
        array_ext(dtype="nonsense"),
        array_ext(dtype=""),
        array_ext(shape=(-2,)),
        array_ext(shape=(-1, -2)),
        array_ext(shape=(3,)),
        array_ext(shape=(1,)),
        array_ext(shape=(2**40, 2**40)),
        array_ext(shape=(0, 2**63), content=b""),
        array_ext(shape=(1,) * 64, content=b"\0" * 4),
        array_ext(shape=("2",)),
        array_ext(content=0),
        array_ext(content=-1),
        array_ext(content=2),
        array_ext(content=2**63),
        array_ext(content=None),
        msgspec.msgpack.Ext(EXT_ARRAY, b""),
        msgspec.msgpack.Ext(EXT_ARRAY, b"\xc1"),
        msgspec.msgpack.Ext(99, b"\0" * 8),
        msgspec.msgpack.Ext(-1, b"\0\0\0\0"),
    ],
)
@pytest.mark.parametrize("message_type", [list[np.ndarray], object])
def test_an_array_that_claims_the_impossible_is_a_protocol_error(ext, message_type):
    frames = [msgspec.msgpack.encode([ext]), b"\0" * 4]
    if ext.code == -1 and message_type is object:
        pytest.skip("extension -1 is msgpack's own timestamp")
    with pytest.raises(ProtocolError):
        MsgpackDecoder(message_type).decode(frames)


@pytest.mark.parametrize("message_type", [EngineCoreRequest, EngineCoreOutputs, UtilityRequest, list[str]])
@pytest.mark.parametrize(
    "frame",
    [
        b"",
        b"\xc1",
        b"\xdd\xff\xff\xff\xff",
        b"\xdf\xff\xff\xff\xff",
        b"\xc6\xff\xff\xff\xff",
        b"\x91" * 100_000,
        b"\x81\xa1a" * 100_000,
        msgspec.msgpack.encode("text"),
        msgspec.msgpack.encode({"request_id": "a"}),
        msgspec.msgpack.encode([["nested"]]),
        msgspec.msgpack.encode([1, 2, 3]),
        pickle.dumps({"a": 1}),
    ],
)
def test_a_frame_that_is_not_the_message_is_a_protocol_error(message_type, frame):
    with pytest.raises(ProtocolError):
        MsgpackDecoder(message_type).decode([frame])


def test_a_message_without_frames_is_a_protocol_error():
    with pytest.raises(ProtocolError):
        MsgpackDecoder(EngineCoreOutputs).decode([])


def test_parameters_out_of_range_are_a_protocol_error():
    request = full_request()
    frame = msgspec.msgpack.encode(["r", [1], ["sampling", 1.0, 7.0]])  # top_p
    assert MsgpackDecoder(EngineCoreRequest).decode(frames_of(request)).request_id == "request"
    with pytest.raises(ProtocolError, match="<= 1.0"):
        MsgpackDecoder(EngineCoreRequest).decode([frame])


@pytest.mark.parametrize("message", [full_outputs(), full_request()])
def test_every_truncation_is_a_protocol_error(message):
    main, *aux = frames_of(message)
    decoder = MsgpackDecoder(type(message))
    for length in range(len(main)):
        with pytest.raises(ProtocolError):
            decoder.decode([main[:length], *aux])
    for count in range(len(aux)):
        with pytest.raises(ProtocolError):
            decoder.decode([main, *aux[:count]])
    for index in range(len(aux)):
        cut = [*aux[:index], aux[index][:-1], *aux[index + 1 :]]
        with pytest.raises(ProtocolError):
            decoder.decode([main, *cut])


class Marker:
    def __init__(self, path):
        self.path = str(path)

    def __reduce__(self):
        return (os.mknod, (self.path,))


@pytest.mark.parametrize("code", [EXT_FUNCTION, EXT_ARRAY, 3, 127])
def test_pickles_are_never_loaded(tmp_path, code):
    pickled = pickle.dumps(Marker(tmp_path / "marker"))
    frame = msgspec.msgpack.encode([0, 1, "method", [msgspec.msgpack.Ext(code, pickled)]])
    with pytest.raises(ProtocolError):
        MsgpackDecoder(UtilityRequest).decode([frame])
    assert not (tmp_path / "marker").exists()


def test_functions_cross_where_pickling_was_allowed(monkeypatch):
    pytest.importorskip("cloudpickle")
    monkeypatch.setenv("VLLM_ALLOW_INSECURE_SERIALIZATION", "1")
    (function,) = MsgpackDecoder(object).decode(frames_of([lambda x: x + 1]))
    assert function(41) == 42
    with pytest.raises(ProtocolError, match="unpickle"):
        MsgpackDecoder(object).decode([msgspec.msgpack.encode([msgspec.msgpack.Ext(EXT_FUNCTION, b"junk")])])


# Fuzzing

ROUNDS = 200_000
TOLERANCE = 8 << 20  # bytes that the process may grow by, which is 40 a message


def test_two_hundred_thousand_mutated_messages_raise_nothing_but_protocol_errors_and_hold_no_memory():
    process = psutil.Process()
    fuzz(seed=0, rounds=ROUNDS // 10)
    before = process.memory_info().rss
    accepted = fuzz(seed=1, rounds=ROUNDS)
    assert 0 < accepted < ROUNDS
    assert process.memory_info().rss - before < TOLERANCE


def test_the_fuzzing_script_says_when_its_fuzzer_is_missing():
    script = Path(__file__).parents[2] / "scripts" / "endurance" / "fuzz.py"
    program = f"import runpy, sys; sys.modules['atheris'] = None; runpy.run_path({str(script)!r}, run_name='__main__')"
    finished = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=DEADLINE)
    assert finished.returncode == 1
    assert 'pip install "corespan[fuzz]"' in finished.stderr


@settings(max_examples=300, deadline=None)
@given(st.binary(max_size=200), st.integers(0, len(DECODERS) - 1), st.lists(st.binary(max_size=20), max_size=3))
def test_random_bytes_raise_nothing_but_protocol_errors(frame, which, aux):
    is_accepted(which, [frame, *aux])


anything = st.recursive(
    st.none()
    | st.booleans()
    | st.integers(-(2**63), 2**64 - 1)
    | st.floats()
    | st.text(max_size=8)
    | st.binary(max_size=8),
    lambda inner: st.lists(inner, max_size=5) | st.dictionaries(st.text(max_size=5), inner, max_size=4),
    max_leaves=20,
)


@settings(max_examples=300, deadline=None)
@given(st.lists(anything, max_size=8), st.integers(0, len(DECODERS) - 1))
def test_well_formed_data_of_the_wrong_shape_raises_nothing_but_protocol_errors(fields, which):
    is_accepted(which, [msgspec.msgpack.encode(fields)])
