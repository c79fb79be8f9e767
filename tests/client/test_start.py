"""A start that fails is one exception of the fitting type, with the core's traceback, and nothing is left behind."""

import errno
import itertools
import os
import resource

import pytest
import zmq
from bridge import Bridge, request, tokens_of
from leftovers import Leftovers

from corespan.client import connection as connection_module
from corespan.protocol.outputs import STACKS_FILE

FAILING = "fake_executor:FailingExecutor"
ALL_CLIENTS = pytest.mark.parametrize("kind", ["inproc", "sync_mp", "async_mp"])
MP_CLIENTS = pytest.mark.parametrize("kind", ["sync_mp", "async_mp"])


@ALL_CLIENTS
@pytest.mark.parametrize(
    ("action", "error", "complaint"),
    [
        ("raise", ValueError, "no such weights"),
        ("overflow", MemoryError, "no room for the weights"),
        ("miss", FileNotFoundError, "no such file of weights"),
    ],
)
def test_what_the_executor_raises_at_start_reaches_the_caller(kind, action, error, complaint):
    leftovers = Leftovers()
    with pytest.raises(error, match=complaint) as caught:
        Bridge(kind, FAILING, start=action)
    if kind != "inproc":
        assert "fake_executor.py" in "".join(caught.value.__notes__)
    assert leftovers.found() == []


@ALL_CLIENTS
def test_an_executor_that_cannot_be_imported_is_named(kind):
    with pytest.raises(ValueError, match="^executor_class 'no_such_module:Executor' cannot be imported"):
        Bridge(kind, "no_such_module:Executor")


@ALL_CLIENTS
def test_a_cache_too_small_for_one_request_names_the_length_that_fits(kind):
    leftovers = Leftovers()
    with pytest.raises(ValueError, match="largest max_model_len that fits is 48"):
        Bridge(kind, num_gpu_blocks_override=3)
    assert leftovers.found() == []


@MP_CLIENTS
@pytest.mark.parametrize(
    ("action", "cause"),
    [("exit", "exited with code 3"), ("kill", "killed by SIGKILL"), ("crash", "killed by SIGSEGV")],
)
def test_a_core_that_vanishes_while_starting_is_an_error_at_once(kind, action, cause):
    leftovers = Leftovers()
    with pytest.raises(RuntimeError, match=cause):
        Bridge(kind, FAILING, start=action)
    assert leftovers.found() == []


@MP_CLIENTS
def test_a_start_that_takes_too_long_is_given_up(kind, monkeypatch):
    leftovers = Leftovers()
    monkeypatch.setenv("VLLM_ENGINE_READY_TIMEOUT_S", "2")
    with pytest.raises(TimeoutError, match="VLLM_ENGINE_READY_TIMEOUT_S"):
        Bridge(kind, FAILING, start="hang")
    assert leftovers.found() == []


@MP_CLIENTS
def test_a_socket_folder_that_cannot_be_made_is_an_error_before_any_start(kind, monkeypatch, tmp_path):
    monkeypatch.setenv("VLLM_RPC_BASE_PATH", str(tmp_path / "missing"))
    with pytest.raises(FileNotFoundError, match="missing"):
        Bridge(kind)
    deep = tmp_path / ("x" * 100)
    deep.mkdir()
    monkeypatch.setenv("VLLM_RPC_BASE_PATH", str(deep))
    with pytest.raises(ValueError, match="VLLM_RPC_BASE_PATH"):
        Bridge(kind)
    assert os.listdir(deep) == []


def refuse_once(monkeypatch, owner, name, error, after=0):
    """Has the call after so many find the disk full."""
    genuine, calls = getattr(owner, name), itertools.count()

    def full(*args, **kwargs):
        if next(calls) == after:
            raise error
        return genuine(*args, **kwargs)

    monkeypatch.setattr(owner, name, full)


@MP_CLIENTS
@pytest.mark.parametrize("refused", ["folder", "first socket", "second socket"])
def test_a_disk_too_full_for_the_sockets_is_an_error_before_any_start(kind, refused, monkeypatch):
    leftovers = Leftovers()
    if refused == "folder":
        refuse_once(monkeypatch, os, "mkdir", OSError(errno.ENOSPC, os.strerror(errno.ENOSPC)))
    else:
        refuse_once(monkeypatch, zmq.Socket, "bind", zmq.ZMQError(errno.ENOSPC), after=int(refused == "second socket"))
    with pytest.raises(OSError, match="No space left on device"):
        Bridge(kind)
    assert leftovers.found() == []


@MP_CLIENTS
def test_a_core_that_cannot_write_its_files_is_an_error_that_names_them(kind, monkeypatch):
    leftovers = Leftovers()
    make_socket_dir = connection_module.make_socket_dir

    def make_with_a_name_taken():
        socket_dir = make_socket_dir()
        os.symlink("/proc/nowhere", os.path.join(socket_dir, STACKS_FILE))
        return socket_dir

    monkeypatch.setattr(connection_module, "make_socket_dir", make_with_a_name_taken)
    with pytest.raises(OSError, match=STACKS_FILE):
        Bridge(kind)
    assert leftovers.found() == []


@MP_CLIENTS
def test_an_engine_starts_after_one_that_failed(kind):
    with pytest.raises(ValueError):
        Bridge(kind, FAILING, start="raise")
    bridge = Bridge(kind)
    fine = request("fine")
    assert bridge.generate(fine)["fine"] == tokens_of(fine)
    bridge.close()


@ALL_CLIENTS
def test_the_client_knows_the_figures_the_core_settled_on(kind):
    bridge = Bridge(kind, num_gpu_blocks_override=20)
    assert bridge.client.vllm_config.cache_config.num_gpu_blocks == 20
    bridge.close()


@ALL_CLIENTS
def test_the_cache_is_no_larger_than_the_largest_batch_can_use(kind):
    bridge = Bridge(kind, max_model_len=64, max_num_seqs=3)
    assert bridge.client.vllm_config.cache_config.num_gpu_blocks == 3 * 4
    bridge.close()


@MP_CLIENTS
def test_threads_of_the_core_follow_the_cores_that_are_there(kind, monkeypatch):
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    bridge = Bridge(kind)
    assert bridge.call("collective_rpc", "environment", None, ["OMP_NUM_THREADS"]) == [
        str(len(os.sched_getaffinity(0)))
    ]
    bridge.close()
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    bridge = Bridge(kind)
    assert bridge.call("collective_rpc", "environment", None, ["OMP_NUM_THREADS"]) == ["1"]
    bridge.close()


@MP_CLIENTS
def test_a_process_out_of_file_descriptors_gets_an_error_and_lives(kind):
    leftovers = Leftovers()
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (len(os.listdir("/proc/self/fd")) + 10, hard))
    try:
        with pytest.raises(OSError, match="Too many open files"):
            Bridge(kind)
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
    assert leftovers.found() == []
    Bridge(kind).close()
