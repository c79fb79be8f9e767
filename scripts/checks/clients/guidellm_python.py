"""guidellm: a short run at a fixed concurrency over chats and completions; every request is answered in full."""

import json
import os
import subprocess
import sys
from pathlib import Path

FOLDER = Path(os.environ["FOLDER"])
for kind in ("chat_completions", "text_completions"):
    report = FOLDER / f"guidellm-{kind}.json"
    command = [str(Path(sys.executable).with_name("guidellm")), "benchmark", "run", "--target", os.environ["BASE_URL"]]
    command += ["--model", os.environ["MODEL"], "--processor", os.environ["TOKENIZER"], "--request-type", kind]
    command += ["--profile", "concurrent", "--rate", "4", "--max-requests", "8", "--disable-console-interactive"]
    command += ["--data", "prompt_tokens=32,output_tokens=16", "--outputs", report.name, "--output-dir", str(FOLDER)]
    subprocess.run(command, check=True, cwd=FOLDER)
    (run,) = json.loads(report.read_text())["benchmarks"]
    totals = run["metrics"]["request_totals"]
    assert totals["successful"] == 8 and totals["errored"] == 0, totals
