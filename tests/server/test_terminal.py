"""The commands at a terminal and away from one: pastes, commands of the chat, closed and full streams, statistics."""

import contextlib
import io
import json
import os
import pty
import queue
import re
import select
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from deadlines import DEADLINE
from scripted_engine import ScriptedEngine, session

from corespan.server import cli
from corespan.server.chat import ChatSession, converse
from corespan.server.streaming import Statistics

CORESPAN = [sys.executable, "-m", "corespan.server.cli"]


@pytest.fixture(autouse=True)
def environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("VLLM_LOGGING_LEVEL", "WARNING")
    monkeypatch.setenv("VLLM_ENABLE_V1_MULTIPROCESSING", "0")


@pytest.fixture
def say(monkeypatch: pytest.MonkeyPatch) -> Callable[[ChatSession, str], int]:
    def converse_about(chat: ChatSession, text: str) -> int:
        monkeypatch.setattr(sys, "stdin", io.StringIO(text))
        return converse(chat)

    return converse_about


class Terminal:
    """A command with a terminal on all three streams."""

    def __init__(self, *command: str) -> None:
        self.master, slave = pty.openpty()
        self.process = subprocess.Popen(
            [*CORESPAN, *command], stdin=slave, stdout=slave, stderr=slave, start_new_session=True,
            env={**os.environ, "TERM": "xterm"},
        )  # fmt: skip
        os.close(slave)
        self.shown = ""

    def read_until(self, text: str) -> str:
        """What is shown from the last call on, up to and including `text`."""
        while text not in self.shown:
            assert select.select([self.master], [], [], 240)[0], self.shown
            try:
                self.shown += os.read(self.master, 4096).decode(errors="replace")
            except OSError:
                raise AssertionError(f"ended: {self.shown}") from None
        upto = self.shown.index(text) + len(text)
        seen, self.shown = self.shown[:upto], self.shown[upto:]
        return seen

    def type(self, text: str) -> None:
        os.write(self.master, text.encode())


class TestAtATerminal:
    @pytest.fixture
    def chat(self, tiny_llama_dir: str) -> Iterator[Terminal]:
        terminal = Terminal("chat", "--model", tiny_llama_dir, "--max-tokens", "3", "--max-model-len", "256")
        yield terminal
        terminal.process.kill()
        terminal.process.wait()
        os.close(terminal.master)

    def test_conversation(self, chat: Terminal) -> None:
        assert "Loading " in chat.read_until("/help lists more.")  # a line while the model loads
        chat.read_until("> ")

        chat.type("\x1b[200~one\ntwo\nthree\x1b[201~\n")  # what a terminal sends for a paste
        chat.read_until("three")
        chat.read_until("> ")
        chat.type("/regen\n")  # one question so far: had the paste been three, the last would be "three" alone
        chat.read_until("> ")
        chat.type("/clear\n")
        chat.read_until("> ")
        chat.type("/regen\n")
        assert "no question" in chat.read_until("> ")
        chat.type("/bye\n")

        shown = chat.read_until("tokens/s")
        assert re.search(r"\d+ prompt tokens, first token after .* s; 6 tokens, ", shown)  # two answers, not four
        assert chat.process.wait(DEADLINE) == 0


class SilentServer:
    """Answers each chat with one event and then, or with `opening=False` from the beginning, nothing more."""

    def __init__(self, opening: bool) -> None:
        event = json.dumps({"choices": [{"delta": {"content": "Well, "}}]})
        self.opening = f"HTTP/1.1 200 OK\r\n\r\ndata: {event}\n\n".encode() if opening else b""
        self.socket = socket.create_server(("127.0.0.1", 0))
        self.url = f"http://127.0.0.1:{self.socket.getsockname()[1]}/v1"
        self.asked: queue.Queue[socket.socket] = queue.Queue()
        threading.Thread(target=self.serve, daemon=True).start()

    def serve(self) -> None:
        with contextlib.suppress(OSError):  # closed
            while True:
                client, _ = self.socket.accept()
                client.settimeout(DEADLINE)
                client.recv(65536)
                client.sendall(self.opening)
                self.asked.put(client)


@pytest.mark.parametrize("opening", [True, False], ids=["within an answer", "before it"])
def test_ctrl_c_stops_a_servers_answer_while_nothing_comes(opening: bool) -> None:
    server = SilentServer(opening)
    chat = Terminal("chat", "--url", server.url, "--model-name", "any")
    chat.read_until("> ")
    for _ in range(2):
        chat.type("hello\n")
        connection = server.asked.get(timeout=DEADLINE)
        chat.read_until("Well, " if opening else "hello")
        chat.process.send_signal(signal.SIGINT)
        chat.read_until("[stopped]")
        while connection.recv(65536):  # until it has hung up
            pass
        chat.read_until("> ")
    chat.type("/bye\n")
    assert chat.process.wait(DEADLINE) == 0
    os.close(chat.master)
    server.socket.close()


