"""The command line: help that suffices, completions that stream, errors told in one line, chats that can be stopped."""

import argparse
import io
import os
import signal
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from scripted_engine import ScriptedEngine, session

import corespan
from corespan.engine.model_files import short_names
from corespan.protocol.params import RequestOutputKind, SamplingParams
from corespan.server import cli
from corespan.server.chat import converse
from corespan.server.streaming import Interruption, stream_text


@pytest.fixture(autouse=True)
def environment(monkeypatch: pytest.MonkeyPatch) -> None:
    """What a command sets is taken back, and engines run in this process unless a test says otherwise."""
    monkeypatch.setenv("VLLM_LOGGING_LEVEL", "WARNING")
    monkeypatch.setenv("VLLM_ENABLE_V1_MULTIPROCESSING", "0")


def press_ctrl_c() -> str:
    os.kill(os.getpid(), signal.SIGINT)
    return "..."


class TestHelp:
    @pytest.mark.parametrize("command", [[], ["pull"], ["generate"], ["chat"]])
    def test_every_command_explains_itself(self, command: list[str], capsys: pytest.CaptureFixture[str]) -> None:
        with pytest.raises(SystemExit) as ended:
            cli.main([*command, "--help"])

        assert ended.value.code == 0
        shown = capsys.readouterr().out
        expected = {"": ["pull", "generate", "chat", "--version"], "pull": ["short name", "hub id", "--revision"]}
        options = ["--model", "--max-tokens", "--temperature", "--top-p", "--seed", "--dtype", "--max-model-len"]
        for word in expected.get("".join(command), options):
            assert word in shown

    @pytest.mark.parametrize("wanted", [None, "serve", "run-batch", "bench"])
    def test_every_option_of_every_command_says_what_it_does(self, wanted: str | None) -> None:
        def bare(parser: argparse.ArgumentParser) -> Iterator[str]:
            for action in parser._actions:
                if isinstance(action, argparse._SubParsersAction):
                    for command in action.choices.values():
                        yield from bare(command)
                elif len((action.help or "").split("[")[0].split()) < 2:
                    yield f"{parser.prog} {'/'.join(action.option_strings) or action.dest}: {action.help}"

        assert list(bare(cli.build_parser(wanted))) == []

    def test_version_is_the_packages(self, capsys: pytest.CaptureFixture[str]) -> None:
        with pytest.raises(SystemExit) as ended:
            cli.main(["--version"])

        assert ended.value.code == 0
        assert capsys.readouterr().out == f"corespan {corespan.__version__}\n"

    def test_command_is_required(self, capsys: pytest.CaptureFixture[str]) -> None:
        with pytest.raises(SystemExit) as ended:
            cli.main([])

        assert ended.value.code == 2


class TestPull:
    def test_prints_where_the_model_lies(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
    ) -> None:
        monkeypatch.setenv("CORESPAN_CACHE", str(tmp_path))
        folder = tmp_path / "models" / short_names.DEFAULT_MODEL
        folder.mkdir(parents=True)
        (folder / "config.json").write_text("{}")

        assert cli.main(["pull"]) == 0
        assert capsys.readouterr().out == f"{folder}\n"

    def test_unknown_model_is_one_line(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
    ) -> None:
        monkeypatch.setenv("HF_HUB_OFFLINE", "1")
        monkeypatch.setenv("HF_HUB_CACHE", str(tmp_path))

        assert cli.main(["pull", "org/nothing"]) == 1
        assert capsys.readouterr().err.startswith("corespan: error: cannot fetch 'org/nothing'")


