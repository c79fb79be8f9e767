"""aiperf: a short streaming run over chats and completions; every request is answered."""

import json
import os
import subprocess
import sys
from pathlib import Path

FOLDER = Path(os.environ["FOLDER"])
# Told to stay offline, aiperf takes a folder's path for the name of a repository of the hub; a folder needs no hub.
ENVIRONMENT = {name: value for name, value in os.environ.items() if name != "HF_HUB_OFFLINE"}

for kind in ("chat", "completions"):
    artifacts = FOLDER / f"aiperf-{kind}"
    command = [str(Path(sys.executable).with_name("aiperf")), "profile", "--model", os.environ["MODEL"]]
    command += ["--url", os.environ["BASE_URL"], "--endpoint-type", kind, "--streaming", "--ui", "none"]
    command += ["--concurrency", "4", "--request-count", "8", "--tokenizer", os.environ["TOKENIZER"]]
    command += ["--synthetic-input-tokens-mean", "32", "--output-tokens-mean", "16"]
    command += ["--extra-inputs", "ignore_eos:true", "--artifact-dir", str(artifacts)]
    subprocess.run(command, check=True, cwd=FOLDER, env=ENVIRONMENT)
    (report,) = artifacts.rglob("*aiperf.json")
    figures = json.loads(report.read_text())
    assert figures["request_count"]["avg"] == 8 and not figures.get("error_summary"), figures
