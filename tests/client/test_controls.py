"""Pausing, sleeping and aborting, over every client."""

import pytest
from bridge import Bridge, request, tokens_of

from corespan.protocol.outputs import FinishReason


def counts(bridge):
    return list(bridge.call("get_request_counts"))


@pytest.fixture(scope="module", params=["inproc", "sync_mp", "async_mp"])
def shared_bridge(request):
    bridge = Bridge(request.param, num_gpu_blocks_override=200)
    yield bridge
    bridge.close()


@pytest.fixture
def bridge(shared_bridge):
    """Awake and idle, before the test and after."""
    yield shared_bridge
    shared_bridge.call("pause_scheduler", "abort", True)
    shared_bridge.call("wake_up", None)
    shared_bridge.call("resume_scheduler")


def test_pausing_with_abort_hands_out_the_aborted_and_queues_the_new(bridge):
    bridge.call("pause_scheduler", "keep", False)
    bridge.add(request("old", max_tokens=250))
    bridge.call("pause_scheduler", "abort", True)
    assert bridge.collect("old")[1] == {"old": FinishReason.ABORT}
    new = request("new")
    bridge.add(new)
    assert bridge.call("is_scheduler_paused") is True
    assert counts(bridge) == [0, 1]
    bridge.call("resume_scheduler")
    assert bridge.collect("new")[0]["new"] == tokens_of(new)
    assert bridge.call("is_scheduler_paused") is False


def test_pausing_with_wait_lets_what_runs_finish(bridge):
    running = request("running", max_tokens=40)
    bridge.add(running)
    first = []
    while not first:
        first = [output.new_token_ids for output in bridge.get_output().outputs]
    bridge.call("pause_scheduler", "wait", True)
    bridge.add(request("new"))
    tokens, reasons = bridge.collect("running")
    assert first[0] + tokens["running"] == tokens_of(running)
    assert reasons == {"running": FinishReason.LENGTH}
    assert counts(bridge) == [0, 1]
    bridge.call("resume_scheduler")
    assert bridge.collect("new")[0]["new"] == tokens_of(request("new"))


def test_pausing_with_keep_freezes_and_resumes_in_place(bridge):
    frozen = request("frozen", max_tokens=200)
    bridge.add(frozen)
    bridge.call("pause_scheduler", "keep", False)
    bridge.call("resume_scheduler")
    assert bridge.collect("frozen")[0]["frozen"] == tokens_of(frozen)


@pytest.mark.parametrize("mode", ["abort", "wait", "keep"])
@pytest.mark.parametrize("level", [0, 1, 2])
def test_requests_made_in_sleep_run_after_waking(bridge, level, mode):
    bridge.call("sleep", level, mode)
    assert bridge.call("is_sleeping") is True
    queued = request("queued")
    bridge.add(queued)
    assert counts(bridge) == [0, 1]
    bridge.call("wake_up", None)
    assert bridge.call("is_sleeping") is False
    assert bridge.collect("queued")[0]["queued"] == tokens_of(queued)


def test_sleeping_with_keep_recomputes_what_was_running(bridge):
    kept = request("kept", range(1, 60), max_tokens=150)
    bridge.add(kept)
    bridge.call("sleep", 1, "keep")
    bridge.call("wake_up", None)
    assert bridge.collect("kept")[0]["kept"] == tokens_of(kept)


def test_sleeping_with_abort_ends_everything_that_was_in_flight(bridge):
    for name in ("a", "b"):
        bridge.add(request(name, max_tokens=250))
    bridge.call("sleep", 1, "abort")
    assert set(bridge.collect("a", "b")[1].values()) <= {FinishReason.ABORT, FinishReason.LENGTH}
    assert counts(bridge) == [0, 0]


def test_waking_in_parts_schedules_only_once_all_is_back(bridge):
    bridge.call("sleep", 2, "abort")
    bridge.call("wake_up", ["weights"])
    assert bridge.call("is_sleeping") is True
    bridge.call("wake_up", ["scheduling"])
    assert bridge.call("is_sleeping") is True
    bridge.call("wake_up", ["kv_cache"])
    assert bridge.call("is_sleeping") is False


