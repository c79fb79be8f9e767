"""Clients that others wrote, each in a virtual environment of its own, against `corespan serve`.

A client's script is in `clients/`; it finds the server in BASE_URL, the model's name in MODEL, a folder with the
model's tokenizer in TOKENIZER and an empty folder in FOLDER. Environments are kept in corespan's cache.
"""

import argparse
import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path

from corespan.engine.model_files.model_source import resolve_model
from corespan.shared.cache_folder import cache_dir

SCRIPTS = Path(__file__).parent / "clients"
MODEL = "smollm2-135m"
LIKELIHOOD_TOLERANCE = 1e-6
READY = re.compile(r"Serving .* on (http://\S+?):? ")


@dataclass(frozen=True)
class Client:
    """`packages` are pip's requirements, or npm's for a script that ends in .mjs; the first is whose version counts."""

    name: str
    script: str
    packages: tuple[str, ...]


CLIENTS = (
    Client("openai-1", "openai_python.py", ("openai<2",)),
    Client("openai-2", "openai_python.py", ("openai<3",)),
    Client("openai-3", "openai_python.py", ("openai<4",)),
    Client("openai-node", "openai_node.mjs", ("openai",)),
    Client("anthropic", "anthropic_python.py", ("anthropic",)),
    Client("langchain", "langchain_python.py", ("langchain-openai",)),
    Client("litellm", "litellm_python.py", ("litellm",)),
    Client("lm-eval", "lm_eval_python.py", ("lm-eval[api]", "transformers")),
    Client("guidellm", "guidellm_python.py", ("guidellm",)),
    Client("aiperf", "aiperf_python.py", ("aiperf",)),
)


class CheckedServer:
    """`corespan serve` in a process of its own, on a port that is free."""

    def __init__(self, model: str, log: Path) -> None:
        options = ["--host", "127.0.0.1", "--port", "0", "--served-model-name", MODEL, "--tool-call-parser", "hermes"]
        options += ["--enable-tokenizer-info-endpoint", "--enable-auto-tool-choice", "--max-model-len", "2048"]
        options += ["--kv-cache-memory-bytes", str(1 << 29)]
        self._log = log.open("w")
        command = [sys.executable, "-m", "corespan.server.cli", "serve", model, *options]
        self.process = subprocess.Popen(command, stderr=self._log, stdout=self._log, cwd=log.parent)
        self.url = self._wait_ready(log)

    def _wait_ready(self, log: Path) -> str:
        while self.process.poll() is None:
            if found := READY.search(log.read_text()):
                return found[1]
            time.sleep(0.1)
        raise SystemExit(f"the server ended:\n{log.read_text()}")

    def close(self) -> int:
        self.process.terminate()
        return self.process.wait()


def environment_of(client: Client, root: Path) -> Path:
    """The client's folder, with its packages installed. Raises CalledProcessError where they cannot be."""
    folder = root / client.name
    stamp, wanted = folder / "installed.json", json.dumps(client.packages)
    if stamp.exists() and stamp.read_text() == wanted:
        return folder
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    if client.script.endswith(".mjs"):
        npm = ["npm", "install", "--silent", "--no-audit", "--no-fund"]
        subprocess.run([*npm, *client.packages], cwd=folder, check=True)
    else:
        subprocess.run([sys.executable, "-m", "venv", str(folder)], check=True)
        pip = [str(folder / "bin" / "python"), "-m", "pip", "install", "--quiet", "--disable-pip-version-check"]
        subprocess.run([*pip, *client.packages], check=True)
    stamp.write_text(wanted)
    return folder


def version_of(client: Client, folder: Path) -> str:
    package = re.split(r"[\[<>=]", client.packages[0])[0]
    if client.script.endswith(".mjs"):
        described = json.loads((folder / "node_modules" / package / "package.json").read_text())
        return str(described["version"])
    program = f"from importlib.metadata import version; print(version({package!r}))"
    python = str(folder / "bin" / "python")
    return subprocess.run([python, "-c", program], capture_output=True, text=True, check=True).stdout.strip()


