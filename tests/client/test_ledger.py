"""Which requests a new core gets, and which are given up."""

from bridge import request

from corespan.client.ledger import Ledger
from corespan.protocol.outputs import EngineCoreOutput, EngineCoreOutputs, FinishReason


def add(ledger, *names):
    for name in names:
        ledger.add(request(name))


def due(ledger):
    return {new.request_id: new.output_token_ids for new in ledger.take_due()}


def bury(ledger, **how):
    return [given_up.request_id for given_up in ledger.bury(**how)]


def receive(ledger, request_id, *tokens, finished=False):
    reason = FinishReason.LENGTH if finished else None
    ledger.record(EngineCoreOutputs(outputs=[EngineCoreOutput(request_id, list(tokens), reason)]))


def test_new_requests_are_due_once():
    ledger = Ledger(None)
    add(ledger, "a", "b")
    assert due(ledger) == {"a": [], "b": []}
    assert due(ledger) == {}


def test_requests_with_progress_go_on_at_once_and_finished_ones_do_not():
    ledger = Ledger(None)
    add(ledger, "a", "b", "c")
    due(ledger)
    receive(ledger, "a", 1, 2, 3)
    receive(ledger, "b", 4, finished=True)
    ledger.discard(["c"])
    assert ledger.bury() == []
    assert due(ledger) == {"a": [1, 2, 3]}
    assert due(ledger) == {}


def test_suspects_are_tried_one_by_one_after_the_others_have_made_progress():
    ledger = Ledger(None)
    add(ledger, "sound", "x", "y")
    due(ledger)
    receive(ledger, "sound", 1, 2)
    ledger.bury()
    add(ledger, "new")
    assert due(ledger) == {"sound": [1, 2]}
    assert due(ledger) == {}
    receive(ledger, "sound", 3, 4)
    assert due(ledger) == {"x": []}
    receive(ledger, "x", 5)
    assert due(ledger) == {}
    receive(ledger, "x", 6)
    assert due(ledger) == {"y": []}
    ledger.discard(["y"])
    assert due(ledger) == {"new": []}


def test_a_request_on_trial_whose_core_dies_is_given_up():
    ledger = Ledger(None)
    add(ledger, "x", "killer", "y")
    due(ledger)
    assert ledger.bury() == []
    assert due(ledger) == {"x": []}
    receive(ledger, "x", 1, finished=True)
    assert due(ledger) == {"killer": []}
    assert bury(ledger) == ["killer"]
    assert due(ledger) == {"y": []}
    receive(ledger, "y", 1, 2)
    assert due(ledger) == {}


def test_a_lone_request_whose_core_dies_twice_is_given_up_however_far_it_was():
    ledger = Ledger(None)
    add(ledger, "killer")
    due(ledger)
    receive(ledger, "killer", 1, 2, 3, 4)
    assert ledger.bury() == []
    assert due(ledger) == {"killer": [1, 2, 3, 4]}
    assert bury(ledger) == ["killer"]


def test_nobody_is_suspected_of_a_death_in_which_nothing_ran():
    ledger = Ledger(None)
    add(ledger, "x", "y")
    due(ledger)
    assert bury(ledger, halted=True) == []
    assert due(ledger) == {"x": [], "y": []}
    assert ledger.num_held == 0


def test_a_request_on_trial_stays_there_when_the_core_dies_halted():
    ledger = Ledger(None)
    add(ledger, "x", "y")
    due(ledger)
    assert bury(ledger) == []
    assert due(ledger) == {"x": []}
    assert bury(ledger, halted=True) == []
    assert due(ledger) == {"x": []}
    assert ledger.num_held == 1
    assert bury(ledger) == ["x"]


def test_a_lone_request_is_not_blamed_for_a_death_in_which_nothing_ran():
    ledger = Ledger(None)
    add(ledger, "lone")
    due(ledger)
    assert bury(ledger, halted=True) == []
    due(ledger)
    assert bury(ledger) == []


def test_requests_that_cannot_have_been_running_are_not_suspected():
    ledger = Ledger(max_num_seqs=1)
    add(ledger, "running", "queued", "queued too")
    due(ledger)
    receive(ledger, "running", 1, 2)
    ledger.bury()
    assert due(ledger) == {"running": [1, 2]}
    assert due(ledger) == {}
    receive(ledger, "running", 3, 4)
    assert due(ledger) == {"queued": [], "queued too": []}


def test_a_request_that_crashes_late_is_given_up_at_the_second_death():
    ledger = Ledger(None)
    add(ledger, "fresh", "a", "killer", "b")
    due(ledger)
    for name in ("a", "killer", "b"):
        receive(ledger, name, 1, 2, 3)
    assert bury(ledger) == []
    assert due(ledger) == {"a": [1, 2, 3]}
    receive(ledger, "a", 4, 5)
    assert due(ledger) == {"killer": [1, 2, 3]}
    assert bury(ledger) == ["killer"]
    assert due(ledger) == {"a": [1, 2, 3, 4, 5]}
    receive(ledger, "a", 6, 7)
    assert due(ledger) == {"b": [1, 2, 3]}
    receive(ledger, "b", 4, 5)
    assert due(ledger) == {"fresh": []}


def test_after_a_kill_those_with_progress_go_on_at_once():
    ledger = Ledger(None)
    add(ledger, "a", "fresh", "b")
    due(ledger)
    for name in ("a", "b"):
        receive(ledger, name, 1, 2, 3)
    assert bury(ledger, killed=True) == []
    assert due(ledger) == {"a": [1, 2, 3], "b": [1, 2, 3]}
    assert due(ledger) == {}
    assert bury(ledger, killed=True) == []