def test_a_sleeping_engine_is_woken_not_resumed(bridge):
    bridge.call("sleep", 1, "abort")
    queued = request("queued")
    bridge.add(queued)
    with pytest.raises(RuntimeError, match="wake_up"):
        bridge.call("resume_scheduler")
    assert bridge.call("is_sleeping") is True
    bridge.call("wake_up", None)
    assert bridge.collect("queued")[0]["queued"] == tokens_of(queued)


def test_a_sleep_can_be_deepened_and_is_not_made_lighter(bridge):
    bridge.call("sleep", 1, "abort")
    assert bridge.call("collective_rpc", "asleep") == [["kv_cache"]]
    bridge.call("sleep", 2, "abort")
    bridge.call("sleep", 1, "abort")
    assert bridge.call("collective_rpc", "asleep") == [["kv_cache", "weights"]]
    bridge.call("wake_up", None)
    assert bridge.call("collective_rpc", "asleep") == [[]]


@pytest.mark.parametrize(
    ("method", "args", "complaint"),
    [
        ("sleep", [3, "abort"], "sleep level is 3"),
        ("sleep", ["1", "abort"], "sleep level is '1'"),
        ("sleep", [1, "perhaps"], "pause mode is 'perhaps'"),
        ("pause_scheduler", ["perhaps", True], "pause mode is 'perhaps'"),
        ("wake_up", [["everything"]], "everything"),
    ],
)
def test_controls_refuse_what_they_do_not_know(bridge, method, args, complaint):
    with pytest.raises(ValueError, match=complaint):
        bridge.call(method, *args)
    assert bridge.call("is_sleeping") is False


WRONG_ARGUMENTS = {
    "reset_running_requests": [("reset_prefix_cache", value) for value in ("yes", 1, None)],
    "clear_cache": [("pause_scheduler", "abort", value) for value in ("yes", 0, None)],
    "tags": [("wake_up", value) for value in ("weights", 5, [5], {"weights": 1, 2: 3})],
    "profile_prefix": [("profile", True, value) for value in (5, b"a", ["a"])],
    "method": [("collective_rpc", value) for value in (5, None, b"echo")],
    "args": [("collective_rpc", "echo", None, value) for value in (5, None, "one")],
    "kwargs": [("collective_rpc", "echo", None, [1], value) for value in (5, [1], "one")],
}


@pytest.mark.parametrize("name", WRONG_ARGUMENTS)
def test_arguments_of_a_wrong_type_are_refused_at_the_caller(bridge, name):
    for control, *arguments in WRONG_ARGUMENTS[name]:
        with pytest.raises(ValueError, match=f"^{name} must be .*, got "):
            getattr(bridge.client, control)(*arguments)
    assert bridge.call("is_sleeping") is False


def test_the_prefix_cache_can_be_emptied_while_idle(bridge):
    prompt = range(1, 50)
    bridge.generate(request("first", prompt))
    assert bridge.call("reset_prefix_cache", False) is True


def test_an_abort_frees_the_request_and_leaves_its_neighbour(bridge):
    bridge.call("pause_scheduler", "keep", False)
    neighbour = request("neighbour", max_tokens=30)
    bridge.add(neighbour)
    bridge.add(request("gone", max_tokens=30))
    bridge.abort("gone", "never was")
    bridge.call("resume_scheduler")
    tokens, _ = bridge.collect("neighbour")
    assert tokens == {"neighbour": tokens_of(neighbour)}
    assert counts(bridge) == [0, 0]


def test_a_thousand_aborts_leave_nothing(bridge):
    neighbour = request("neighbour", max_tokens=200)
    bridge.add(neighbour)
    for index in range(1000):
        bridge.add(request(f"r{index}", max_tokens=250))
        bridge.abort(f"r{index}")
    tokens, _ = bridge.collect("neighbour")
    assert tokens["neighbour"] == tokens_of(neighbour)
    assert counts(bridge) == [0, 0]
    assert bridge.call("reset_prefix_cache", False) is True


def test_a_duplicate_id_leaves_the_first_request_alone(make_mp_bridge):
    bridge = make_mp_bridge()
    bridge.call("pause_scheduler", "keep", False)
    first = request("same", max_tokens=20)
    bridge.add(first)
    bridge.add(request("same", max_tokens=3, seed=99))
    bridge.call("resume_scheduler")
    assert bridge.collect("same") == ({"same": tokens_of(first)}, {"same": FinishReason.LENGTH})
    again = request("same", max_tokens=4, seed=5)
    assert bridge.generate(again)["same"] == tokens_of(again)
