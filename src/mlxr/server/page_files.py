"""The web page: serves the files that `make page` builds from `web/`, with headers for browsers' caches.

`Page` serves only the files in `page/`. It knows no model and no route of the API. The page's code gets everything else
through the public routes, so these files hold no secret and need no key.
"""

from __future__ import annotations

import asyncio
import base64
import gzip
import hashlib
import re
from functools import lru_cache
from pathlib import Path

from starlette.datastructures import Headers
from starlette.requests import Request
from starlette.responses import Response

from mlxr.core.errors import SettingError
from mlxr.core.frozen import frozen
from mlxr.core.settings import Settings
from mlxr.server.access import Head
from mlxr.server.parts import parts_of

FOLDER = Path(__file__).parent / "page"
INDEX = "index.html"
ASSETS = "assets"
ROOT_NAMES = ("icon.svg", "icon.png", "manifest.webmanifest", "sw.js", "docs.css", "docs.js", "licenses.txt")
SANDBOX = "sandbox.html"
ROOT_FILES = {f"/{name}": name for name in ROOT_NAMES} | {"/docs": "docs.html", "/sandbox": SANDBOX}
ROOT_PATHS = frozenset(ROOT_FILES)
ASSET_PATH = f"/{ASSETS}/{{name}}"
PLAIN_NAME = re.compile(r"[A-Za-z0-9_-]+(\.[A-Za-z0-9_-]+)+", re.ASCII)  # no folder, and never . or ..
MEDIA_TYPES = {
    ".html": "text/html; charset=utf-8",
    ".js": "text/javascript; charset=utf-8",
    ".css": "text/css; charset=utf-8",
    ".svg": "image/svg+xml",
    ".json": "application/json",
    ".webmanifest": "application/manifest+json",
    ".woff2": "font/woff2",
    ".png": "image/png",
    ".txt": "text/plain; charset=utf-8",
}
COMPRESSED = frozenset({".html", ".js", ".css", ".svg", ".json", ".webmanifest", ".txt"})
FOR_EVER = "public, max-age=31536000, immutable"  # the name of an asset changes with its contents
ASK_AGAIN = "no-cache"  # may be kept, but the server is asked before each use
TOOL_ORIGIN = re.compile(r"https?://([a-z0-9._-]+|\[[0-9a-f:]+\])(:\d{1,5})?", re.IGNORECASE | re.ASCII)


@frozen
class PageFile:
    """The bytes of a file, the same compressed (empty if that saves nothing), and a tag that changes with them."""

    body: bytes
    compressed: bytes
    tag: str


class Page:
    """The built page in `folder`. `tool_origins` are servers that its code may call besides the one it came from."""

    def __init__(self, tool_origins: tuple[str, ...] = (), folder: Path = FOLDER) -> None:
        self._folder = folder
        self._headers = {
            "Content-Security-Policy": write_policy(tool_origins),
            "X-Content-Type-Options": "nosniff",
            "Referrer-Policy": "no-referrer",
            "Cross-Origin-Opener-Policy": "same-origin",
            "Cross-Origin-Resource-Policy": "same-origin",
        }

    @classmethod
    def read(cls, settings: Settings) -> Page | None:
        """Return the page of the settings; None if it is turned off or was not built. Raises SettingError."""
        for origin in settings.page_tool_origins:
            if TOOL_ORIGIN.fullmatch(origin) is None:
                raise SettingError(
                    f"page_tool_origins: {origin!r} is no origin; it must be like http://localhost:9000, without a path"
                )
        return cls(settings.page_tool_origins) if settings.page and (FOLDER / INDEX).is_file() else None

    def has(self, head: Head) -> bool:
        """Return True if a request is for a file of the page, which is the same for everybody and needs no key."""
        path, accept = head.path, head.headers.get("accept", "")
        is_file = path in ROOT_PATHS or path.startswith(f"/{ASSETS}/") or (path == "/" and wants_page(accept))
        return is_file and head.method in ("GET", "HEAD")

    def reply(self, headers: Headers, name: str, folder: str = "") -> Response | None:
        """Return the file of that name, or "304 Not Modified" if the client has it; None if there is no such file.

        Reads the disk and compresses, so it belongs on a thread.
        """
        path = self._folder / folder / name
        try:
            status = path.stat() if PLAIN_NAME.fullmatch(name) else None
        except OSError:
            status = None
        if status is None:
            return None
        file = _read_file(path, status.st_mtime_ns)
        is_compressed = bool(file.compressed) and accepts_gzip(headers.get("accept-encoding", ""))
        tag = f'"{file.tag}-gzip"' if is_compressed else f'"{file.tag}"'
        policy = {"Content-Security-Policy": write_sandbox_policy(file.body)} if name == SANDBOX else {}
        reply_headers = {
            **self._headers,
            **policy,
            "ETag": tag,
            "Cache-Control": FOR_EVER if folder == ASSETS else ASK_AGAIN,
            "Vary": "Accept, Accept-Encoding",
        }
        known = [part.strip().removeprefix("W/") for part in headers.get("if-none-match", "").split(",")]
        if tag in known or "*" in known:
            return Response(status_code=304, headers=reply_headers)
        if is_compressed:
            reply_headers["Content-Encoding"] = "gzip"
        body = file.compressed if is_compressed else file.body
        return Response(
            body, headers=reply_headers, media_type=MEDIA_TYPES.get(path.suffix, "application/octet-stream")
        )


