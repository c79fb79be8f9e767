"""A model argument becomes local files; a local path never touches the network, and a GGUF file is converted once."""

import errno
import json
import os
import pwd
import shutil
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from gguf import GGUFWriter
from tiny_llama import write_tokenizer

from corespan.core.models.loader import open_checkpoint
from corespan.engine.model_files import gguf_conversion, hub
from corespan.engine.model_files.model_source import fetch_model, resolve_model


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    folder = tmp_path / "cache"
    monkeypatch.setenv("CORESPAN_CACHE", str(folder))
    return folder


@pytest.fixture
def no_hub(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*arguments: object) -> Path:
        raise AssertionError("a local path must not be looked up on the hub")

    monkeypatch.setattr(hub, "pull", refuse)


def write_gguf(path: Path, context_length: int = 256) -> Path:
    """A GGUF file with a byte-level vocabulary of five tokens and one tensor: enough for everything but running it."""
    writer = GGUFWriter(path, "llama")
    writer.add_block_count(1)
    writer.add_context_length(context_length)
    writer.add_embedding_length(32)
    writer.add_feed_forward_length(64)
    writer.add_head_count(2)
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("gpt-2")
    writer.add_token_list(["<s>", "</s>", "a", "b", "ab"])
    writer.add_token_types([3, 3, 1, 1, 1])
    writer.add_token_merges(["a b"])
    writer.add_bos_token_id(0)
    writer.add_eos_token_id(1)
    writer.add_tensor("token_embd.weight", np.zeros((5, 32), dtype=np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def write_folder(folder: Path) -> Path:
    folder.mkdir(parents=True)
    (folder / "config.json").write_text(json.dumps({"model_type": "llama", "vocab_size": 512}))
    return folder


def converted_folders(cache: Path) -> list[str]:
    return sorted(os.listdir(cache / "converted"))


@pytest.mark.usefixtures("no_hub")
class TestLocalPaths:
    def test_gguf_file_gives_config_and_tokenizer_from_its_metadata(self, tmp_path: Path) -> None:
        path = write_gguf(tmp_path / "model.gguf")

        files = resolve_model(str(path))

        assert files.path == str(path)
        assert files.hf_config["vocab_size"] == 5
        assert files.hf_config["max_position_embeddings"] == 256
        assert files.generation_config == {"bos_token_id": 0, "eos_token_id": 1}
        assert files.tokenizer_dir is not None
        assert json.loads(Path(files.tokenizer_dir, "tokenizer.json").read_text())["model"]["vocab"]["ab"] == 4

    def test_relative_path_is_made_absolute(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        path = write_gguf(tmp_path / "model.gguf")
        monkeypatch.chdir(tmp_path)

        assert resolve_model("model.gguf").path == str(path)
        assert resolve_model("./model.gguf").path == str(path)

    def test_path_with_spaces_is_found(self, tmp_path: Path) -> None:
        folder = tmp_path / "my models"
        folder.mkdir()
        path = write_gguf(folder / "a model.gguf")

        assert resolve_model(str(path)).path == str(path)

    def test_home_directory_is_expanded(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        path = write_gguf(tmp_path / "model.gguf")
        monkeypatch.setenv("HOME", str(tmp_path))

        assert resolve_model("~/model.gguf").path == str(path)

    def test_folder_that_holds_one_gguf_stands_for_it(self, tmp_path: Path) -> None:
        folder = tmp_path / "download"
        folder.mkdir()
        path = write_gguf(folder / "model.gguf")

        assert resolve_model(str(folder)).path == str(path)

    def test_a_link_into_a_blob_store_keeps_its_name(self, tmp_path: Path) -> None:
        blob = write_gguf(tmp_path / "whole.gguf").rename(tmp_path / "0a1b2c")
        snapshot = tmp_path / "snapshots" / "main"
        snapshot.mkdir(parents=True)
        link = snapshot / "model.gguf"
        link.symlink_to("../../0a1b2c")

        for given in (link, snapshot):
            assert resolve_model(str(given)).path == str(link)
        assert resolve_model(str(blob)).path == str(blob)  # by its first bytes
        with open_checkpoint(str(blob)) as source:
            assert source.shapes == {"model.embed_tokens.weight": (5, 32)}

    def test_a_suffix_in_capitals_is_one(self, tmp_path: Path) -> None:
        path = write_gguf(tmp_path / "model.gguf").rename(tmp_path / "MODEL.GGUF")

        assert resolve_model(str(path)).path == resolve_model(str(tmp_path)).path == str(path)

    def test_folder_that_holds_several_ggufs_is_refused_with_their_names(self, tmp_path: Path) -> None:
        for name in ("one.gguf", "two.gguf"):
            write_gguf(tmp_path / name)

        with pytest.raises(ValueError, match=r"one\.gguf, two\.gguf"):
            resolve_model(str(tmp_path))

    def test_folder_without_a_model_is_refused(self, tmp_path: Path) -> None:
        with pytest.raises(ValueError, match="holds no model"):
            resolve_model(str(tmp_path))

    @pytest.mark.parametrize("name", ["missing.gguf", "org/missing.gguf", "./missing", "no such folder"])
    def test_missing_path_is_an_error_that_names_it(
        self, name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.chdir(tmp_path)

        with pytest.raises(FileNotFoundError) as raised:
            resolve_model(name)

        assert str(tmp_path / name) in str(raised.value)

    def test_other_file_is_refused(self, tmp_path: Path) -> None:
        path = tmp_path / "model.bin"
        path.write_bytes(b"weights")

        with pytest.raises(ValueError, match=r"model\.bin is neither"):
            resolve_model(str(path))

    def test_file_that_only_claims_to_be_gguf_is_refused_and_nothing_is_cached(
        self, tmp_path: Path, cache: Path
    ) -> None:
        path = tmp_path / "model.gguf"
        path.write_bytes(b"not it")

        with pytest.raises(ValueError, match=r"model\.gguf is not a GGUF file"):
            resolve_model(str(path))

        assert not cache.exists()

    def test_hugging_face_folder_is_read_as_it_is(self, tmp_path: Path, cache: Path) -> None:
        folder = write_folder(tmp_path / "model")
        write_tokenizer(folder)
        (folder / "generation_config.json").write_text('{"temperature": 0.5}')

        files = resolve_model(str(folder))

        assert files.path == files.tokenizer_dir == str(folder)
        assert files.hf_config == {"model_type": "llama", "vocab_size": 512}
        assert files.generation_config == {"temperature": 0.5}
        assert not cache.exists()

    def test_folder_without_tokenizer_or_generation_config_does_without(self, tmp_path: Path) -> None:
        files = resolve_model(str(write_folder(tmp_path / "model")))

        assert files.tokenizer_dir is None
        assert files.generation_config == {}

    @pytest.mark.parametrize("content", ["{", "[]"])
    def test_broken_config_is_an_error_that_names_the_file(self, content: str, tmp_path: Path) -> None:
        folder = write_folder(tmp_path / "model")
        (folder / "config.json").write_text(content)

        with pytest.raises(ValueError, match=r"model/config\.json"):
            resolve_model(str(folder))


class TestConversionCache:
    def test_second_resolve_converts_nothing(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        path = write_gguf(tmp_path / "model.gguf")
        first = resolve_model(str(path))

        def refuse(*arguments: object) -> None:
            raise AssertionError("converted twice")

        monkeypatch.setattr(gguf_conversion, "read_metadata", refuse)

        assert resolve_model(str(path)) == first

    def test_changed_file_is_converted_again(self, tmp_path: Path) -> None:
        path = write_gguf(tmp_path / "model.gguf")
        resolve_model(str(path))
        write_gguf(tmp_path / "replacement", context_length=512)
        os.replace(tmp_path / "replacement", path)

        assert resolve_model(str(path)).hf_config["max_position_embeddings"] == 512

    def test_files_of_one_name_in_two_folders_do_not_mix(self, tmp_path: Path) -> None:
        folders = [tmp_path / name for name in ("a", "b")]
        for folder, length in zip(folders, (256, 512), strict=True):
            folder.mkdir()
            write_gguf(folder / "model.gguf", context_length=length)

        lengths = [resolve_model(str(folder)).hf_config["max_position_embeddings"] for folder in folders]

        assert lengths == [256, 512]

    def test_own_tokenizer_leaves_the_files_alone(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        path = write_gguf(tmp_path / "model.gguf")

        def refuse(*arguments: object) -> None:
            raise AssertionError("the tokenizer was not asked for")

        monkeypatch.setattr(gguf_conversion, "convert_gguf_tokenizer", refuse)

        assert resolve_model(str(path), with_tokenizer=False).tokenizer_dir is None

    def test_failed_conversion_leaves_nothing_behind(
        self, tmp_path: Path, cache: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        path = write_gguf(tmp_path / "model.gguf")

        def fail(*arguments: object) -> None:
            raise ValueError("unknown kind of tokenizer")

        with monkeypatch.context() as patched:
            patched.setattr(gguf_conversion, "convert_gguf_tokenizer", fail)
            with pytest.raises(ValueError, match="unknown kind"):
                resolve_model(str(path))
        assert converted_folders(cache) == []

        assert resolve_model(str(path)).tokenizer_dir is not None

    def test_a_process_that_was_first_is_not_disturbed(
        self, tmp_path: Path, cache: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        path = write_gguf(tmp_path / "model.gguf")
        resolve_model(str(path))
        (finished,) = converted_folders(cache)
        shutil.move(cache / "converted" / finished, tmp_path / "aside")
        convert = gguf_conversion.convert_gguf_tokenizer

        def convert_while_another_finishes(source: Path, target: Path) -> None:
            convert(source, target)
            shutil.move(tmp_path / "aside", cache / "converted" / finished)

        monkeypatch.setattr(gguf_conversion, "convert_gguf_tokenizer", convert_while_another_finishes)

        assert resolve_model(str(path)).hf_config["vocab_size"] == 5
        assert converted_folders(cache) == [finished]

    def test_a_cache_that_cannot_be_written_costs_a_line_and_a_conversion(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
    ) -> None:
        path = write_gguf(tmp_path / "model.gguf")
        monkeypatch.setenv("CORESPAN_CACHE", str(path / "inside-a-file"))

        first = resolve_model(str(path))

        assert first.tokenizer_dir is not None and Path(first.tokenizer_dir, "tokenizer.json").is_file()
        (record,) = caplog.records
        assert "Set CORESPAN_CACHE" in record.message and "\n" not in record.message
        assert resolve_model(str(path)) == first
        assert resolve_model(str(path), with_tokenizer=False).tokenizer_dir is None

    def test_a_disk_that_is_full_costs_the_same(
        self, tmp_path: Path, cache: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
    ) -> None:
        path = write_gguf(tmp_path / "model.gguf")
        convert = gguf_conversion.convert_gguf_tokenizer

        def convert_beside_the_cache(source: Path, target: Path) -> None:
            if target.is_relative_to(cache):
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(target))
            convert(source, target)

        monkeypatch.setattr(gguf_conversion, "convert_gguf_tokenizer", convert_beside_the_cache)

        assert resolve_model(str(path)).tokenizer_dir is not None

        (record,) = caplog.records
        assert "No space left on device" in record.message and "Set CORESPAN_CACHE" in record.message
        assert converted_folders(cache) == []

    def test_what_a_process_keeps_for_itself_ends_with_it(self, tmp_path: Path) -> None:
        path = write_gguf(tmp_path / "model.gguf")
        script = f"""
import os
from corespan.engine.model_files.model_source import fetch_model, resolve_model
folder = resolve_model({str(path)!r}).tokenizer_dir
if os.fork() == 0:
    raise SystemExit
os.wait()
assert os.path.isdir(folder), "a fork removed it"
print(folder)
"""
        environment = {**os.environ, "CORESPAN_CACHE": str(path / "inside-a-file")}
        folder = subprocess.check_output([sys.executable, "-c", script], env=environment, text=True).strip()
        assert folder and not os.path.exists(folder)

    def test_without_a_home_the_line_says_so(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
    ) -> None:
        def no_such_user(user_id: int) -> None:
            raise KeyError(user_id)

        path = write_gguf(tmp_path / "model.gguf")
        for name in ("CORESPAN_CACHE", "HOME"):
            monkeypatch.delenv(name)
        monkeypatch.setattr(pwd, "getpwuid", no_such_user)

        assert resolve_model(str(path)).tokenizer_dir is not None
        assert "HOME is not set" in caplog.text and "CORESPAN_CACHE" in caplog.text
        with pytest.raises(FileNotFoundError, match="~/model"):
            resolve_model("~/model.gguf")

    def test_a_copied_cache_and_a_copied_model_need_no_conversion(
        self, tmp_path: Path, cache: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """As when both are baked into an image, whose files have other inodes and times."""
        path = write_gguf(tmp_path / "model.gguf")
        resolve_model(str(path))
        shutil.copytree(cache, tmp_path / "copied")
        copy = tmp_path / "renamed.gguf"
        shutil.copyfile(path, copy)
        os.utime(copy, (1, 1))
        monkeypatch.setenv("CORESPAN_CACHE", str(tmp_path / "copied"))
        monkeypatch.setattr(gguf_conversion, "filled_folder", lambda *arguments, **options: pytest.fail("converted"))

        for with_tokenizer in (True, False):
            files = resolve_model(str(copy), with_tokenizer=with_tokenizer)
            assert files.path == str(copy) and files.hf_config["vocab_size"] == 5
            assert (files.tokenizer_dir is not None) == with_tokenizer

    @pytest.mark.parametrize("name", ["config.json", "tokenizer.json"])
    def test_a_damaged_conversion_is_made_again(self, name: str, tmp_path: Path, cache: Path) -> None:
        path = write_gguf(tmp_path / "model.gguf")
        first = resolve_model(str(path))
        assert first.tokenizer_dir is not None
        Path(first.tokenizer_dir, name).write_text("{")

        assert resolve_model(str(path)) == first
        assert Path(first.tokenizer_dir, name).read_text() != "{"
        assert len(converted_folders(cache)) == 1

    def test_pull_converts_beforehand_checks_and_mends(
        self, tmp_path: Path, cache: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        folder = tmp_path / "pulled"
        folder.mkdir()
        path = write_gguf(folder / "model.gguf")
        asked = []

        def pull(name: str, revision: str | None, verify: bool = False) -> Path:
            asked.append(verify)
            return folder

        monkeypatch.setattr(hub, "pull", pull)
        assert fetch_model("smollm2-135m") == folder
        (converted,) = (cache / "converted").iterdir()
        config = converted / "config.json"
        text = config.read_text()
        config.write_text(text.replace("256", "255"))  # of the same length
        fetch_model("smollm2-135m")

        assert asked == [True, True] and config.read_text() == text
        monkeypatch.setattr(gguf_conversion, "filled_folder", lambda *arguments, **options: pytest.fail("converted"))
        assert resolve_model("smollm2-135m").tokenizer_dir == str(converted)
        assert resolve_model(str(path)).tokenizer_dir == str(converted)


class TestNames:
    def test_short_name_is_pulled_and_resolved(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        folder = tmp_path / "pulled"
        folder.mkdir()
        path = write_gguf(folder / "model.gguf")
        asked = []

        def pull(name: str, revision: str | None) -> Path:
            asked.append((name, revision))
            return folder

        monkeypatch.setattr(hub, "pull", pull)

        assert resolve_model("smollm2-135m").path == str(path)
        assert asked == [("smollm2-135m", None)]

    @pytest.mark.parametrize("name", ["org/model", "org/model-1.5_b", "gpt2"])
    def test_what_is_no_path_is_taken_for_a_hub_id(
        self, name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        folder = write_folder(tmp_path / "snapshot")
        asked = []

        def pull(name: str, revision: str | None) -> Path:
            asked.append((name, revision))
            return folder

        monkeypatch.setattr(hub, "pull", pull)
        monkeypatch.chdir(tmp_path)

        assert resolve_model(name, revision="v1").path == str(folder)
        assert asked == [(name, "v1")]

    def test_folder_named_like_a_hub_id_is_used_without_the_hub(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, no_hub: None
    ) -> None:
        folder = write_folder(tmp_path / "org" / "model")
        monkeypatch.chdir(tmp_path)

        assert resolve_model("org/model").path == str(folder)
