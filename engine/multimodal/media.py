"""Fetches what a chat's parts point to: `data:`, `file:` and `http:` addresses, within what the engine allows."""

import base64
import binascii
import ipaddress
import socket
import urllib.error
import urllib.parse
import urllib.request
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ...protocol import envs
from ...protocol.config import MultiModalConfig
from ...protocol.param_checks import reject
from .images import MAX_BYTES, decode

if TYPE_CHECKING:
    from PIL import Image

_SHOWN = 80  # characters of an address in a message


def fetch_image(url: object, config: MultiModalConfig, what: str = "image_url") -> "Image.Image":
    """Raises VLLMValidationError for an address that leads nowhere, or where it may not."""
    if not isinstance(url, str):
        reject(what, url, "an address that begins with data:, file: or http:")
    shown = url if len(url) <= _SHOWN else f"{url[:_SHOWN]}..."
    try:
        parts = urllib.parse.urlsplit(url)
        host = parts.hostname
    except ValueError as error:
        reject(what, shown, f"an address: {error}")
    if parts.scheme == "data":
        return decode(_inline(url, shown, what), what)
    if parts.scheme == "file":
        return decode(_local(parts, shown, config, what), what)
    if parts.scheme in ("http", "https") and host:
        return decode(_remote(url, shown, config, what), what)
    reject(what, shown, "an address that begins with data:, file: or http:")


def _inline(url: str, shown: str, what: str) -> bytes:
    header, comma, content = url.partition(",")
    if not comma or not header.endswith(";base64"):
        reject(what, shown, "data:image/...;base64, and the picture's bytes in base64")
    if len(content) > MAX_BYTES * 4 // 3 + 4:
        reject(what, shown, f"at most {MAX_BYTES} bytes")
    try:
        return base64.b64decode(content, validate=True)
    except (binascii.Error, ValueError) as error:
        reject(what, shown, f"the picture's bytes in base64: {error}")


def _local(parts: urllib.parse.SplitResult, shown: str, config: MultiModalConfig, what: str) -> bytes:
    allowed = config.allowed_local_media_path
    if not allowed:
        reject(what, shown, "data: or http: (allowed_local_media_path would allow the files of a folder)")
    path = Path(urllib.request.url2pathname(parts.path))
    if parts.netloc not in ("", "localhost"):
        reject(what, shown, "a file of this machine, such as file:///folder/picture.png")
    try:
        real = path.resolve(strict=True)
        if not real.is_relative_to(Path(allowed).resolve()) or not real.is_file():
            reject(what, shown, f"a file below allowed_local_media_path, {allowed}")
        with real.open("rb") as file:
            return file.read(MAX_BYTES + 1)
    except (OSError, RuntimeError, ValueError) as error:
        if isinstance(error, ValueError) and "allowed_local_media_path" in str(error):
            raise
        reject(what, shown, f"a file below allowed_local_media_path that can be read ({type(error).__name__})")


class _CheckedRedirects(urllib.request.HTTPRedirectHandler):
    """Follows redirects to where the engine may go itself."""

    def __init__(self, config: MultiModalConfig, what: str) -> None:
        self._config = config
        self._what = what

    def redirect_request(self, req: Any, fp: Any, code: int, msg: str, headers: Any, newurl: str) -> Any:
        if not envs.VLLM_MEDIA_URL_ALLOW_REDIRECTS:
            reject(self._what, newurl[:_SHOWN], "no redirect: VLLM_MEDIA_URL_ALLOW_REDIRECTS is 0")
        _check_host(newurl, newurl[:_SHOWN], self._config, self._what)
        return super().redirect_request(req, fp, code, msg, headers, newurl)


def _remote(url: str, shown: str, config: MultiModalConfig, what: str) -> bytes:
    _check_host(url, shown, config, what)
    opener = urllib.request.build_opener(_CheckedRedirects(config, what))
    request = urllib.request.Request(url, headers={"User-Agent": "corespan"})
    try:
        with opener.open(request, timeout=envs.VLLM_IMAGE_FETCH_TIMEOUT) as answer:
            content: bytes = answer.read(MAX_BYTES + 1)
            return content
    except (OSError, urllib.error.URLError) as error:  # HTTPException too is no ValueError
        reject(what, shown, f"an address that can be fetched: {error}")


def _check_host(url: str, shown: str, config: MultiModalConfig, what: str) -> None:
    """Raises VLLMValidationError for a host that is not among those allowed. Where none are named, any may be asked but
    those of this machine and of private networks."""
    parts = urllib.parse.urlsplit(url)
    host = parts.hostname
    if parts.scheme not in ("http", "https") or not host:
        reject(what, shown, "an address that begins with http: or https:")
    if config.allowed_media_domains is not None:
        if host not in config.allowed_media_domains:
            reject(what, shown, f"an address at one of allowed_media_domains, {config.allowed_media_domains}")
        return
    try:
        found = {str(info[4][0]).partition("%")[0] for info in socket.getaddrinfo(host, None)}
    except (OSError, UnicodeError) as error:
        reject(what, shown, f"an address whose host is known: {error}")
    if any(not ipaddress.ip_address(each).is_global for each in found):
        reject(what, shown, "an address of the public internet (allowed_media_domains can name other hosts)")
