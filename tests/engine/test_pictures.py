"""Pictures in the shell: prepared as transformers does, bit by bit, out of whatever a caller gives; what cannot be
served is refused by name."""

import base64
import io
import threading
import zlib
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from tiny_vlm import SETTINGS, TILE, picture

from corespan import EngineArgs
from corespan.engine.multimodal.chat_parts import take_pictures
from corespan.engine.multimodal.idefics3 import Idefics3Processor
from corespan.engine.multimodal.images import MAX_PIXELS, as_rgb, decode
from corespan.engine.multimodal.media import fetch_image
from corespan.protocol.config import MultiModalConfig

CONFIG = MultiModalConfig(limit_per_prompt=2, encoder_capacity=100)
HF_CONFIG = {"vision_config": {"image_size": TILE, "patch_size": 16}, "image_token_id": 5, "scale_factor": 2}


def png(image: Any) -> bytes:
    content = io.BytesIO()
    image.save(content, "PNG")
    return content.getvalue()


def data_url(content: bytes) -> str:
    return "data:image/png;base64," + base64.b64encode(content).decode()


@pytest.mark.parametrize("size", [(64, 64), (20, 20), (100, 37), (37, 100), (1, 300), (301, 2), (129, 128), (640, 480)])
@pytest.mark.parametrize("options", [{}, {"do_image_splitting": False}, {"size": {"longest_edge": 3 * TILE}}])
def test_pixels_are_those_of_transformers(size: tuple[int, int], options: dict[str, Any]) -> None:
    from transformers.models.smolvlm.image_processing_pil_smolvlm import SmolVLMImageProcessorPil

    image = picture(*size)
    expected = SmolVLMImageProcessorPil(**{k: v for k, v in SETTINGS.items() if k != "image_processor_type"})(
        [image], return_tensors="np", return_row_col_info=True, **options
    )
    found = Idefics3Processor(HF_CONFIG, SETTINGS).prepare(image, options)
    assert np.array_equal(found.pixels, expected["pixel_values"][0])
    assert found.num_embeds == found.text.count("<image>") == 4 * len(found.pixels)
    assert f"<row_{expected['rows'][0][0]}_col_" in found.text or not expected["rows"][0][0]
    assert found.num_embeds <= Idefics3Processor(HF_CONFIG, {**SETTINGS, **options}).max_embeds


def test_a_picture_may_be_given_as_pillows_an_array_or_a_tensor() -> None:
    image = picture(30, 20)
    array = np.asarray(image)
    for given in (image, array, np.moveaxis(array, -1, 0), torch.from_numpy(array.copy()), image.convert("RGBA")):
        assert np.array_equal(np.asarray(as_rgb(given, "image")), array)
    grey = np.asarray(image.convert("L"))
    assert np.array_equal(np.asarray(as_rgb(grey, "image"))[..., 0], grey)
    clear = image.convert("RGBA")
    clear.putalpha(0)
    assert np.asarray(as_rgb(clear, "image")).min() == 255, "what is transparent shows white"


@pytest.mark.parametrize("value", ["a.png", b"", 3, np.zeros((2, 2), np.float64), np.zeros((2, 2, 5), np.uint8), None])
def test_what_is_no_picture_is_refused(value: Any) -> None:
    with pytest.raises(ValueError, match="the field must be a PIL image"):
        as_rgb(value, "the field")


def bomb(width: int, height: int) -> bytes:
    """A PNG of that size without content."""

    def chunk(kind: bytes, content: bytes) -> bytes:
        return len(content).to_bytes(4) + kind + content + zlib.crc32(kind + content).to_bytes(4)

    header = width.to_bytes(4) + height.to_bytes(4) + bytes([8, 2, 0, 0, 0])
    return b"\x89PNG\r\n\x1a\n" + chunk(b"IHDR", header) + chunk(b"IDAT", zlib.compress(b"")) + chunk(b"IEND", b"")


@pytest.mark.parametrize(
    "content", [b"", b"GIF89a", png(picture(9, 9))[:60], bomb(MAX_PIXELS, 1), bomb(30_000, 30_000), bomb(0, 5)]
)
def test_a_file_that_is_none_or_a_bomb_is_refused_before_it_is_decoded(content: bytes) -> None:
    with pytest.raises(ValueError, match="the field must be"):
        decode(content, "the field")