class TestGenerate:
    ARGUMENTS = ("--max-model-len", "128", "--max-tokens", "12")

    def generate(self, model: str, *arguments: str) -> int:
        return cli.main(["generate", "--model", model, *self.ARGUMENTS, *arguments])

    def test_prints_what_the_engine_generates(
        self, tiny_llama_dir: str, make_llm: Callable[..., Any], capsys: pytest.CaptureFixture[str]
    ) -> None:
        llm = make_llm(max_model_len=128)
        (expected,) = llm.generate(["Once upon a time"], SamplingParams(temperature=0, max_tokens=12), use_tqdm=False)

        assert self.generate(tiny_llama_dir, "Once upon a time") == 0
        assert capsys.readouterr().out == expected.outputs[0].text + "\n"

    @pytest.mark.parametrize("arguments", [[], ["-"]])
    def test_reads_the_prompt_from_standard_input(
        self,
        arguments: list[str],
        tiny_llama_dir: str,
        monkeypatch: pytest.MonkeyPatch,
        capsys: pytest.CaptureFixture[str],
    ) -> None:
        assert self.generate(tiny_llama_dir, "The capital") == 0
        expected = capsys.readouterr().out
        monkeypatch.setattr(sys, "stdin", io.StringIO("The capital"))

        assert self.generate(tiny_llama_dir, *arguments) == 0
        assert capsys.readouterr().out == expected

    def test_options_reach_the_sampler(self, tiny_llama_dir: str, capsys: pytest.CaptureFixture[str]) -> None:
        outputs = []
        for seed in ("1", "1", "2"):
            assert self.generate(tiny_llama_dir, "a", "--temperature", "2", "--seed", seed) == 0
            outputs.append(capsys.readouterr().out)

        assert outputs[0] == outputs[1] != outputs[2]

    def test_stop_text_ends_the_completion(self, tiny_llama_dir: str, capsys: pytest.CaptureFixture[str]) -> None:
        assert self.generate(tiny_llama_dir, "Once upon a time") == 0
        whole = capsys.readouterr().out.rstrip("\n")
        stop = whole[3:5]

        assert self.generate(tiny_llama_dir, "Once upon a time", "--stop", stop) == 0
        assert capsys.readouterr().out.rstrip("\n") == whole[: whole.index(stop)]

    @pytest.mark.parametrize(
        ("arguments", "told"),
        [
            (["--model", "/no/such/model.gguf", "hello"], "/no/such/model.gguf"),
            (["--temperature", "-1", "hello"], "--temperature must be"),
            (["--max-tokens", "0", "hello"], "--max-tokens must be an integer of at least 1, got 0"),
            (["--max-model-len", "nonsense", "hello"], "--max-model-len must be"),
        ],
    )
    def test_wrong_argument_is_one_line_that_names_it(
        self, arguments: list[str], told: str, tiny_llama_dir: str, capsys: pytest.CaptureFixture[str]
    ) -> None:
        assert cli.main(["generate", "--model", tiny_llama_dir, *arguments]) == 1

        captured = capsys.readouterr()
        assert captured.out == ""
        assert captured.err.startswith("corespan: error: ")
        assert told in captured.err
        assert captured.err.count("\n") == 1

    def test_prompt_that_does_not_fit_is_one_line(
        self, tiny_llama_dir: str, capsys: pytest.CaptureFixture[str]
    ) -> None:
        assert self.generate(tiny_llama_dir, "word " * 500) == 1
        assert capsys.readouterr().err.startswith("corespan: error: ")

    def test_ctrl_c_ends_with_its_own_status(self, tiny_llama_dir: str, monkeypatch: pytest.MonkeyPatch) -> None:
        def interrupted(*arguments: object, **keywords: object) -> None:
            raise KeyboardInterrupt

        monkeypatch.setattr("corespan.server.generate.stream_text", interrupted)

        assert self.generate(tiny_llama_dir, "hello") == 130


