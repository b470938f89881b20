"""The page at `/`: three files of our own, no inline code, nothing from elsewhere."""

from pathlib import Path
from typing import Final

from starlette.requests import Request
from starlette.responses import Response

from millstream.http.problems import Problem, not_found

_FOLDER: Final = Path(__file__).parent / "static"
_TYPES: Final = {
    "index.html": "text/html; charset=utf-8",
    "app.js": "text/javascript; charset=utf-8",
    "render.js": "text/javascript; charset=utf-8",
    "style.css": "text/css; charset=utf-8",
    "icon.svg": "image/svg+xml",
}


class Page:
    """Reads its files once: they are few and small."""

    def __init__(self) -> None:
        self._files = {name: (_FOLDER / name).read_bytes() for name in _TYPES}

    async def index(self, _request: Request) -> Response | Problem:
        return self._file("index.html")

    async def static(self, request: Request) -> Response | Problem:
        name = request.path_params["name"]
        return self._file(name) if name in self._files else not_found("file")

    def _file(self, name: str) -> Response:
        return Response(self._files[name], 200, {"Cache-Control": "no-cache"}, _TYPES[name])
