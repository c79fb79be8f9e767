"""The page at `/`: the files of `server/page`, read once, each at a path of its own, so that no path a client sends is
ever opened.
"""

import hashlib
from functools import cache
from pathlib import Path

from starlette.requests import Request
from starlette.responses import Response

FOLDER = Path(__file__).resolve().parent.parent / "page"
_TYPES = {
    ".html": "text/html; charset=utf-8",
    ".css": "text/css; charset=utf-8",
    ".js": "text/javascript; charset=utf-8",
    ".svg": "image/svg+xml",
}
FILES = {
    "/" if path.name == "index.html" else f"/page/{path.name}": path
    for path in sorted(FOLDER.iterdir())
    if path.suffix in _TYPES
}
"""Every path of the page, and the file that is served there."""

_POLICY = "; ".join(
    (
        "default-src 'none'",
        "script-src 'self'",
        "style-src 'self'",
        "img-src 'self' data:",
        "connect-src 'self'",
        "base-uri 'none'",
        "form-action 'none'",
        "frame-ancestors 'none'",
        "require-trusted-types-for 'script'",  # the page builds nodes; markup out of text cannot be set at all
    )
)
HEADERS = {
    "Content-Security-Policy": _POLICY,
    "X-Content-Type-Options": "nosniff",
    "X-Frame-Options": "DENY",
    "Referrer-Policy": "no-referrer",
    "Cross-Origin-Opener-Policy": "same-origin",
    "Permissions-Policy": "camera=(), geolocation=(), microphone=()",
    "Cache-Control": "no-cache",
}


async def page_file(request: Request) -> Response:
    """A file of the page; 304 where the client has it already."""
    content, etag = _read(FILES[request.scope["route"].path])
    headers = {**HEADERS, "ETag": etag}
    if request.headers.get("if-none-match") == etag:
        return Response(status_code=304, headers=headers)
    return Response(content, headers=headers, media_type=_TYPES[FILES[request.scope["route"].path].suffix])


@cache
def _read(path: Path) -> tuple[bytes, str]:
    content = path.read_bytes()
    return content, f'"{hashlib.sha256(content).hexdigest()[:32]}"'
