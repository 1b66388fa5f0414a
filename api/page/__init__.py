"""The web page at `/`: plain files of this package, that hold nothing of a tenant and ask the API."""

import hashlib
from dataclasses import dataclass
from pathlib import Path

from fastapi import APIRouter, Request
from starlette.responses import Response

from jobs import errors

router = APIRouter(include_in_schema=False)
_TYPES = {
    ".html": "text/html; charset=utf-8",
    ".css": "text/css; charset=utf-8",
    ".js": "text/javascript; charset=utf-8",
    ".svg": "image/svg+xml",
}
_HEADERS = {
    # Nothing from elsewhere, nothing inline, and no text that becomes HTML: what a batch says stays text.
    "Content-Security-Policy": "default-src 'none'; script-src 'self'; style-src 'self'; connect-src 'self'; "
    "img-src 'self'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'; "
    "require-trusted-types-for 'script'; trusted-types 'none'",
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
    "Cross-Origin-Opener-Policy": "same-origin",
    "Cross-Origin-Resource-Policy": "same-origin",
    "Cache-Control": "no-cache",
}


@dataclass(frozen=True)
class Asset:
    """A file of the page."""

    data: bytes
    kind: str

    @property
    def etag(self) -> str:
        return f'"{hashlib.sha256(self.data).hexdigest()[:20]}"'


ASSETS = {
    path.name: Asset(path.read_bytes(), _TYPES[path.suffix])
    for path in sorted(Path(__file__).parent.iterdir())
    if path.suffix in _TYPES
}


@router.get("/")
async def get_page(request: Request) -> Response:
    """Return the page."""
    return _answer(request, "index.html")


@router.get("/page/{name}")
async def get_asset(request: Request, name: str) -> Response:
    """Return a file of the page."""
    return _answer(request, name)


def _answer(request: Request, name: str) -> Response:
    asset = ASSETS.get(name)
    if asset is None:
        raise errors.NotFound(what="path", id=f"/page/{name[:200]}")
    headers = _HEADERS | {"ETag": asset.etag}
    if request.headers.get("if-none-match") == asset.etag:
        return Response(status_code=304, headers=headers)
    return Response(asset.data, media_type=asset.kind, headers=headers)