def wants_page(accept: str) -> bool:
    """Return True if an Accept header names HTML, as browsers' do when they open an address, and no API client's."""
    kinds = (kind.replace(" ", "").lower().split(";") for kind in accept.split(","))
    return any(kind == "text/html" and "q=0" not in parameters for kind, *parameters in kinds)


def accepts_gzip(accept_encoding: str) -> bool:
    """Return True if an Accept-Encoding header allows gzip."""
    parts = (part.replace(" ", "").lower().split(";") for part in accept_encoding.split(","))
    return any(coding == "gzip" and "q=0" not in parameters for coding, *parameters in parts)


def write_policy(tool_origins: tuple[str, ...]) -> str:
    """Return the Content-Security-Policy: code, styles, frames and connections only from here, and nothing inline; no
    other page may frame it.

    Images may also be made by the page itself (`data:`, `blob:`), so no text of a model can fetch one from elsewhere.
    """
    rules = {
        "default-src": "'none'",
        "script-src": "'self'",
        "style-src": "'self'",
        "font-src": "'self'",
        "img-src": "'self' data: blob:",
        "manifest-src": "'self'",
        "worker-src": "'self'",
        "frame-src": "'self'",
        "connect-src": " ".join(("'self'", *tool_origins)),
        "base-uri": "'none'",
        "form-action": "'none'",
        "frame-ancestors": "'none'",
    }
    return "; ".join(f"{name} {value}" for name, value in rules.items())


def write_sandbox_policy(document: bytes) -> str:
    """Return the policy of the frame in which the page draws diagrams and runs programs of a model.

    Its origin is opaque, so it sees nothing of the page, and it may not connect anywhere. It runs its own script, known
    by the digest, and programs that the page hands to it (`blob:`).
    """
    script = document.partition(b"<script>")[2].partition(b"</script>")[0]
    digest = base64.b64encode(hashlib.sha256(script).digest()).decode()
    return (
        f"default-src 'none'; script-src 'sha256-{digest}' blob:; style-src 'unsafe-inline'; worker-src blob:; "
        "base-uri 'none'; form-action 'none'; frame-ancestors 'self'; sandbox allow-scripts"
    )


@lru_cache(maxsize=256)
def _read_file(path: Path, _changed_ns: int) -> PageFile:
    body = path.read_bytes()
    compressed = gzip.compress(body, 9, mtime=0) if path.suffix in COMPRESSED else b""
    return PageFile(body, compressed if len(compressed) < len(body) else b"", hashlib.sha256(body).hexdigest()[:32])


async def find_page_file(request: Request, name: str, folder: str = "") -> Response | None:
    """Return the reply with a file of the page; None if the server has none of that name."""
    page = parts_of(request).page
    return None if page is None else await asyncio.to_thread(page.reply, request.headers, name, folder)
