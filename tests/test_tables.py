"""What requests leave behind in the engine's tables: nothing, however they end, over the three clients."""

from collections import deque
from typing import Any

from corespan import RequestOutputKind, SamplingParams, StructuredOutputsParams

IN_TRANSIT = ("_outputs",)  # what the core has sent and nobody has asked for yet: it depends on the moment
PROMPT = [5 + position % 300 for position in range(40)]


def table_sizes(root: object) -> dict[str, int]:
    """The length of every container that hangs, through objects of ours, on `root`; by the path to it."""
    sizes: dict[str, int] = {}
    seen: set[int] = set()
    pending = [("", root)]
    while pending:
        path, value = pending.pop()
        if id(value) in seen:
            continue
        seen.add(id(value))
        if isinstance(value, (dict, list, set, deque)):
            sizes[path] = len(value)
            items = value.items() if isinstance(value, dict) else enumerate(value)
            pending += [(f"{path}[{key!r}]", item) for key, item in items if is_ours(item)]
        elif is_ours(value):
            names = {*getattr(value, "__dict__", ()), *(name for kind in type(value).__mro__ for name in slots(kind))}
            pending += [(f"{path}.{name}", getattr(value, name, None)) for name in names if name not in IN_TRANSIT]
    return sizes


def is_ours(value: object) -> bool:
    return type(value).__module__.startswith("corespan.")


def slots(kind: type) -> tuple[str, ...]:
    names = kind.__dict__.get("__slots__", ())
    return (names,) if isinstance(names, str) else tuple(names)


def every_kind_of_request(runner: Any) -> None:
    """They end by length, by a stop string, by their grammar's end, and by being aborted."""
    fields: dict[str, Any] = {"seed": 3, "max_tokens": 12, "ignore_eos": True}
    (whole,) = runner.generate({"prompt_token_ids": PROMPT}, SamplingParams(**fields))
    text = whole.outputs[0].text
    kinds = [
        SamplingParams(**fields, n=3, logprobs=2, prompt_logprobs=1),
        SamplingParams(**fields, stop=[text[4:7]]),
        SamplingParams(**fields, bad_words=["the"], logit_bias={7: 1.0}, presence_penalty=0.5, min_tokens=3, min_p=0.1),
        SamplingParams(seed=3, structured_outputs=StructuredOutputsParams(choice=["yes", "no"])),
    ]
    runner.generate([{"prompt_token_ids": PROMPT[: 20 + at]} for at in range(4)], kinds)
    for at, params in enumerate(kinds):
        params = params.clone()
        params.output_kind = RequestOutputKind.DELTA
        params.max_tokens = 200
        runner.stream({"prompt_token_ids": PROMPT[at:]}, params, abort_after=1 + at % 2)


def test_requests_leave_nothing_in_any_table(make_runner: Any) -> None:
    runner = make_runner(num_gpu_blocks_override=33, disable_log_stats=False)
    every_kind_of_request(runner)
    assert runner.is_idle()
    before = table_sizes(runner.engine)

    for _ in range(3):
        every_kind_of_request(runner)

    assert runner.is_idle()
    after = table_sizes(runner.engine)
    assert {path: (before.get(path), size) for path, size in after.items() if size > before.get(path, 0)} == {}
    assert len(before) > 15
