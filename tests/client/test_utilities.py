"""Utility calls: answers, errors, and results that cannot cross, over every client."""

import numpy as np
import pytest
from bridge import request, tokens_of
from odd_errors import ODD_ERRORS


def test_a_utility_answers_with_plain_data(make_bridge):
    bridge = make_bridge()
    assert list(bridge.call("get_supported_tasks")) == ["generate"]
    assert bridge.call("collective_rpc", "echo", None, [1, "two", None, 3.5, [b"x"]]) == [[1, "two", None, 3.5, [b"x"]]]


@pytest.mark.parametrize("size", [0, 3, 100_000])
def test_arrays_of_any_size_cross(make_bridge, size):
    (array,) = make_bridge().call("collective_rpc", "array", None, [size])
    np.testing.assert_array_equal(array, np.arange(size, dtype=np.float32))


def test_an_exception_in_a_utility_comes_back_as_its_type(make_bridge):
    bridge = make_bridge()
    with pytest.raises(ValueError, match="bad weather"):
        bridge.call("collective_rpc", "raise", None, ["bad weather"])
    with pytest.raises(NotImplementedError, match="no_such_method"):
        bridge.call("collective_rpc", "no_such_method")
    with pytest.raises(AttributeError, match="no utility 'shutdown'"):
        bridge.call("shutdown")
    with pytest.raises(AttributeError, match="__init__"):
        bridge.call("__init__")
    fine = request("fine")
    assert bridge.generate(fine)["fine"] == tokens_of(fine)


def raised_by(call, name):
    """What a call raises in which code of the user's has raised that odd error."""
    if name == "KeyboardInterrupt" and call.__self__.kind == "inproc":
        return pytest.raises(KeyboardInterrupt)  # it may be the user's own Ctrl-C
    return pytest.raises(RuntimeError, match=name)


@pytest.mark.parametrize("name", ODD_ERRORS)
def test_whatever_a_call_raises_is_that_calls_error_and_names_the_method(make_bridge, name):
    bridge = make_bridge()
    fine = request("fine", max_tokens=30)
    bridge.add(fine)
    with raised_by(bridge.call, name) as caught:
        bridge.call("collective_rpc", "raise_odd", None, [name])
    assert caught.type is KeyboardInterrupt or "collective_rpc('raise_odd')" in str(caught.value)
    assert bridge.collect("fine")[0]["fine"] == tokens_of(fine)
    bridge.call("collective_rpc", "fail_to_sleep", None, [name])
    with raised_by(bridge.call, name):
        bridge.call("sleep", 1, "abort")
    bridge.call("resume_scheduler")
    assert bridge.generate(fine)["fine"] == tokens_of(fine)


def test_a_result_that_cannot_cross_is_that_calls_error(make_mp_bridge):
    bridge = make_mp_bridge()
    with pytest.raises(TypeError, match="lock"):
        bridge.call("collective_rpc", "unencodable")
    fine = request("fine")
    assert bridge.generate(fine)["fine"] == tokens_of(fine)


def test_an_argument_that_cannot_cross_is_the_callers_error(make_mp_bridge):
    bridge = make_mp_bridge()
    with pytest.raises(TypeError, match="cannot cross"):
        bridge.call("collective_rpc", "echo", None, [object()])
    assert bridge.call("is_sleeping") is False


def test_a_function_is_refused_unless_pickling_was_allowed(make_mp_bridge, monkeypatch):
    bridge = make_mp_bridge()
    with pytest.raises(TypeError, match="VLLM_ALLOW_INSECURE_SERIALIZATION"):
        bridge.call("collective_rpc", lambda worker: 1)
    monkeypatch.setenv("VLLM_ALLOW_INSECURE_SERIALIZATION", "1")
    pytest.importorskip("cloudpickle")
    assert make_mp_bridge().call("collective_rpc", lambda worker, x: x + 1, None, [41]) == [42]


def test_a_core_does_not_take_functions_that_only_its_client_allows(make_mp_bridge, monkeypatch):
    pytest.importorskip("cloudpickle")
    bridge = make_mp_bridge()
    monkeypatch.setenv("VLLM_ALLOW_INSECURE_SERIALIZATION", "1")
    with pytest.raises(RuntimeError, match="pickled function"):
        bridge.call("collective_rpc", lambda worker: 1)
