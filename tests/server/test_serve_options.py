"""Options of `corespan serve`: from the command line, from a file, and what reaches engine and server."""

import argparse
import dataclasses
import socket
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from corespan.engine.engine_args import AsyncEngineArgs
from corespan.server import cli, serve
from corespan.server.serve_command import engine_args_of, run
from corespan.server.serve_options import ServeOptions


def parsed(*arguments: str) -> argparse.Namespace:
    return cli.build_parser().parse_args(["serve", *arguments])


@pytest.fixture
def config(tmp_path: Path) -> Any:
    def write(text: str) -> str:
        path = tmp_path / "serve.yaml"
        path.write_text(text)
        return str(path)

    return write


class TestConfigFile:
    def test_names_values_lists_switches_and_mappings(self, config: Any) -> None:
        path = config(
            "models: [a, b]\nport: 9000\nmax_model_len: 32K\napi-key: [one, two]\nssl: {keyfile: k, certfile: c}\n"
            "enable_admin: true\nallow-credentials: false\nenable-prefix-caching: false\nallowed-origins: ['http://x']\n"
            "default-chat-template-kwargs: {enable_thinking: false}\nhf-overrides: {rope_theta: 5}\n"
        )
        options = parsed("--config", path)
        server = ServeOptions.from_namespace(options)
        engine = engine_args_of(options, server, "a")

        assert options.models == ["a", "b"]
        assert (server.port, server.api_key, server.ssl_keyfile, server.ssl_certfile) == (
            9000,
            ["one", "two"],
            "k",
            "c",
        )
        assert (server.enable_admin, server.allow_credentials, server.allowed_origins) == (True, False, ["http://x"])
        assert server.default_chat_template_kwargs == {"enable_thinking": False}
        assert (engine.max_model_len, engine.enable_prefix_caching) == ("32K", False)
        assert engine.hf_overrides == {"rope_theta": 5}

    @pytest.mark.parametrize("before", [False, True])
    def test_command_line_wins_wherever_it_stands(self, config: Any, before: bool) -> None:
        file = ["--config", config("models: [a]\nport: 9000\nenable-prefix-caching: false\nuvicorn-log-level: error")]
        given = ["b", "--port", "1", "--enable-prefix-caching"]
        options = parsed(*(given + file if before else file + given))

        assert (options.models, options.port, options.enable_prefix_caching) == (["b"], 1, True)
        assert options.uvicorn_log_level == "error"

    @pytest.mark.parametrize(
        ("text", "complaint"),
        [
            ("prot: 1\nmax-model-lne: 2\nport: 3", "no such option: prot, max-model-lne"),
            ("ssl: {keyfil: k}", "no such option: ssl-keyfil"),
            ("- port", "it must hold names and values, not a list"),
            ("port: [", "--config"),
            ("port: many", "argument --port: invalid int value: 'many'"),
            ("reasoning-field: other", "argument --reasoning-field: invalid choice: 'other'"),
            ("enable-admin: maybe", "argument --enable-admin: ignored explicit argument 'maybe'"),
        ],
    )
    def test_what_is_wrong_is_named(
        self, config: Any, text: str, complaint: str, capsys: pytest.CaptureFixture[str]
    ) -> None:
        with pytest.raises(SystemExit) as ended:
            parsed("--config", config(text))

        assert ended.value.code == 2
        assert complaint in capsys.readouterr().err.splitlines()[-1]

    def test_missing_file_is_named(self, capsys: pytest.CaptureFixture[str]) -> None:
        with pytest.raises(SystemExit):
            parsed("--config", "/nonexistent.yaml")
        assert "No such file or directory: '/nonexistent.yaml'" in capsys.readouterr().err.splitlines()[-1]


