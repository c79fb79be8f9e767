"""What the files in deploy/ refer to exists: options, routes, metrics, files."""

import json
import re
import socket
from pathlib import Path
from typing import Any

import pytest
import yaml

from corespan.server.cli import build_parser
from corespan.server.http.app import ENDPOINTS
from corespan.server.service_manager import notify

ROOT = Path(__file__).parents[1]
DEPLOY = ROOT / "deploy"


def documents(name: str) -> list[dict[str, Any]]:
    return list(yaml.safe_load_all((DEPLOY / name).read_text(encoding="utf-8")))


def container() -> dict[str, Any]:
    (deployment,) = [each for each in documents("kubernetes.yaml") if each["kind"] == "Deployment"]
    (found,) = deployment["spec"]["template"]["spec"]["containers"]
    return dict(found)


def unit_command() -> list[str]:
    (line,) = re.findall(r"^ExecStart=\S+/corespan (.+)$", (DEPLOY / "corespan.service").read_text(), re.MULTILINE)
    return str(line).split()


def test_servers_are_started_with_options_that_exist(tmp_path: Path) -> None:
    (tmp_path / "corespan.yaml").write_text("model: smollm2-135m\n")
    unit = [word.replace("/etc/", f"{tmp_path}/") for word in unit_command()]
    compose = ["serve", *documents("compose.yaml")[0]["services"]["corespan"]["command"]]

    for command in (unit, compose, ["serve", *container()["args"]]):
        assert build_parser().parse_args(command).shutdown_timeout == 30


def test_probes_ask_routes_that_exist() -> None:
    paths = {endpoint.path for endpoint in ENDPOINTS}
    kinds = ("startupProbe", "readinessProbe", "livenessProbe")
    probed = [container()[kind]["httpGet"]["path"] for kind in kinds]
    probed += re.findall(r"localhost:8000(/\w+)", (DEPLOY / "Dockerfile").read_text())

    assert len(probed) == 4
    assert set(probed) <= paths


def test_the_dashboard_asks_for_metrics_that_exist() -> None:
    source = (ROOT / "engine/metrics/prometheus.py").read_text() + (ROOT / "server/http/http_metrics.py").read_text()
    known = set(re.findall(r'"([a-z_]+)"', source))
    panels = json.loads((DEPLOY / "grafana/dashboard.json").read_text())["panels"]
    asked = re.findall(r"(?:vllm:|\b(?=http_))([a-z_]+)", " ".join(t["expr"] for p in panels for t in p["targets"]))

    assert len(asked) >= 10
    assert {re.sub("_(total|bucket)$", "", name) for name in asked} <= known


def test_files_that_compose_mounts_exist() -> None:
    services = documents("compose.yaml")[0]["services"]
    mounted = [v.split(":")[0] for service in services.values() for v in service["volumes"] if v.startswith(".")]

    assert len(mounted) == 4
    assert all((DEPLOY / name).is_file() for name in mounted)


def test_the_image_runs_as_nobody_special() -> None:
    last_stage = (DEPLOY / "Dockerfile").read_text().split("\nFROM ")[-1]

    assert re.search(r"^USER (?!0\b|root\b)", last_stage, re.MULTILINE)


@pytest.mark.parametrize("abstract", [False, True])
def test_the_service_manager_is_told(abstract: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    name = f"@{tmp_path}" if abstract else str(tmp_path / "notify")
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as manager:
        manager.bind("\0" + name[1:] if abstract else name)
        monkeypatch.setenv("NOTIFY_SOCKET", name)
        notify("READY=1")

        assert manager.recv(100) == b"READY=1"


def test_a_service_manager_that_is_gone_is_no_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("NOTIFY_SOCKET", str(tmp_path / "nobody"))

    notify("READY=1")
