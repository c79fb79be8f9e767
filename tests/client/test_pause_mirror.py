"""What a new core is asked for so that it is paused, or sleeps, as the one before did."""

import pytest

from corespan.client.replay import PauseMirror

SLEEP_1 = ("sleep", [1, "keep"])
SLEEP_2 = ("sleep", [2, "keep"])
PAUSE = ("pause_scheduler", ["keep", False])


@pytest.mark.parametrize(
    ("made", "due"),
    [
        ([], []),
        ([("pause_scheduler", ["abort", True])], [PAUSE]),
        ([("pause_scheduler", ["abort", True]), ("resume_scheduler", [])], []),
        ([("pause_scheduler", ["wait", True]), ("wake_up", [None])], []),
        ([("sleep", [0, "abort"])], [PAUSE]),
        ([("sleep", [0, "abort"]), ("wake_up", [["scheduling"]])], []),
        ([("sleep", [])], [SLEEP_1]),
        ([("sleep", [1, "abort"]), ("sleep", [2, "abort"])], [SLEEP_2]),
        ([("sleep", [2, "abort"]), ("sleep", [1, "abort"])], [SLEEP_2]),
        ([("sleep", [1, "abort"]), ("sleep", [0, "abort"])], [SLEEP_1]),
        ([("sleep", [1, "abort"]), ("wake_up", [])], []),
        ([("sleep", [2, "abort"]), ("wake_up", [["weights"]])], [SLEEP_1]),
        ([("sleep", [2, "abort"]), ("wake_up", [["kv_cache"]])], [SLEEP_2, ("wake_up", [["kv_cache"]])]),
        ([("sleep", [2, "abort"]), ("wake_up", [["scheduling"]])], [SLEEP_2]),
        ([("sleep", [2, "abort"]), ("wake_up", [["kv_cache"]]), ("wake_up", [["weights"]])], []),
        ([("reset_prefix_cache", [False]), ("collective_rpc", ["sleep", None, [1]])], []),
    ],
)
def test_a_new_core_is_brought_to_where_the_old_one_was(made, due):
    mirror = PauseMirror()
    for method, args in made:
        mirror.record(method, args)
    assert mirror.calls() == due
    assert mirror.is_paused is bool(due)