class TestStreaming:
    def test_text_arrives_piece_by_piece(self) -> None:
        engine = ScriptedEngine(["one", "two", "three"])
        params = SamplingParams(output_kind=RequestOutputKind.DELTA)

        stream = stream_text(engine, {"prompt_token_ids": [1]}, params)  # type: ignore[arg-type]

        assert next(stream) == "one"
        assert engine.running == ["two", "three"]
        assert list(stream) == ["two", "three"]
        assert engine.aborted == []

    def test_reader_that_leaves_aborts_the_request(self) -> None:
        engine = ScriptedEngine(["one", "two"])
        params = SamplingParams(output_kind=RequestOutputKind.DELTA)
        stream = stream_text(engine, {"prompt_token_ids": [1]}, params)  # type: ignore[arg-type]
        next(stream)

        stream.close()

        assert len(engine.aborted) == 1

    def test_second_ctrl_c_is_not_held_back(self) -> None:
        with Interruption() as interruption:
            press_ctrl_c()
            assert interruption.requested
            with pytest.raises(KeyboardInterrupt):
                press_ctrl_c()


class TestChat:
    def test_remembers_both_sides(self) -> None:
        engine = ScriptedEngine(["Hel", "lo."], ["Fine."])
        chat = session(engine, system="Be kind.")

        for question in ("Hi", "How are you?"):
            list(chat.answer(question, Interruption()))

        assert engine.prompts == [
            "<system>Be kind.<user>Hi",
            "<system>Be kind.<user>Hi<assistant>Hello.<user>How are you?",
        ]

    def test_full_context_drops_the_oldest_turns_but_not_the_system_message(self) -> None:
        engine = ScriptedEngine(["a" * 20], ["b" * 20], ["c"], max_model_len=80)
        chat = session(engine, system="S")

        for question in ("first", "second", "third"):
            list(chat.answer(question, Interruption()))

        assert engine.prompts[-1] == "<system>S<user>second<assistant>" + "b" * 20 + "<user>third"

    def test_message_that_cannot_fit_is_refused_and_forgotten(self) -> None:
        engine = ScriptedEngine(["ok"], max_model_len=40)
        chat = session(engine)

        with pytest.raises(ValueError, match="at most 24"):
            list(chat.answer("x" * 50, Interruption()))

        assert list(chat.answer("short", Interruption())) == ["ok"]
        assert engine.prompts == ["<user>short"]

    def test_ctrl_c_stops_the_answer_and_the_chat_goes_on(
        self, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
    ) -> None:
        engine = ScriptedEngine(["Once ", press_ctrl_c, "never said"], ["Yes."])
        monkeypatch.setattr(sys, "stdin", io.StringIO("a story\nstill there?\n"))

        converse(session(engine))

        assert capsys.readouterr().out == "Once ... [stopped]\nYes.\n"
        assert len(engine.aborted) == 1
        assert engine.prompts[1] == "<user>a story<assistant>Once ...<user>still there?"

    def test_ctrl_c_in_the_instant_before_the_prompt_appears_counts_at_the_prompt(
        self, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
    ) -> None:
        raised, moments = Interruption.raised, [press_ctrl_c, lambda: "", lambda: ""]

        def after_a_moment(interruption: Interruption) -> Any:
            moments.pop(0)()
            return raised(interruption)

        monkeypatch.setattr(Interruption, "raised", after_a_moment)
        monkeypatch.setattr(sys, "stdin", io.StringIO("hello\n"))

        converse(session(ScriptedEngine(["Hi."])))

        captured = capsys.readouterr()
        assert (captured.out, captured.err) == ("Hi.\n", "\nCtrl-D leaves.\n")

    def test_refused_message_does_not_end_the_chat(
        self, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
    ) -> None:
        engine = ScriptedEngine(["fine"], max_model_len=40)
        monkeypatch.setattr(sys, "stdin", io.StringIO("x" * 50 + "\n\nok\n"))

        converse(session(engine))

        captured = capsys.readouterr()
        assert captured.out == "fine\n"
        assert captured.err.startswith("corespan: the message is")

    def test_command_answers_every_line_and_leaves_at_the_end(
        self, tiny_llama_dir: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
    ) -> None:
        monkeypatch.setattr(sys, "stdin", io.StringIO("hello\nand then?\n"))

        assert cli.main(["chat", "--model", tiny_llama_dir, "--max-tokens", "4", "--seed", "1"]) == 0
        assert capsys.readouterr().out.count("\n") >= 2
