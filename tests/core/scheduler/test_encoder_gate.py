"""When pictures are encoded, and how long their embeddings are kept."""

from typing import Any

import numpy as np

from corespan.core.scheduler.encoder_gate import EncoderGate
from corespan.core.scheduler.request import Request
from corespan.core.scheduler.runner_messages import SchedulerOutput, no_rows
from corespan.core.scheduler.step_plan import StepPlan
from corespan.protocol.multimodal import MultiModalFeatureSpec, PlaceholderRange
from corespan.protocol.requests import EngineCoreRequest
from corespan.protocol.resolved_sampling import ResolvedSampling


def request(request_id: str, *items: tuple[str, int, int]) -> Request:
    """items: identifier, offset and length of each picture."""
    data = {"image_embeds": np.zeros((1, 1), np.float32)}
    features = [MultiModalFeatureSpec("image", name, PlaceholderRange(at, size), data) for name, at, size in items]
    return Request(EngineCoreRequest(request_id, [1] * 100, ResolvedSampling(), mm_features=features))


def dropped(gate: EncoderGate) -> list[str]:
    output: Any = SchedulerOutput([], [], no_rows(), no_rows(), 0)
    gate.to_output(output)
    return output.encoder_dropped


def test_a_chunk_ends_before_a_picture_without_room() -> None:
    gate, plan = EncoderGate(10), StepPlan(100, 1)
    two = request("1", ("a", 5, 6), ("b", 20, 6))
    assert gate.cut(two, 0, 50, plan) == 20
    assert list(plan.encoding) == ["a"]
    other = request("2", ("b", 3, 6))
    assert gate.cut(other, 0, 50, plan) == 3
    assert gate.cut(other, 3, 50, plan) == 0, "it begins with what has no room"
    two.num_computed_tokens = 20
    gate.step_done()
    plan = StepPlan(100, 1)
    assert gate.cut(two, 20, 50, plan) == 50
    assert (list(plan.encoding), dropped(gate)) == (["b"], ["a"])
    assert gate.cut(other, 3, 50, plan) == 50, "it is being encoded for the other"


def test_what_nobody_holds_stays_while_there_is_room() -> None:
    gate = EncoderGate(10)
    first, plan = request("1", ("a", 0, 4)), StepPlan(100, 1)
    gate.cut(first, 0, 10, plan)
    gate.release(first)
    plan = StepPlan(100, 1)
    assert gate.cut(request("2", ("a", 0, 4), ("b", 4, 4)), 0, 10, plan) == 10
    assert (list(plan.encoding), dropped(gate)) == (["b"], [])
    gate.reset()
    assert dropped(gate) == [], "both are held"


def test_a_picture_of_a_request_that_is_preempted_while_it_is_planned_is_not_encoded() -> None:
    gate, plan = EncoderGate(10), StepPlan(100, 1)
    gate.cut(request("0", ("held", 0, 3)), 0, 10, StepPlan(100, 1))
    victim = request("1", ("a", 0, 4))
    gate.cut(victim, 0, 10, plan)
    gate.release(victim)
    assert gate.cut(request("2", ("b", 0, 6)), 0, 10, plan) == 10
    assert (list(plan.encoding), dropped(gate)) == (["b"], ["a"])
