"""What a dying core means for the requests that had nothing to do with it, wherever it dies and of whatever.

Alone, they end with the same error and keep the tokens they have. Supervised, they go on as if nothing had happened.
"""

import pytest
from bridge import request, tokens_of
from fake_executor import HANG, KILL, OUT_OF_MEMORY, RAISE, SEGFAULT
from leftovers import Leftovers

from corespan.protocol.errors import EngineDeadError

CAUSES = {
    RAISE: "told to raise in the step",
    KILL: "SIGKILL",
    SEGFAULT: "SIGSEGV",
    OUT_OF_MEMORY: "MemoryError",
    HANG: "in obey",
}


ENDLESS = 15_000  # tokens, which take half a minute; what is to happen meanwhile takes milliseconds


def start_others(bridge, max_tokens=200):
    """Requests that are all admitted at once and have many tokens to go."""
    others = [request(f"other {index}", max_tokens=max_tokens, seed=index) for index in range(3)]
    bridge.call("pause_scheduler", "keep", False)
    for new in others:
        bridge.add(new)
    bridge.call("resume_scheduler")
    return others


def tokens_until_death(bridge, others, cause):
    """What each of the others has got when the error comes."""
    tokens = {new.request_id: [] for new in others}
    with pytest.raises(EngineDeadError, match=cause):
        while True:
            for output in bridge.get_output().outputs:
                assert output.finish_reason is None
                tokens[output.request_id] += output.new_token_ids
    return tokens


def die_in_prefill(bridge, trigger):
    bridge.add(request("fatal", [1, trigger]))


def die_in_decode(bridge, trigger):
    bridge.call("collective_rpc", "light_fuse", None, [5, trigger])


def die_in_a_call(bridge, trigger):
    with pytest.raises(EngineDeadError, match=CAUSES[trigger]):
        bridge.call("collective_rpc", "obey", None, [trigger])


def lose_the_input_thread(bridge, trigger):
    bridge.call("collective_rpc", "break_thread", None, ["core-input", "_intake"])
    bridge.abort("nobody")


def lose_the_output_thread(bridge, trigger):
    with pytest.raises(EngineDeadError, match="the output thread failed"):
        bridge.call("collective_rpc", "break_thread", None, ["core-output", "_encoder"])


@pytest.mark.parametrize(
    ("die", "trigger", "cause"),
    [
        *((die, trigger, CAUSES[trigger]) for die in (die_in_prefill, die_in_decode) for trigger in CAUSES),
        *((die_in_a_call, trigger, CAUSES[trigger]) for trigger in (KILL, SEGFAULT)),
        (lose_the_input_thread, None, "the input thread failed"),
        (lose_the_output_thread, None, "the output thread failed"),
    ],
)
def test_others_get_the_same_error_and_keep_what_they_have(make_mp_bridge, die, trigger, cause):
    leftovers = Leftovers()
    parallel = {"step_timeout": 1.0} if trigger == HANG else {}
    bridge = make_mp_bridge(step_seconds=0.002, max_model_len=ENDLESS + 10, parallel=parallel)
    others = start_others(bridge, ENDLESS)
    die(bridge, trigger)
    tokens = tokens_until_death(bridge, others, cause)
    for new in others:
        assert tokens[new.request_id] == tokens_of(new)[: len(tokens[new.request_id])]
    assert leftovers.found() == []


def test_memory_that_runs_out_in_a_call_is_that_calls_error_alone(make_mp_bridge):
    bridge = make_mp_bridge(step_seconds=0.002)
    others = start_others(bridge)
    with pytest.raises(MemoryError):
        bridge.call("collective_rpc", "obey", None, [OUT_OF_MEMORY])
    assert bridge.collect(*(new.request_id for new in others))[0] == {new.request_id: tokens_of(new) for new in others}


def test_under_supervision_others_never_notice(make_mp_bridge):
    bridge = make_mp_bridge(step_seconds=0.002, parallel={"engine_restart": 20, "step_timeout": 1.0})
    pids = set(bridge.call("collective_rpc", "pid"))
    for trigger in (SEGFAULT, OUT_OF_MEMORY, HANG):
        others = start_others(bridge)
        die_in_decode(bridge, trigger)
        tokens, _ = bridge.collect(*(new.request_id for new in others))
        assert tokens == {new.request_id: tokens_of(new) for new in others}
        pids |= set(bridge.call("collective_rpc", "pid"))
    assert len(pids) > 3
