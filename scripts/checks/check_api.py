"""Requests that schemathesis makes out of the server's own OpenAPI document, valid and not; none may end in a 5xx."""

import subprocess
import sys
import tempfile
from pathlib import Path

from page_server import KEY, PageServer

ROUTES_THAT_STOP_THE_ENGINE = "^/(sleep|pause|start_profile)$"


def main() -> int:
    examples = sys.argv[1] if len(sys.argv) > 1 else "100"
    with tempfile.TemporaryDirectory() as folder:
        server = PageServer(Path(folder))
        try:
            return subprocess.run(
                [
                    *(
                        sys.executable,
                        "-m",
                        "schemathesis.cli",
                        "run",
                        f"{server.url}/openapi.json",
                        "--checks",
                        "not_a_server_error",
                    ),
                    *("--header", f"Authorization: Bearer {KEY}", "--max-examples", examples, "--mode", "all"),
                    *("--phases", "examples,coverage,fuzzing", "--request-timeout", "60", "--continue-on-failure"),
                    *("--exclude-path-regex", ROUTES_THAT_STOP_THE_ENGINE),
                ],
                cwd=folder,
                check=False,
            ).returncode
        finally:
            server.close()


if __name__ == "__main__":
    sys.exit(main())
