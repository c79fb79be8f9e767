"""`corespan bench`: its figures by hand, a run against a server, runs of the engine alone."""

import json
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import pytest
from clients import SMALL_ENGINE
from http_server import ServerThread

from corespan.server import cli
from corespan.server.bench.client import Timing
from corespan.server.bench.latency import figures as latency_figures
from corespan.server.bench.results import details, figures


def test_figures_are_those_of_the_answers_that_came() -> None:
    answers = [Timing(0.1, 0.5, [0.2, 0.2], 10, 3), Timing(0.3, 0.3, [], 20, 1), Timing(error="refused")]

    result = figures(answers, duration=2.0, percentiles=[50], goodput={"ttft": 200})

    assert (result["completed"], result["failed"]) == (2, 1)
    assert (result["total_input_tokens"], result["total_output_tokens"]) == (30, 4)
    assert (result["output_throughput"], result["total_token_throughput"]) == (2.0, 17.0)
    assert result["request_goodput"] == 0.5
    assert result["mean_ttft_ms"] == result["p50_ttft_ms"] == pytest.approx(200)
    assert result["mean_tpot_ms"] == result["median_itl_ms"] == pytest.approx(200)
    assert result["std_e2el_ms"] == pytest.approx(100)
    assert details(answers)["errors"] == ["", "", "refused"]
    assert "mean_ttft_ms" not in figures(answers, 2.0, [50], metrics=["e2el"])


def _run(server: ServerThread, *arguments: str) -> int:
    load = ["--num-prompts", "4", "--random-input-len", "8", "--random-output-len", "5", "--ignore-eos"]
    return cli.main(["bench", "serve", "--base-url", server.url, *load, *arguments])


@pytest.mark.parametrize("backend", ["openai", "openai-chat"])
def test_a_run_counts_what_the_server_made(backend: str, tiny_server: ServerThread, tmp_path: Path) -> None:
    pace = ["--request-rate", "1000", "--burstiness", "2", "--max-concurrency", "2", "--num-warmups", "1"]
    where = ["--result-dir", str(tmp_path / "made"), "--result-filename", "result.json"]
    wanted = [
        "--save-detailed",
        "--metadata",
        "host=here",
        "--goodput",
        "e2el:60000",
        "--ready-check-timeout-sec",
        "60",
    ]

    assert _run(tiny_server, "--backend", backend, *pace, *where, *wanted, "--plot", str(tmp_path / "run.svg")) == 0

    result = json.loads((tmp_path / "made" / "result.json").read_text())
    assert (result["completed"], result["failed"], result["total_output_tokens"]) == (4, 0, 20)
    assert (result["model_id"], result["host"], result["output_lens"]) == ("tiny", "here", [5] * 4)
    assert result["p99_e2el_ms"] >= result["mean_ttft_ms"] > 0
    assert result["request_goodput"] == result["request_throughput"]
    curves = [each for each in ElementTree.parse(tmp_path / "run.svg").iter() if each.tag.endswith("polyline")]
    assert len(curves) == 4


def test_results_are_appended_and_the_rate_grows(tiny_server: ServerThread, tmp_path: Path) -> None:
    ramp = ["--ramp-up-strategy", "linear", "--ramp-up-start-rps", "500", "--ramp-up-end-rps", "1000"]
    where = ["--append-result", "--result-dir", str(tmp_path)]
    prompts = tmp_path / "prompts.jsonl"
    prompts.write_text('{"prompt": "one two"}\n{"prompt": "three", "output_tokens": 2}\n')
    custom = ["--dataset-name", "custom", "--dataset-path", str(prompts), "--custom-output-len", "3"]

    assert _run(tiny_server, *ramp, *where) == _run(tiny_server, *custom, *where) == 0

    lines = [json.loads(line) for line in (tmp_path / "bench.json").read_text().splitlines()]
    assert [line["total_output_tokens"] for line in lines] == [20, 10]


def test_a_run_of_refusals_fails(tiny_server: ServerThread, capsys: pytest.CaptureFixture[str]) -> None:
    assert _run(tiny_server, "--model", "other") == 1
    assert "404" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("arguments", "complaint"),
    [
        (["--num-prompts", "0"], "--num-prompts must be at least 1, got 0"),
        (["--request-rate", "0"], "--request-rate and --burstiness must be above 0"),
        (["--dataset-name", "custom"], "needs --dataset-path"),
        (["--goodput", "latency:3"], "no such metric: latency"),
        (["--header", "x"], "--header takes NAME=VALUE"),
        (["--ramp-up-strategy", "linear"], "needs --ramp-up-start-rps"),
    ],
)
def test_senseless_options_are_one_line(
    arguments: list[str], complaint: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert cli.main(["bench", "serve", "--model", "tiny", *arguments]) == 1
    assert complaint in capsys.readouterr().err


def test_latency_figures() -> None:
    result = latency_figures([1.0, 3.0])

    assert result["avg_latency"] == 2.0 and result["latencies"] == [1.0, 3.0]
    assert list(result["percentiles"]) == ["10", "25", "50", "75", "90", "99"]
    assert result["percentiles"]["50"] == 2.0


def test_the_engine_alone(tiny_llama_dir: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("VLLM_ENABLE_V1_MULTIPROCESSING", "0")
    monkeypatch.setenv("VLLM_LOGGING_LEVEL", "WARNING")
    small = [f"--{name.replace('_', '-')}={value}" for name, value in SMALL_ENGINE.items() if type(value) is int]
    path = tmp_path / "result.json"

    def measured(kind: str, *arguments: str) -> dict[str, Any]:
        lengths = ["--input-len", "8", "--output-len", "4", "--output-json", str(path)]
        assert cli.main(["bench", kind, "--model", tiny_llama_dir, *small, *lengths, *arguments]) == 0
        result: dict[str, Any] = json.loads(path.read_text())
        return result

    batches = ("--batch-size", "2", "--num-iters-warmup", "1", "--num-iters", "3", "--disable-detokenize")
    assert len(measured("latency", *batches)["latencies"]) == 3
    throughput = measured("throughput", "--num-prompts", "3", "--n", "2")
    assert (throughput["num_requests"], throughput["total_num_tokens"]) == (3, 3 * 8 + 3 * 2 * 4)
    assert throughput["tokens_per_second"] > throughput["requests_per_second"] > 0
