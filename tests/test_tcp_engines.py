"""Whole engines that meet their core over TCP."""

import os
from typing import Any

import psutil

from corespan import SamplingParams

PROMPTS = ["The capital of France is", "Once upon a time", "x"]


def _listening() -> set[tuple[str, int]]:
    """Addresses on which this process listens."""
    connections = psutil.Process(os.getpid()).net_connections("inet")
    return {(each.laddr.ip, each.laddr.port) for each in connections if each.status == psutil.CONN_LISTEN}


def test_an_engine_over_tcp_generates_what_others_do(make_runner: Any, runner: Any) -> None:
    params = SamplingParams(temperature=0, max_tokens=20, ignore_eos=True, logprobs=2)
    expected = runner.generate(PROMPTS, params)

    before = _listening()

    over_tcp = make_runner(core_address="tcp://127.0.0.1")
    outputs = over_tcp.generate(PROMPTS, params)

    for output, other in zip(outputs, expected, strict=True):
        assert output.outputs[0].token_ids == other.outputs[0].token_ids
        assert output.outputs[0].cumulative_logprob == other.outputs[0].cumulative_logprob
    listening = _listening() - before
    assert {ip for ip, _ in listening} <= {"127.0.0.1"}
    assert bool(listening) == (over_tcp.kind != "inproc")
