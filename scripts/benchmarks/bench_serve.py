"""What HTTP costs: the same load on an engine in its own process and behind the server, in turns, in one sitting.

With the real model: tokens a second of 64 streams. With an engine that takes its time and computes nothing: the time
to the first token of one stream and of 64, the server's CPU time per token, how late its event loop is with 256 streams
at 50 tokens a second. And the seconds from `corespan serve` to the first answer, and of a change between two models.
"""

import argparse
import contextlib
import json
import os
import shutil
import signal
import statistics
import subprocess
import sys
import tempfile
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

BENCHMARKS = Path(__file__).resolve().parent
MODEL = "smollm2-135m"
PORT = 18431
SIZES = {"hidden_size": 2048, "intermediate_size": 5632, "num_attention_heads": 32, "num_key_value_heads": 32}
NUM_LAYERS = 8  # with SIZES and the tokenizer's 49,152 words, 1 GB in bfloat16
FIGURES = ("throughput", "ttft", "cpu", "lag", "start", "switch")


def main() -> None:
    parser = argparse.ArgumentParser(prog="scripts/bench_serve", description=__doc__)
    parser.add_argument("figures", nargs="*", metavar="FIGURE", help=f"which: {', '.join(FIGURES)} [all]")
    parser.add_argument("--model", default=MODEL, help="short name or path [%(default)s]")
    parser.add_argument("--repeat", type=int, default=3, metavar="N", help="runs of each [%(default)s]")
    options = parser.parse_args()
    measures = {"throughput": throughput, "ttft": ttft, "cpu": cpu, "lag": lag, "start": start, "switch": switch}
    if unknown := set(options.figures) - set(FIGURES):
        parser.error(f"unknown: {', '.join(sorted(unknown))}; there are {', '.join(FIGURES)}")
    for name in options.figures or FIGURES:
        load = os.getloadavg()[0]
        print(
            json.dumps({"figure": name, "load_before": load} | measures[name](options.model, options.repeat)),
            flush=True,
        )


def throughput(model: str, repeat: int) -> dict[str, Any]:
    """64 streams of 64 tokens of the real model: tokens a second over HTTP and in process."""
    load = {"streams": 64, "tokens": 64, "prompt_len": 32}
    rates: dict[str, list[float]] = {"http": [], "in_process": []}
    for _ in range(repeat):
        with served(model, None) as server:
            rates["http"].append(64 * 64 / server.load(**load)["seconds"])
        rates["in_process"].append(64 * 64 / driven(model, None, **load)["seconds"])
    ratios = [http / own for http, own in zip(rates["http"], rates["in_process"], strict=True)]
    return {
        "ratio": statistics.median(ratios),
        "ratios": ratios,
        **{f"tokens_s_{name}": r for name, r in rates.items()},
    }


def ttft(model: str, repeat: int) -> dict[str, Any]:
    """What HTTP adds to the median time to the first token, in ms, of streams one after the other and of 64 at once."""
    added: dict[str, list[float]] = {"1": [], "64": []}
    for _ in range(repeat):
        for name, load in {"1": {"one_by_one": True, "streams": 50}, "64": {"streams": 64}}.items():
            with served(model, 0.005) as server:
                http = server.load(tokens=4, **load)["ttft_p50_s"]
            own = driven(model, 0.005, tokens=4, **load)["ttft_p50_s"]
            added[name].append(1000 * (http - own))
    return {f"added_ms_p50_{name}": statistics.median(values) for name, values in added.items()} | {"all_ms": added}


def cpu(model: str, repeat: int) -> dict[str, Any]:
    """Microseconds of CPU time per streamed token: of the server's process, and of AsyncLLM alone under this load.

    Steps take 20 ms, so that every token is an event of its own: a server that falls behind joins them.
    """
    load = {"streams": 64, "tokens": 200}
    num_tokens = load["streams"] * load["tokens"]
    runs: dict[str, list[dict[str, Any]]] = {"server": [], "asyncllm": []}
    for _ in range(repeat):
        with served(model, 0.02) as server:
            runs["server"].append(server.recorded(**load))
        runs["asyncllm"].append(driven(model, 0.02, **load))
    figures: dict[str, Any] = {"events_a_token": [run["events"] / num_tokens for run in runs["server"]]}
    for name, measured in runs.items():
        for kind in ("cpu_s", "cpu_system_s"):
            values = [1e6 * run[kind] / num_tokens for run in measured]
            figures[f"{name}_{kind.removesuffix('_s')}_us"] = {"median": statistics.median(values), "all": values}
    return figures


def lag(model: str, repeat: int) -> dict[str, Any]:
    """256 streams at 50 tokens a second: how late timers of the server's event loop fire."""
    runs = []
    for _ in range(repeat):
        with served(model, 0.02) as server:
            runs.append(server.recorded(streams=256, tokens=150))
    return {"lag_p99_ms": statistics.median(run["lag_p99_ms"] for run in runs), "runs": runs}


def start(model: str, repeat: int) -> dict[str, Any]:
    """Seconds from starting the command to the first 200 of a chat; the model is in the cache."""
    runs = [seconds_to_first_answer(model) for _ in range(repeat)]
    return {"seconds": statistics.median(runs), "runs": runs}


