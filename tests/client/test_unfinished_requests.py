"""Which requests a new core gets, and which are given up."""

from bridge import request

from corespan.client.replay import UnfinishedRequests
from corespan.protocol.outputs import EngineCoreOutput, EngineCoreOutputs, FinishReason


def add(unfinished, *names):
    for name in names:
        unfinished.add(request(name))


def due(unfinished):
    return {new.request_id: new.output_token_ids for new in unfinished.take_due()}


def on_death(unfinished, **how):
    return [given_up.request_id for given_up in unfinished.on_death(**how)]


def receive(unfinished, request_id, *tokens, finished=False):
    reason = FinishReason.LENGTH if finished else None
    unfinished.record(EngineCoreOutputs(outputs=[EngineCoreOutput(request_id, list(tokens), reason)]))


def test_new_requests_are_due_once():
    unfinished = UnfinishedRequests(None)
    add(unfinished, "a", "b")
    assert due(unfinished) == {"a": [], "b": []}
    assert due(unfinished) == {}


def test_requests_with_progress_go_on_at_once_and_finished_ones_do_not():
    unfinished = UnfinishedRequests(None)
    add(unfinished, "a", "b", "c")
    due(unfinished)
    receive(unfinished, "a", 1, 2, 3)
    receive(unfinished, "b", 4, finished=True)
    unfinished.discard(["c"])
    assert unfinished.on_death() == []
    assert due(unfinished) == {"a": [1, 2, 3]}
    assert due(unfinished) == {}


def test_tokens_that_came_as_columns_count_like_others():
    unfinished = UnfinishedRequests(None)
    for number, name in enumerate(("a", "b", "c")):
        new = request(name)
        new.handle = 5 + number
        unfinished.add(new)
    due(unfinished)
    receive(unfinished, "c", 9, finished=True)
    for step in range(3):
        unfinished.record(EngineCoreOutputs(handles=[6, 5, 7, 99], token_ids=[step, 10 + step, 20 + step, 30 + step]))
    assert on_death(unfinished, killed=True) == []
    assert due(unfinished) == {"a": [10, 11, 12], "b": [0, 1, 2]}
    unfinished.discard(["a", "b"])
    assert not unfinished._by_handle


def test_suspects_go_alone_one_by_one_after_the_others_have_made_progress():
    unfinished = UnfinishedRequests(None)
    add(unfinished, "sound", "x", "y")
    due(unfinished)
    receive(unfinished, "sound", 1, 2)
    unfinished.on_death()
    add(unfinished, "new")
    assert due(unfinished) == {"sound": [1, 2]}
    assert due(unfinished) == {}
    receive(unfinished, "sound", 3, 4)
    assert due(unfinished) == {"x": []}
    receive(unfinished, "x", 5)
    assert due(unfinished) == {}
    receive(unfinished, "x", 6)
    assert due(unfinished) == {"y": []}
    unfinished.discard(["y"])
    assert due(unfinished) == {"new": []}


def test_a_request_in_quarantine_whose_core_dies_is_given_up():
    unfinished = UnfinishedRequests(None)
    add(unfinished, "x", "killer", "y")
    due(unfinished)
    assert unfinished.on_death() == []
    assert due(unfinished) == {"x": []}
    receive(unfinished, "x", 1, finished=True)
    assert due(unfinished) == {"killer": []}
    assert on_death(unfinished) == ["killer"]
    assert due(unfinished) == {"y": []}
    receive(unfinished, "y", 1, 2)
    assert due(unfinished) == {}


def test_a_lone_request_whose_core_dies_twice_is_given_up_however_far_it_was():
    unfinished = UnfinishedRequests(None)
    add(unfinished, "killer")
    due(unfinished)
    receive(unfinished, "killer", 1, 2, 3, 4)
    assert unfinished.on_death() == []
    assert due(unfinished) == {"killer": [1, 2, 3, 4]}
    assert on_death(unfinished) == ["killer"]


def test_nobody_is_suspected_of_a_death_in_which_nothing_ran():
    unfinished = UnfinishedRequests(None)
    add(unfinished, "x", "y")
    due(unfinished)
    assert on_death(unfinished, paused=True) == []
    assert due(unfinished) == {"x": [], "y": []}
    assert unfinished.num_held == 0


def test_a_request_in_quarantine_stays_there_when_the_core_dies_paused():
    unfinished = UnfinishedRequests(None)
    add(unfinished, "x", "y")
    due(unfinished)
    assert on_death(unfinished) == []
    assert due(unfinished) == {"x": []}
    assert on_death(unfinished, paused=True) == []
    assert due(unfinished) == {"x": []}
    assert unfinished.num_held == 1
    assert on_death(unfinished) == ["x"]


def test_a_lone_request_is_not_blamed_for_a_death_in_which_nothing_ran():
    unfinished = UnfinishedRequests(None)
    add(unfinished, "lone")
    due(unfinished)
    assert on_death(unfinished, paused=True) == []
    due(unfinished)
    assert on_death(unfinished) == []


def test_requests_that_cannot_have_been_running_are_not_suspected():
    unfinished = UnfinishedRequests(max_num_seqs=1)
    add(unfinished, "running", "queued", "queued too")
    due(unfinished)
    receive(unfinished, "running", 1, 2)
    unfinished.on_death()
    assert due(unfinished) == {"running": [1, 2]}
    assert due(unfinished) == {}
    receive(unfinished, "running", 3, 4)
    assert due(unfinished) == {"queued": [], "queued too": []}


def test_a_request_that_crashes_late_is_given_up_at_the_second_death():
    unfinished = UnfinishedRequests(None)
    add(unfinished, "fresh", "a", "killer", "b")
    due(unfinished)
    for name in ("a", "killer", "b"):
        receive(unfinished, name, 1, 2, 3)
    assert on_death(unfinished) == []
    assert due(unfinished) == {"a": [1, 2, 3]}
    receive(unfinished, "a", 4, 5)
    assert due(unfinished) == {"killer": [1, 2, 3]}
    assert on_death(unfinished) == ["killer"]
    assert due(unfinished) == {"a": [1, 2, 3, 4, 5]}
    receive(unfinished, "a", 6, 7)
    assert due(unfinished) == {"b": [1, 2, 3]}
    receive(unfinished, "b", 4, 5)
    assert due(unfinished) == {"fresh": []}


def test_after_a_kill_those_with_progress_go_on_at_once():
    unfinished = UnfinishedRequests(None)
    add(unfinished, "a", "fresh", "b")
    due(unfinished)
    for name in ("a", "b"):
        receive(unfinished, name, 1, 2, 3)
    assert on_death(unfinished, killed=True) == []
    assert due(unfinished) == {"a": [1, 2, 3], "b": [1, 2, 3]}
    assert due(unfinished) == {}
    assert on_death(unfinished, killed=True) == []