class TestEngineOptions:
    def test_every_field_has_an_option(self) -> None:
        options = vars(parsed())
        server = {field.name for field in dataclasses.fields(ServeOptions)}
        for field in dataclasses.fields(AsyncEngineArgs):
            assert field.metadata.get("former") or field.name in options or field.name in server, field.name

    def test_values_reach_the_engine(self) -> None:
        given = ["--max-num-seqs", "7", "--dtype", "float32", "--seed", "3", "--no-enable-prefix-caching"]
        engine = engine_args_of(parsed("m", *given), ServeOptions(), "m")
        assert (engine.model, engine.served_model_name) == ("m", "m")
        assert (engine.max_num_seqs, engine.dtype, engine.seed, engine.enable_prefix_caching) == (
            7,
            "float32",
            3,
            False,
        )

    def test_servers_options_of_the_same_name_do_not_reach_it(self) -> None:
        """The engine refuses them: vLLM has them on its server alone."""
        options = parsed("m", "--reasoning-parser", "qwen3", "--served-model-name", "x", "y", "--enable-log-requests")
        server = ServeOptions.from_namespace(options)
        engine = engine_args_of(options, server, "m")
        engine._check_neutral()

        assert server.reasoning_parser == "qwen3"
        assert engine.served_model_name == "x"
        assert engine.enable_log_requests


class TestRun:
    @pytest.mark.parametrize(
        ("arguments", "complaint"),
        [
            (["a", "a"], "a model is named twice"),
            (["a", "b", "--served-model-name", "x"], "--served-model-name names one model"),
            (["a", "b", "--model-keep-alive", '{"c": 1}'], "names c, which is not served"),
            (["a", "--model-keep-alive", '{"a": -1}'], "of 'a' must be seconds of at least 0, got -1"),
            (["a", "--max-loaded-models", "0"], "--max-loaded-models must be at least 1, got 0"),
            (["a", "--ssl-keyfile", "k"], "--ssl-keyfile and --ssl-certfile go together"),
        ],
    )
    def test_options_that_make_no_sense(self, arguments: list[str], complaint: str) -> None:
        with pytest.raises(ValueError, match=complaint):
            run(parsed(*arguments))

    def test_taken_port_is_one_line_before_anything_loads(self, capsys: pytest.CaptureFixture[str]) -> None:
        with socket.create_server(("127.0.0.1", 0)) as taken:
            port = str(taken.getsockname()[1])
            assert cli.main(["serve", "/nonexistent", "--host", "127.0.0.1", "--port", port]) == 1
        told = capsys.readouterr().err.splitlines()
        assert told == [f"corespan: error: [Errno 98] cannot listen on 127.0.0.1:{port}: Address already in use"]

    def test_unix_socket_replaces_a_left_over_one_only(self, tmp_path: Path) -> None:
        path = tmp_path / "socket"
        serve.bind(ServeOptions(uds=str(path))).close()
        serve.bind(ServeOptions(uds=str(path))).close()  # the first is nobody's any more
        listener = serve.bind(ServeOptions(uds=str(path)))
        listener.listen()
        with listener, pytest.raises(OSError, match=f"cannot listen on {path}"):
            serve.bind(ServeOptions(uds=str(path)))
        other = tmp_path / "file"
        other.write_text("precious")
        with pytest.raises(OSError, match=f"cannot listen on {other}"):
            serve.bind(ServeOptions(uds=str(other)))
        assert other.read_text() == "precious"


def test_help_has_groups(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        parsed("--help")
    shown = capsys.readouterr().out
    assert shown.startswith("usage: corespan serve [MODEL ...] [--OPTION VALUE ...]\n")
    for group in ("network:", "access:", "model and chat:", "tools and reasoning:", "limits:", "logs:", "engine:"):
        assert f"\n{group}\n" in shown


def test_other_commands_do_without_the_servers_imports() -> None:
    script = (
        "import sys; from corespan.server import cli\n"
        "try: cli.main(['generate', '--help'])\n"
        "except SystemExit: pass\n"
        "print(*sorted({'uvicorn', 'starlette', 'yaml'} & set(sys.modules)), file=sys.stderr)"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    assert done.stderr == "\n"
