"""`corespan bench serve`: its figures by hand, and a run against a server."""

import json
from pathlib import Path

import pytest
from http_server import ServerThread

from corespan.server import cli
from corespan.server.bench_serve import Timing, figures


def test_figures_are_those_of_the_answers_that_came() -> None:
    answers = [Timing(0.1, 0.5, [0.2, 0.2], 10, 3), Timing(0.3, 0.3, [], 20, 1), Timing(error="refused")]

    result = figures(answers, duration=2.0, percentiles=[50])

    assert (result["completed"], result["failed"]) == (2, 1)
    assert (result["total_input_tokens"], result["total_output_tokens"]) == (30, 4)
    assert (result["output_throughput"], result["total_token_throughput"]) == (2.0, 17.0)
    assert result["mean_ttft_ms"] == result["p50_ttft_ms"] == pytest.approx(200)
    assert result["mean_tpot_ms"] == result["median_itl_ms"] == pytest.approx(200)
    assert result["std_e2el_ms"] == pytest.approx(100)


@pytest.mark.parametrize("backend", ["openai", "openai-chat"])
def test_a_run_counts_what_the_server_made(backend: str, tiny_server: ServerThread, tmp_path: Path) -> None:
    saved = tmp_path / "result.json"
    load = ["--num-prompts", "4", "--random-input-len", "8", "--random-output-len", "5", "--ignore-eos"]
    pace = ["--request-rate", "1000", "--burstiness", "2", "--max-concurrency", "2"]
    where = ["--base-url", tiny_server.url, "--model", "tiny", "--backend", backend]

    assert cli.main(["bench", "serve", *where, *load, *pace, "--save-result", "--result-filename", str(saved)]) == 0

    result = json.loads(saved.read_text())
    assert (result["completed"], result["failed"], result["total_output_tokens"]) == (4, 0, 20)
    assert result["p99_e2el_ms"] >= result["mean_ttft_ms"] > 0


def test_a_run_of_refusals_fails(tiny_server: ServerThread, capsys: pytest.CaptureFixture[str]) -> None:
    where = ["--base-url", tiny_server.url, "--model", "other"]

    assert cli.main(["bench", "serve", *where, "--num-prompts", "2", "--random-input-len", "8"]) == 1
    assert "404" in capsys.readouterr().out