def run_client(client: Client, folder: Path, url: str, tokenizer: Path, scratch: Path) -> bool:
    """Whether it passed; its output is shown where it did not."""
    scratch.mkdir()
    environment = {name: value for name, value in os.environ.items() if name not in ("VIRTUAL_ENV", "PYTHONPATH")}
    environment |= {"BASE_URL": url, "MODEL": MODEL, "TOKENIZER": str(tokenizer), "FOLDER": str(scratch)}
    environment |= {
        "HF_HUB_OFFLINE": "1",
        "LITELLM_LOCAL_MODEL_COST_MAP": "True",
        "OPENAI_API_KEY": "EMPTY",
        "PATH": f"{folder / 'bin'}:{os.environ['PATH']}",
    }
    script = SCRIPTS / client.script
    if script.suffix == ".mjs":
        copied = folder / script.name  # node looks for packages beside the script
        shutil.copy(script, copied)
        command = ["node", str(copied)]
    else:
        command = [str(folder / "bin" / "python"), str(script)]
    done = subprocess.run(command, env=environment, cwd=scratch, capture_output=True, text=True)
    if done.returncode != 0:
        print(done.stdout[-4000:], done.stderr[-8000:], sep="\n", file=sys.stderr)
    return done.returncode == 0


def likelihoods_agree(model: str, scratch: Path) -> bool:
    """Whether what lm-eval was told is what the engine says to a program that has it in its own process."""
    from corespan import LLM, SamplingParams

    llm = LLM(model, max_model_len=2048, kv_cache_memory_bytes=1 << 28)
    tokenizer, worst = llm.get_tokenizer(), 0.0
    scored = json.loads((scratch / "likelihoods.json").read_text())
    for each in scored:
        context = tokenizer.encode(each["context"], add_special_tokens=False)
        whole = tokenizer.encode(each["context"] + each["continuation"], add_special_tokens=False)
        params = SamplingParams(max_tokens=1, temperature=0, prompt_logprobs=1)
        (output,) = llm.generate([{"prompt_token_ids": whole}], params, use_tqdm=False)
        entries = output.prompt_logprobs[len(context) :]
        told = sum(entry[token].logprob for token, entry in zip(whole[len(context) :], entries, strict=True))
        worst = max(worst, abs(told - each["loglikelihood"]))
    print(f"lm-eval: {len(scored)} likelihoods differ from the engine's in process by at most {worst:g}")
    return worst <= LIKELIHOOD_TOLERANCE


def main() -> int:
    names = [client.name for client in CLIENTS]
    parser = argparse.ArgumentParser(prog="scripts/check_clients", description=__doc__)
    parser.add_argument("clients", nargs="*", metavar="CLIENT", help=f"which: {', '.join(names)} [all]")
    parser.add_argument("--model", default=MODEL, help="what is served [%(default)s]")
    options = parser.parse_args()
    if unknown := set(options.clients) - set(names):
        parser.error(f"unknown: {', '.join(sorted(unknown))}; there are {', '.join(names)}")
    chosen = [client for client in CLIENTS if client.name in options.clients or not options.clients]

    tokenizer, failed = Path(str(resolve_model(options.model).tokenizer_dir)), 0
    with tempfile.TemporaryDirectory() as scratch:
        server = CheckedServer(options.model, Path(scratch) / "server.log")
        try:
            for client in chosen:
                began = time.perf_counter()
                folder = environment_of(client, cache_dir() / "check_clients")
                passed = run_client(client, folder, server.url, tokenizer, Path(scratch) / client.name)
                if passed and client.name == "lm-eval":
                    passed = likelihoods_agree(options.model, Path(scratch) / client.name)
                failed += not passed
                verdict, seconds = "passes" if passed else "FAILS", time.perf_counter() - began
                print(f"{client.name} {version_of(client, folder)}: {verdict}, {seconds:.0f} s", flush=True)
        finally:
            status = server.close()
    print(f"the server ended with status {status}")
    return 1 if failed or status else 0


if __name__ == "__main__":
    sys.exit(main())