def switch(model: str, repeat: int) -> dict[str, Any]:
    """Seconds to the first answer of a model of 1 GB that took turns with another: woken, and loaded again."""
    seconds: dict[str, list[float]] = {}
    with tempfile.TemporaryDirectory() as folder:
        first = gigabyte_model(Path(folder), model)
        second = Path(folder) / "second"
        second.symlink_to(first)
        for name, num_asleep in (("woken", 1), ("loaded", 0)):
            options = ["--max-sleeping-models", str(num_asleep), "--max-model-len", "2048", "--max-num-seqs", "4"]
            with serving(str(first), str(second), *options):
                _answered(str(first)), _answered(str(second))
                seconds[name] = [_answered(str(each)) for _ in range(repeat) for each in (first, second)]
    return {f"{name}_s": statistics.median(runs) for name, runs in seconds.items()} | {"runs": seconds}


def gigabyte_model(folder: Path, tokenizer_of: str) -> Path:
    """A model of random weights, with the tokenizer of another."""
    import torch
    from safetensors.torch import save_file
    from transformers import LlamaConfig, LlamaForCausalLM

    from corespan.engine.model_files.model_source import resolve_model

    path = folder / "first"
    shutil.copytree(str(resolve_model(tokenizer_of).tokenizer_dir), path)
    words = json.loads((path / "tokenizer.json").read_text())["model"]["vocab"]
    config = LlamaConfig(**SIZES, num_hidden_layers=NUM_LAYERS, vocab_size=len(words), tie_word_embeddings=True)
    config.architectures = ["LlamaForCausalLM"]
    config.torch_dtype = "bfloat16"
    config.save_pretrained(path)
    with torch.device("meta"):
        shapes = LlamaForCausalLM(config).state_dict()
    tile = torch.randn(1 << 20).to(torch.bfloat16) * 0.02
    weights = {
        name: tile.repeat(-(-meta.numel() // tile.numel()))[: meta.numel()].reshape(meta.shape).clone()
        for name, meta in shapes.items()
        if name != "lm_head.weight"
    }
    save_file(weights, path / "model.safetensors", {"format": "pt"})
    return path


class Served:
    """A server in a process of its own."""

    def __init__(self, process: "subprocess.Popen[str]", url: str) -> None:
        self.process = process
        self.url = url

    def load(self, streams: int, tokens: int, prompt_len: int = 16, one_by_one: bool = False) -> dict[str, Any]:
        given = {"url": self.url, "streams": streams, "tokens": tokens, "prompt_len": prompt_len}
        return _json_of([str(BENCHMARKS / "stream_load.py"), json.dumps(given | {"one_by_one": one_by_one})])

    def recorded(self, **load: Any) -> dict[str, Any]:
        """A load, and what the server recorded of itself meanwhile."""
        self.load(streams=1, tokens=2)
        self.process.send_signal(signal.SIGUSR1)
        measured = self.load(**load)
        self.process.send_signal(signal.SIGUSR1)
        assert self.process.stdout is not None
        return measured | json.loads(self.process.stdout.readline())


@contextmanager
def served(model: str, step_seconds: float | None) -> Iterator[Served]:
    command = [sys.executable, str(BENCHMARKS / "served_engine.py")]
    subject = json.dumps({"model": model, "step_seconds": step_seconds})
    with subprocess.Popen([*command, subject], stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        url = process.stdout.readline().strip()
        if not url:
            raise SystemExit("the server did not start; its messages are above")
        yield Served(process, url)
        process.terminate()


def driven(model: str, step_seconds: float | None, **load: Any) -> dict[str, Any]:
    """The same load in the engine's own process."""
    subject = {"model": model, "step_seconds": step_seconds, "http": False, **load}
    return _json_of([str(BENCHMARKS / "served_engine.py"), json.dumps(subject)])


def _json_of(command: list[str]) -> dict[str, Any]:
    done = subprocess.run([sys.executable, *command], stdout=subprocess.PIPE, text=True, check=True)
    result: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return result


def seconds_to_first_answer(model: str) -> float:
    began = time.perf_counter()
    with serving(model):
        return time.perf_counter() - began + _answered()


@contextmanager
def serving(*arguments: str) -> Iterator[None]:
    """`corespan serve`, from when it listens."""
    command = [sys.executable, "-m", "corespan.server.cli", "serve", *arguments, "--host", "127.0.0.1"]
    with tempfile.TemporaryFile("w+") as log:
        with subprocess.Popen([*command, "--port", str(PORT)], stderr=log, stdout=log) as process:
            try:
                while process.poll() is None:
                    with contextlib.suppress(OSError), urllib.request.urlopen(f"http://127.0.0.1:{PORT}/live"):
                        break
                    time.sleep(0.02)
                else:
                    log.seek(0)
                    raise SystemExit(log.read())
                yield
            finally:
                process.terminate()


def _answered(model: str | None = None) -> float:
    """Seconds until a chat of one token is answered, asked again while the server has no model."""
    body = {"model": model, "messages": [{"role": "user", "content": "Hi"}], "max_tokens": 1}
    request = urllib.request.Request(f"http://127.0.0.1:{PORT}/v1/chat/completions", json.dumps(body).encode())
    request.add_header("Content-Type", "application/json")
    began = time.perf_counter()
    while True:
        try:
            with urllib.request.urlopen(request):
                return time.perf_counter() - began
        except urllib.error.HTTPError as error:
            if error.code != 503:
                raise SystemExit(error.read().decode()) from None
        time.sleep(0.02)


if __name__ == "__main__":
    main()
