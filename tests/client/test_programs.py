"""Programs of every shape can hold an engine, and however they end, the core and its sockets go with them."""

import os
import signal
import subprocess
import sys
from pathlib import Path

import psutil
import pytest
from bridge import DEADLINE, request, tokens_of
from leftovers import Leftovers

SUPPORT = str(Path(__file__).parents[1] / "support")
EXPECTED = str(tokens_of(request("only")))

GUARDLESS = "from bridge_script import generate_once; print(generate_once())"
SERVING = """
import sys
from bridge_script import Bridge
bridge = Bridge({kind!r})
print(bridge.call("collective_rpc", "pid")[0], flush=True)
"""


@pytest.fixture
def environment():
    """For a program that can import what the tests can."""
    path = os.pathsep.join(filter(None, [SUPPORT, os.environ.get("PYTHONPATH")]))
    return {**os.environ, "PYTHONPATH": path}


def run(environment, *arguments, stdin=None):
    done = subprocess.run(
        [sys.executable, *arguments], env=environment, input=stdin, capture_output=True, text=True, timeout=DEADLINE
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def wait_for_end(pid):
    """Returns once the process is gone; fails if it stays."""
    try:
        psutil.Process(pid).wait(DEADLINE)
    except psutil.NoSuchProcess:
        return


def start_serving(environment, *lines, kind="sync_mp"):
    """A program with a running engine that goes on with `lines`. Returns it and its core's pid."""
    code = SERVING.format(kind=kind) + "\n".join(lines)
    program = subprocess.Popen(
        [sys.executable, "-c", code],
        env=environment,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )
    line = program.stdout.readline()
    assert line, program.stderr.read()
    return program, int(line)


@pytest.mark.parametrize("method", ["fork", "spawn"])
def test_a_script_without_a_guard_runs_once(environment, tmp_path, method):
    """Whatever start method it asks for: a core is neither forked nor does it import the script."""
    environment["VLLM_WORKER_MULTIPROC_METHOD"] = method
    script = tmp_path / "script.py"
    script.write_text(GUARDLESS)
    assert run(environment, str(script)).split("\n") == [EXPECTED, ""]


def test_a_program_on_the_command_line_or_on_stdin_runs_once(environment):
    assert run(environment, "-c", GUARDLESS).split("\n") == [EXPECTED, ""]
    assert run(environment, "-", stdin=GUARDLESS).split("\n") == [EXPECTED, ""]
    assert run(environment, "-i", stdin=GUARDLESS).split("\n") == [EXPECTED, ""]


def test_a_path_that_only_the_program_added_is_known_to_the_core(environment, tmp_path):
    code = f"import sys; sys.path.insert(0, {SUPPORT!r}); {GUARDLESS}"
    environment["PYTHONPATH"] = environment["PYTHONPATH"].replace(SUPPORT + os.pathsep, "")
    assert run(environment, "-c", code) == f"{EXPECTED}\n"


@pytest.mark.parametrize("method", ["fork", "spawn", "forkserver"])
def test_a_daemonic_worker_can_hold_an_engine(environment, tmp_path, method):
    script = tmp_path / "script.py"
    script.write_text(
        "import multiprocessing\n"
        "from bridge_script import generate_once\n"
        "if __name__ == '__main__':\n"
        f"    with multiprocessing.get_context({method!r}).Pool(1) as pool:\n"
        "        print(pool.apply(generate_once))\n"
    )
    assert run(environment, str(script)) == f"{EXPECTED}\n"


def test_a_fork_of_the_program_leaves_the_engine_alone(environment):
    code = (
        "import os, gc\n"
        "from bridge_script import Bridge, request\n"
        "bridge = Bridge('async_mp')\n"
        "first = bridge.generate(request('first'))\n"
        "if os.fork() == 0:\n"
        "    bridge.client.shutdown()\n"
        "    del bridge\n"
        "    gc.collect()\n"
        "    raise SystemExit\n"
        "os.wait()\n"
        "print(bridge.generate(request('only'))['only'])\n"
        "bridge.close()\n"
    )
    assert run(environment, "-c", code) == f"{EXPECTED}\n"


@pytest.mark.parametrize("kind", ["sync_mp", "async_mp"])
@pytest.mark.parametrize(
    "ending",
    ["", "sys.exit(0)", "raise ValueError('mine')", "import os; os._exit(0)", "del bridge; import gc; gc.collect()"],
    ids=["end", "exit", "exception", "_exit", "collected"],
)
def test_the_core_goes_when_the_program_ends(environment, kind, ending):
    program, core = start_serving(environment, ending, kind=kind)
    program.communicate(timeout=DEADLINE)
    wait_for_end(core)


@pytest.mark.parametrize("sent", [signal.SIGKILL, signal.SIGTERM, signal.SIGINT, signal.SIGHUP])
@pytest.mark.parametrize("doing", ["sys.stdin.read()", "bridge.get_output()"], ids=["idle", "waiting"])
def test_the_core_goes_when_the_program_is_killed(environment, sent, doing):
    program, core = start_serving(environment, doing)
    os.killpg(program.pid, sent)
    program.communicate(timeout=DEADLINE)
    wait_for_end(core)


def test_the_core_goes_though_a_fork_of_the_program_lives_on(environment):
    program, core = start_serving(environment, "import os", "os.fork()", "sys.stdin.read()")
    program.kill()
    program.wait(DEADLINE)
    wait_for_end(core)
    program.communicate(timeout=DEADLINE)


def test_a_core_out_of_file_descriptors_still_goes_with_the_program(environment):
    leftovers = Leftovers()
    ending = "bridge.call('collective_rpc', 'exhaust_file_descriptors'); import os; os._exit(0)"
    program, core = start_serving(environment, ending)
    program.communicate(timeout=DEADLINE)
    wait_for_end(core)
    assert leftovers.found() == []


def test_dropping_a_client_ends_its_core(environment):
    code = (
        "from bridge_script import Bridge\n"
        "from leftovers import Leftovers\n"
        "leftovers = Leftovers()\n"
        "for kind in ('sync_mp', 'async_mp'):\n"
        "    bridge = Bridge(kind)\n"
        "    bridge.call('is_sleeping')\n"
        "    bridge.client = None\n"
        "    if bridge.loop: bridge.loop.call_soon_threadsafe(bridge.loop.stop); bridge.thread.join()\n"
        "print(leftovers.found())\n"
    )
    assert run(environment, "-c", code) == "[]\n"


def start_loading(environment, folder):
    """A program whose core builds its executor for ever. Returns it and its core's pid."""
    reported = folder / "pid"
    os.mkfifo(reported)
    code = (
        "from bridge_script import Bridge\n"
        f"Bridge('sync_mp', 'fake_executor:FailingExecutor', start='hang', report={str(reported)!r})\n"
        "print('started')\n"
    )
    program = subprocess.Popen(
        [sys.executable, "-c", code],
        env=environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )
    return program, int(reported.read_text())


@pytest.mark.parametrize("send", [os.killpg, os.kill], ids=["group", "alone"])
@pytest.mark.parametrize("sent", [signal.SIGKILL, signal.SIGTERM, signal.SIGINT])
def test_a_signal_to_the_program_while_the_core_loads_ends_both(environment, tmp_path, sent, send):
    program, core = start_loading(environment, tmp_path)
    send(program.pid, sent)
    output, errors = program.communicate(timeout=DEADLINE)
    assert (program.returncode, output) == (-sent, "")
    if sent == signal.SIGINT:
        assert errors.rstrip().endswith("KeyboardInterrupt")
    wait_for_end(core)


@pytest.mark.parametrize("sent", [signal.SIGKILL, signal.SIGTERM])
def test_a_signal_to_the_core_while_it_loads_is_an_error_in_the_program(environment, tmp_path, sent):
    program, core = start_loading(environment, tmp_path)
    os.kill(core, sent)
    output, errors = program.communicate(timeout=DEADLINE)
    assert (program.returncode, output) == (1, "")
    assert errors.rstrip().splitlines()[-1].startswith("RuntimeError")
    assert f"killed by {sent.name}" in errors
    wait_for_end(core)
