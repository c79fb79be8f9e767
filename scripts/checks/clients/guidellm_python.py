"""guidellm: a short run at a fixed concurrency over chats and completions; every request is answered in full."""

import json
import os
import subprocess
import sys
from pathlib import Path

FOLDER = Path(os.environ["FOLDER"])
for kind in ("chat/completions", "completions"):
    report = FOLDER / f"guidellm-{kind.replace('/', '-')}.json"
    backend = f"kind=openai_http,target={os.environ['BASE_URL']},model={os.environ['MODEL']},request_format=/v1/{kind}"
    command = [str(Path(sys.executable).with_name("guidellm")), "run", "--disable-console-interactive"]
    command += ["--backend", backend, "--output", f"kind=json,path={report}"]
    command += ["--profile", "kind=concurrent,streams=4", "--constraint", "kind=max_requests,count=8"]
    command += ["--tokenizer", f"kind=huggingface_auto,model={os.environ['TOKENIZER']}"]
    command += ["--data", "kind=synthetic_text,prompt_tokens=32,output_tokens=16"]
    subprocess.run(command, check=True, cwd=FOLDER)
    (run,) = json.loads(report.read_text())["benchmarks"]
    totals = run["metrics"]["request_totals"]
    assert totals["successful"] == 8 and totals["errored"] == 0, totals