def test_files_are_read_below_the_folder_that_is_allowed_alone(tmp_path: Path) -> None:
    (tmp_path / "in").mkdir()
    for name in ("in/a.png", "b.png"):
        (tmp_path / name).write_bytes(png(picture(5, 4)))
    (tmp_path / "in" / "link.png").symlink_to(tmp_path / "b.png")
    allowing = MultiModalConfig(limit_per_prompt=1, encoder_capacity=1, allowed_local_media_path=str(tmp_path / "in"))
    assert fetch_image(f"file://{tmp_path}/in/a.png", allowing).size == (5, 4)
    for name in ("b.png", "in/../b.png", "in/link.png", "in/none.png", "in"):
        with pytest.raises(ValueError, match="below allowed_local_media_path"):
            fetch_image(f"file://{tmp_path}/{name}", allowing)
    with pytest.raises(ValueError, match="allowed_local_media_path"):
        fetch_image(f"file://{tmp_path}/in/a.png", CONFIG)


class _Server(BaseHTTPRequestHandler):
    def do_GET(self) -> None:
        content = png(picture(5, 4))
        self.send_response({"/away": 302, "/gone": 404}.get(self.path, 200))
        if self.path == "/away":
            self.send_header("Location", "http://127.0.0.2/a.png")
        self.send_header("Content-Length", str(len(content)))
        self.end_headers()
        self.wfile.write(content)

    def log_message(self, *args: Any) -> None:
        pass


@pytest.fixture
def address() -> Iterator[str]:
    with HTTPServer(("127.0.0.1", 0), _Server) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        yield f"http://127.0.0.1:{server.server_port}"
        server.shutdown()
        thread.join()


def test_hosts_are_asked_within_what_is_allowed(address: str, monkeypatch: pytest.MonkeyPatch) -> None:
    allowing = MultiModalConfig(limit_per_prompt=1, encoder_capacity=1, allowed_media_domains=["127.0.0.1"])
    assert fetch_image(f"{address}/a.png", allowing).size == (5, 4)
    with pytest.raises(ValueError, match="at one of allowed_media_domains"):
        fetch_image(f"{address}/away", allowing)
    with pytest.raises(ValueError, match="can be fetched.*404"):
        fetch_image(f"{address}/gone", allowing)
    with pytest.raises(ValueError, match="public internet"):
        fetch_image(f"{address}/a.png", CONFIG)
    monkeypatch.setenv("VLLM_MEDIA_URL_ALLOW_REDIRECTS", "0")
    with pytest.raises(ValueError, match="no redirect"):
        fetch_image(f"{address}/away", allowing)


@pytest.mark.parametrize(
    "url", [None, 3, "", "a.png", "ftp://a/b", "data:image/png,abc", "data:image/png;base64,%%", "http://", "http://[a"]
)
def test_an_address_that_is_none_is_refused(url: Any) -> None:
    with pytest.raises(ValueError, match=r"messages\[0\]\['content'\]\[0\] must be"):
        take_pictures([{"role": "user", "content": [{"type": "image_url", "image_url": {"url": url}}]}], CONFIG)


def test_the_parts_of_a_chat_give_their_pictures() -> None:
    image = picture(5, 4)
    url = data_url(png(image))
    parts = [{"type": "image_url", "image_url": {"url": url}, "uuid": "a"}, {"type": "text", "text": "hm"}]
    messages, pictures, uuids = take_pictures(
        [{"role": "user", "content": parts}, {"role": "user", "content": [{"type": "image_pil", "image_pil": image}]}],
        CONFIG,
    )
    assert [np.asarray(each).tolist() for each in pictures] == [np.asarray(image).tolist()] * 2
    assert uuids == ["a", None]
    assert messages[0]["content"] == [{"type": "image"}, {"type": "text", "text": "hm"}]
    with pytest.raises(ValueError, match="at most 2 pictures"):
        take_pictures([{"role": "user", "content": [parts[0]] * 3}], CONFIG)


@pytest.mark.parametrize(
    ("option", "value"),
    [
        ("limit_mm_per_prompt", {"image": -1}),
        ("limit_mm_per_prompt", {"picture": 1}),
        ("limit_mm_per_prompt", {"image": {"number": 1}}),
        ("mm_processor_cache_gb", -1),
        ("mm_processor_cache_gb", "4"),
        ("allowed_local_media_path", "/nowhere/at/all"),
        ("allowed_media_domains", "example.org"),
        ("allowed_media_domains", [1]),
        ("mm_processor_kwargs", 3),
        ("enable_mm_embeds", 3),
    ],
)
def test_options_are_checked(tiny_llama_dir: str, option: str, value: Any) -> None:
    with pytest.raises(ValueError, match=f"{option} must be"):
        EngineArgs(model=tiny_llama_dir, **{option: value}).create_engine_config()