class TestConversation:
    @pytest.mark.parametrize(
        "text", ['"""one\ntwo\nthree"""\n', "one\\\ntwo\\\nthree\n", '"""\none\ntwo\nthree\n"""\n']
    )
    def test_several_lines_are_one_message(self, text: str, say: Callable[..., int]) -> None:
        engine = ScriptedEngine(["fine"])

        assert say(session(engine), text) == 0
        assert engine.prompts == ["<user>one\ntwo\nthree"]

    def test_help_lists_every_command(self, say: Callable[..., int], capsys: pytest.CaptureFixture[str]) -> None:
        assert say(session(ScriptedEngine()), "/help\n/?\n") == 0

        shown = capsys.readouterr().err
        for name in ("/clear", "/system", "/set", "/regen", "/bye"):
            assert shown.count(f"{name} ") == 2

    def test_clear_forgets_and_system_opens(self, say: Callable[..., int]) -> None:
        engine = ScriptedEngine(["a"], ["b"], ["c"])

        assert say(session(engine), "one\n/clear\ntwo\n/system Be kind.\nthree\n") == 0
        assert engine.prompts == ["<user>one", "<user>two", "<system>Be kind.<user>three"]

    def test_regen_asks_the_last_question_again(self, say: Callable[..., int]) -> None:
        engine = ScriptedEngine(["a"], ["b"], ["c"])

        assert say(session(engine), "one\ntwo\n/regen\n") == 0
        assert engine.prompts[2] == engine.prompts[1]

    def test_set_changes_what_follows(self, say: Callable[..., int], capsys: pytest.CaptureFixture[str]) -> None:
        chat = session(ScriptedEngine())

        assert say(chat, "/set temperature 0.5\n/set parameter top_k 7\n/set\n") == 0
        assert (chat.params.temperature, chat.params.top_k) == (0.5, 7)
        assert "temperature 0.5" in capsys.readouterr().err

    @pytest.mark.parametrize("line", ["/nothing", "/set temperature warm", "/set temperature -1", "/set n 2", "/regen"])
    def test_refused_command_is_a_line_and_a_status(
        self, line: str, say: Callable[..., int], capsys: pytest.CaptureFixture[str]
    ) -> None:
        assert say(session(ScriptedEngine(["fine"])), f"{line}\nhello\n") == 1

        captured = capsys.readouterr()
        assert captured.out == "fine\n"
        assert captured.err.startswith("corespan: ")

    def test_leaving_and_paths(self, say: Callable[..., int]) -> None:
        engine = ScriptedEngine(["fine"])

        assert say(session(engine), "/etc/passwd is what?\n/bye\nnever asked\n") == 0
        assert engine.prompts == ["<user>/etc/passwd is what?"]

    def test_closed_input_ends_it(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(sys, "stdin", None)

        assert converse(session(ScriptedEngine())) == 0


class TestOneShot:
    def run(self, model: str, *arguments: str) -> int:
        return cli.main([*arguments, "--model", model, "--max-tokens", "12", "--max-model-len", "512", "--seed", "1"])

    def test_chat_with_a_question_and_generate_chat_answer_alike(
        self, tiny_llama_dir: str, capsys: pytest.CaptureFixture[str]
    ) -> None:
        assert self.run(tiny_llama_dir, "chat", "hello", "--temperature", "0", "--system", "Be kind.") == 0
        asked = capsys.readouterr().out
        assert self.run(tiny_llama_dir, "generate", "--chat", "hello", "--system", "Be kind.") == 0
        generated = capsys.readouterr().out
        assert self.run(tiny_llama_dir, "generate", "hello") == 0

        assert asked == generated != capsys.readouterr().out

    def test_json_schema_inline_and_from_a_file(
        self, tiny_llama_dir: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
    ) -> None:
        schema = {"enum": ["red", "green"]}
        (tmp_path / "schema.json").write_text(json.dumps(schema))

        for given in (json.dumps(schema), f"@{tmp_path / 'schema.json'}"):
            assert self.run(tiny_llama_dir, "generate", "colour", "--json-schema", given) == 0
            assert json.loads(capsys.readouterr().out) in schema["enum"]

    @pytest.mark.parametrize(("schema", "told"), [("{", "--json-schema is not valid JSON"), ("[]", "JSON object")])
    def test_wrong_schema_is_told(
        self, schema: str, told: str, tiny_llama_dir: str, capsys: pytest.CaptureFixture[str]
    ) -> None:
        assert self.run(tiny_llama_dir, "generate", "a", "--json-schema", schema) == 1
        assert told in capsys.readouterr().err

    def test_chat_template_and_statistics(self, tiny_llama_dir: str, capsys: pytest.CaptureFixture[str]) -> None:
        template = "{{ messages[0].content }}"

        assert self.run(tiny_llama_dir, "generate", "--chat", "hello", "--chat-template", template, "--stats") == 0
        templated = capsys.readouterr()
        assert self.run(tiny_llama_dir, "generate", "hello", "--no-stats") == 0

        plain = capsys.readouterr()
        assert re.search(r"^\d+ prompt tokens, .*; 12 tokens, [\d.]+ tokens/s$", templated.err, re.MULTILINE)
        assert "tokens" not in plain.err
        assert templated.out.strip()

    def test_quantization_reaches_the_engine(self, tiny_llama_dir: str, monkeypatch: pytest.MonkeyPatch) -> None:
        from corespan.engine.llm_engine import LLMEngine

        seen: list[Any] = []

        def stop_here(args: Any) -> None:
            seen.append(args.quantization)
            raise ValueError("enough")

        monkeypatch.setattr(LLMEngine, "from_engine_args", stop_here)

        assert self.run(tiny_llama_dir, "generate", "a", "--quantization", "int8") == 1
        assert seen == ["int8"]


class TestErrors:
    def test_advice_names_options_that_the_command_has(
        self, tiny_llama_dir: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
    ) -> None:
        monkeypatch.setenv("VLLM_CPU_KVCACHE_SPACE", "0.00001")

        assert cli.main(["generate", "--model", tiny_llama_dir, "hi"]) == 1

        told = capsys.readouterr().err
        assert "Lower --max-model-len" in told and "(VLLM_CPU_KVCACHE_SPACE)" in told
        assert not re.search(r"[a-z]_[a-z]", told)  # nothing from Python

    def test_memory_refused_names_its_cause(
        self, tiny_llama_dir: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
    ) -> None:
        monkeypatch.setenv("VLLM_CPU_KVCACHE_SPACE", "500000")  # more than addresses reach
        monkeypatch.setenv("CORESPAN_CPU_ISA", "")

        assert cli.main(["generate", "--model", tiny_llama_dir, "hi"]) == 1

        told = capsys.readouterr().err
        assert "the system refuses 500000.0 GiB" in told and "(VLLM_CPU_KVCACHE_SPACE)" in told

    def test_similar_model_is_suggested(self, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
        (tmp_path / "model-a.gguf").touch()

        assert cli.main(["generate", "--model", str(tmp_path / "modle-a.gguf"), "hi"]) == 1
        assert f"did you mean '{tmp_path / 'model-a.gguf'}'?" in capsys.readouterr().err

    def test_similar_short_name_is_suggested(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
    ) -> None:
        monkeypatch.setenv("HF_HUB_OFFLINE", "1")
        monkeypatch.setenv("HF_HUB_CACHE", str(tmp_path))
        monkeypatch.chdir(tmp_path)

        assert cli.main(["generate", "--model", "smollm2-135", "hi"]) == 1
        assert "did you mean 'smollm2-135m'?" in capsys.readouterr().err


class TestStreams:
    """Programs started with streams closed or full; a descriptor that is free would be taken by the next socket."""

    def run(self, model: str, redirections: str, **variables: str) -> "subprocess.CompletedProcess[str]":
        command = f'exec {" ".join(CORESPAN)} generate --model "$0" --max-tokens 3 hello {redirections}'
        environment = {**os.environ, "VLLM_ENABLE_V1_MULTIPROCESSING": "1", **variables}
        return subprocess.run(["sh", "-c", command, model], capture_output=True, text=True, env=environment)

    def test_closed_input_and_errors_change_nothing(self, tiny_llama_dir: str) -> None:
        finished = self.run(tiny_llama_dir, "<&- 2>&-")

        assert (finished.returncode, finished.stderr) == (0, "")
        assert finished.stdout.strip()

    @pytest.mark.parametrize(
        ("redirection", "told"),
        [(">&-", "standard output is closed"), (">/dev/full", "standard output: No space left")],
    )
    def test_output_that_cannot_be_written_is_an_error(self, redirection: str, told: str, tiny_llama_dir: str) -> None:
        finished = self.run(tiny_llama_dir, redirection, VLLM_ENABLE_V1_MULTIPROCESSING="0")

        assert finished.returncode == 1
        assert told in finished.stderr and finished.stderr.count("\n") == 1

    def test_python_program_without_streams_generates(self, tiny_llama_dir: str, tmp_path: Path) -> None:
        program = (
            "import os, sys, pathlib; from corespan import LLM\n"
            "llm = LLM(sys.argv[1], max_model_len=64)\n"
            "text = llm.generate('Once')[0].outputs[0].text\n"
            "nulls = [os.readlink(f'/proc/self/fd/{fd}') for fd in range(3)]\n"
            "pathlib.Path(sys.argv[2]).write_text(repr((bool(text), nulls)))\n"
        )
        command = f'exec "{sys.executable}" -c "$0" "$@" <&- >&- 2>&-'
        environment = {**os.environ, "VLLM_ENABLE_V1_MULTIPROCESSING": "1"}

        finished = subprocess.run(
            ["sh", "-c", command, program, tiny_llama_dir, str(tmp_path / "out")], env=environment
        )

        assert finished.returncode == 0
        assert (tmp_path / "out").read_text() == repr((True, ["/dev/null"] * 3))


def test_statistics_of_a_single_token_claim_no_rate() -> None:
    assert "tokens/s" not in str(Statistics(num_prompt_tokens=3, num_tokens=1, first_seconds=0.5))
