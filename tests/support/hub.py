"""A Hugging Face hub on loopback that serves one repository the way a test wants: whole, cut, slowly, held up, with errors, or silently.

It speaks what `huggingface_hub` asks for: the repository with its files, their sizes and checksums, `HEAD` and `GET` of files with tags and ranges. As
on the real one, large files are elsewhere: at another name of this machine, which must never see a token.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
import select
import threading
import time
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import TYPE_CHECKING
from urllib.parse import unquote, urlsplit

import onnx
from onnx import TensorProto, helper

from support.process import DEADLINE, run
from support.worker import Worker, worker

if TYPE_CHECKING:
    import subprocess
    from collections.abc import Iterator
    from contextlib import AbstractContextManager
    from pathlib import Path

REPO = "LiquidAI/LFM2.5-230M-ONNX"
"""What the table of models has for `lfm2.5-230m`."""
KEY = "lfm2.5-230m"
TOKEN = "hf_of_the_test"
COMMIT = "1234567890abcdef1234567890abcdef12345678"
LARGE = 100_000
"""Files of at least so many bytes are kept as large ones."""
_PIECE = 1 << 16


@dataclass
class File:
    """A file that is served."""

    content: bytes
    listed: int | None = None
    """The size that the list says, where it is not the file's own."""
    sha256: str = field(init=False)
    oid: str = field(init=False)

    def __post_init__(self) -> None:
        self.sha256 = hashlib.sha256(self.content).hexdigest()
        self.oid = hashlib.sha1(b"blob %d\0" % len(self.content) + self.content).hexdigest()

    @property
    def size(self) -> int:
        return len(self.content) if self.listed is None else self.listed

    @property
    def large(self) -> bool:
        return len(self.content) >= LARGE

    @property
    def tag(self) -> str:
        return self.sha256 if self.large else self.oid


@dataclass
class Fault:
    """What is wrong with a file, or with the list of all (`""`)."""

    status: int | None = None
    """Answered instead of the file."""
    headers: dict[str, str] = field(default_factory=dict)
    """Sent with the status."""
    cut: int | None = None
    """The connection breaks at this byte of the file."""
    hold: int | None = None
    """Nothing follows this byte of the file until `go`; 0 holds the answer's head as well."""
    pace: float = 0.0
    """Seconds between two pieces (64 KiB) of the file."""
    content: bytes | None = None
    """Sent in place of what the list promises."""
    no_ranges: bool = False
    """A range is asked for in vain: the whole file comes."""
    times: int = 1 << 30
    """How many answers are so; the ones after them are sound."""


@dataclass
class Asked:
    """A request."""

    method: str
    file: str
    """Which file; empty for the list."""
    range: str | None
    token: str | None
    large: bool
    """Whether it was asked for where large files are."""
    sent: int = 0
    """Bytes of the file that were sent."""
    time: float = field(default_factory=time.monotonic)
    """When it came."""


class Hub:
    """What is served, what is wrong with it, and what has been asked for."""

    def __init__(self, port: int, repo: str, files: dict[str, bytes]) -> None:
        self.port = port
        self.repo = repo
        self.files = {name: File(content) for name, content in files.items()}
        self.faults: dict[str, Fault] = {}
        self.sizes = True
        """Whether the list of all files says their sizes; a mirror may know them only in the listing by folders."""
        self.asked: list[Asked] = []
        self.held = threading.Event()
        """Set when an answer has come to where it is held."""
        self.go = threading.Event()
        self.left = threading.Event()
        """Set when a client has hung up on an answer that is held."""

    @property
    def address(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    def env(self, home: Path, **more: str) -> dict[str, str]:
        """The environment in which this hub is the only one, with a home of its own for all that hubs and omp know."""
        others = dict.fromkeys((name for name in os.environ if name.startswith(("HF_", "PI_", "OMP_", "HUGGING"))), "")
        own = {
            "HF_ENDPOINT": self.address,
            "HF_HOME": str(home / "hf"),
            "HF_HUB_CACHE": str(home / "hf" / "hub"),
            "HF_TOKEN": TOKEN,
            "HOME": str(home),
            "XDG_CACHE_HOME": str(home / "cache"),
            "NO_PROXY": "127.0.0.1,localhost",
            "no_proxy": "127.0.0.1,localhost",
            # Short where a test waits for it to run out; no test that ends well waits for it at all.
            "EMBERD_HUB_TIMEOUT": str(DEADLINE),
            "EMBERD_HUB_RETRIES": "0",
        }
        return {**others, **own, **more}

    def store(self, home: Path) -> Path:
        """The repository's folder in the cache of that home."""
        return home / "hf" / "hub" / f"models--{self.repo.replace('/', '--')}"

    def snapshot(self, home: Path) -> Path:
        """The model's folder."""
        return self.store(home) / "snapshots" / COMMIT

    def gets(self, file: str) -> list[Asked]:
        """The requests for a file's bytes that were answered where the file is."""
        return [
            each
            for each in self.asked
            if (each.method, each.file) == ("GET", file) and each.large == self.files[file].large
        ]

    def fetched(self) -> set[str]:
        """The files that were fetched."""
        return {each.file for each in self.asked if each.method == "GET" and each.file}

    def take(self, name: str) -> Fault:
        """What is wrong with the next answer about this file."""
        fault = self.faults.get(name)
        if fault is None or fault.times == 0:
            return Fault()
        fault.times -= 1
        return fault


class _Handler(BaseHTTPRequestHandler):
    hub: Hub
    protocol_version = "HTTP/1.1"
    timeout = DEADLINE

    def do_HEAD(self) -> None:
        self._answer()

    def do_GET(self) -> None:
        self._answer()

    def _answer(self) -> None:
        hub, path = self.hub, unquote(urlsplit(self.path).path)
        elsewhere = re.fullmatch(r"/large/(.+)", path)
        name = elsewhere[1] if elsewhere else path.partition("/resolve/")[2].partition("/")[2]
        token = self.headers.get("authorization")
        asked = Asked(self.command, name, self.headers.get("range"), token, elsewhere is not None)
        hub.asked.append(asked)
        if elsewhere:
            self._bytes(hub.files[name], hub.take(name), asked)
        elif re.fullmatch(rf"/{re.escape(hub.repo)}/resolve/(main|{COMMIT})/.+", path) and name in hub.files:
            file = hub.files[name]
            if file.large:
                headers = {
                    "location": f"http://localhost:{hub.port}/large/{name}",
                    "x-linked-size": str(len(file.content)),
                }
                self._begin(302, {**headers, "x-linked-etag": f'"{file.tag}"', "x-repo-commit": COMMIT}, b"")
            elif self.command == "HEAD":
                self._begin(200, self._about(file), None, len(file.content))
            else:
                self._bytes(file, hub.take(name), asked)
        elif re.fullmatch(rf"/api/models/{re.escape(hub.repo)}/(revision|tree)/(main|{COMMIT})", path):
            fault = hub.take("")
            if fault.hold is not None and not self._wait():
                return
            tree = "/tree/" in path
            self._begin(fault.status or 200, fault.headers, self._listing(tree) if fault.status is None else b"{}")
        elif name:
            self._begin(404, {"x-error-code": "EntryNotFound"}, b"")
        else:
            self._begin(404, {"x-error-code": "RepoNotFound"}, b'{"error":"Repository not found"}')

    def _listing(self, tree: bool) -> bytes:
        files = self.hub.files.items()
        if tree:
            rows = [
                {"type": "file", "path": name, "size": file.size, "oid": file.oid}
                | ({"lfs": {"oid": file.sha256, "size": file.size, "pointerSize": 134}} if file.large else {})
                for name, file in files
            ]
            return json.dumps(rows).encode()
        siblings = [
            {"rfilename": name, "blobId": file.oid}
            | ({"size": file.size} if self.hub.sizes else {})
            | ({"lfs": {"sha256": file.sha256, "size": file.size, "pointerSize": 134}} if file.large else {})
            for name, file in files
        ]
        return json.dumps({"id": self.hub.repo, "sha": COMMIT, "siblings": siblings}).encode()

    def _about(self, file: File) -> dict[str, str]:
        return {"etag": f'"{file.tag}"', "x-repo-commit": COMMIT, "accept-ranges": "bytes"}

    def _begin(self, status: int, headers: dict[str, str], body: bytes | None, length: int | None = None) -> None:
        self.send_response(status)
        for name, value in headers.items():
            self.send_header(name, value)
        self.send_header("content-length", str(len(body) if body is not None else length))
        self.end_headers()
        if body and self.command != "HEAD":
            self.wfile.write(body)

    def _bytes(self, file: File, fault: Fault, asked: Asked) -> None:
        if fault.status is not None:
            return self._begin(fault.status, fault.headers, b"")
        content = file.content if fault.content is None else fault.content
        if fault.hold == 0 and not self._wait():
            return None
        start = 0
        headers, status = self._about(file), 200
        if asked.range and not fault.no_ranges:
            start = int(asked.range.removeprefix("bytes=").removesuffix("-"))
            if start >= len(content):
                return self._begin(416, {"content-range": f"bytes */{len(content)}"}, b"")
            headers["content-range"] = f"bytes {start}-{len(content) - 1}/{len(content)}"
            status = 206
        self._begin(status, headers, None, len(content) - start)
        at = start
        stops = sorted(stop for stop in (fault.hold, fault.cut, len(content)) if stop is not None and stop >= at)
        try:
            for stop in stops:
                while at < stop:
                    piece = content[at : min(at + _PIECE, stop)]
                    self.wfile.write(piece)
                    at += len(piece)
                    asked.sent += len(piece)
                    self.hub.go.wait(fault.pace)
                if stop == fault.cut:
                    break
                if stop == fault.hold and not self._wait():
                    break
        except (BrokenPipeError, ConnectionResetError):
            self.hub.left.set()
        if at < len(content):
            self.close_connection = True
        return None

    def _wait(self) -> bool:
        """Waits for `go`; false when the client hangs up before."""
        self.wfile.flush()
        self.hub.held.set()
        while not self.hub.go.is_set():
            if select.select([self.connection], [], [], 0.02)[0]:
                self.hub.left.set()
                self.close_connection = True
                return False
        return True

    def log_message(self, format: str, *args: object) -> None:
        """Says nothing: what was asked for is in `asked`."""


class _Server(ThreadingHTTPServer):
    daemon_threads = True

    def handle_error(self, request: object, client_address: object) -> None:
        """Says nothing: clients that leave in the middle are what some tests are about."""


@contextmanager
def loopback_hub(files: dict[str, bytes], repo: str = REPO) -> Iterator[Hub]:
    """A hub that serves these files as one repository until the block ends."""
    handler = type("Handler", (_Handler,), {})
    server = _Server(("127.0.0.1", 0), handler)
    hub = handler.hub = Hub(server.server_port, repo, files)
    thread = threading.Thread(target=server.serve_forever, args=(0.02,), daemon=True)
    thread.start()
    try:
        yield hub
    finally:
        hub.go.set()
        server.shutdown()
        server.server_close()
        thread.join(DEADLINE)


def real_model(home: Path) -> dict[str, bytes]:
    """The real model, as a repository for transformers.js lays it out."""
    folder = home / "models" / "smollm2-135m"
    names = ("config.json", "generation_config.json", "tokenizer.json", "tokenizer_config.json")
    files = {name: (folder / name).read_bytes() for name in names}
    graph = onnx.load(folder / "model.onnx", load_external_data=False)
    for tensor in graph.graph.initializer:
        for entry in tensor.external_data:
            if entry.key == "location":
                entry.value = "model_q4.onnx_data"
    files["onnx/model_q4.onnx"] = graph.SerializeToString()
    files["onnx/model_q4.onnx_data"] = (folder / "model.onnx.data").read_bytes()
    return {**files, "README.md": b"a model", "onnx/model_fp16.onnx": b"other weights"}


def small_model() -> dict[str, bytes]:
    """A repository that passes for a model until an engine opens it, with files in it that no load needs."""
    tokenizer = {"version": "1.0", "model": {"type": "WordLevel", "vocab": {"a": 0}, "unk_token": "a"}}
    return {
        ".gitattributes": b"*",
        "README.md": b"a model",
        "config.json": b'{"max_position_embeddings":64}',
        "generation_config.json": b"{}",
        "tokenizer.json": json.dumps(tokenizer).encode(),
        "tokenizer_config.json": b'{"chat_template":"{{ messages }}"}',
        "chat_template.jinja": b"{{ messages }}",
        "model.safetensors": b"torch's weights",
        "onnx/model_fp16.onnx": b"other weights",
        "onnx/model_q4.onnx": b"a graph",
        "onnx/model_q4.onnx_data": os.urandom(3_000_000),
    }


def graph(*inputs: str) -> bytes:
    """A graph with these inputs, which gives its first one back, and no weights."""
    given = [helper.make_tensor_value_info(name, TensorProto.INT64, [1, "n"]) for name in inputs]
    out = helper.make_tensor_value_info("logits", TensorProto.INT64, [1, "n"])
    made = helper.make_graph([helper.make_node("Identity", [inputs[0]], ["logits"])], "main", given, [out])
    opset = [helper.make_opsetid("", 21)]
    return bytes(helper.make_model(made, opset_imports=opset, ir_version=10).SerializeToString())


NEEDED = {
    "config.json",
    "generation_config.json",
    "tokenizer.json",
    "tokenizer_config.json",
    "chat_template.jinja",
    "onnx/model_q4.onnx",
    "onnx/model_q4.onnx_data",
}
"""What a load takes of `small_model`."""
WEIGHTS = "onnx/model_q4.onnx_data"


def hold(hub: Hub) -> None:
    hub.faults[WEIGHTS] = Fault(hold=1_000_000)


def asks(path: Path, home: Path, hub: Hub, **env: str) -> AbstractContextManager[Worker]:
    """A worker for the key of the repository, with the engine for real."""
    return worker(path, key=KEY, engine="auto", home=home, **hub.env(home, **env))


def pulls(hub: Hub, home: Path, **env: str) -> subprocess.CompletedProcess[str]:
    return run("models", "pull", REPO, home=home, **hub.env(home, **env))


def pulled(hub: Hub, home: Path, **env: str) -> None:
    """Pulls, which must succeed, and checks every file that it left."""
    done = pulls(hub, home, **env)
    assert (done.returncode, done.stdout) == (0, f"{REPO} is ready in {hub.snapshot(home)}\n"), done.stderr
    whole(hub, home)


def whole(hub: Hub, home: Path) -> None:
    """Checks that the snapshot has what is needed, byte for byte, and that nothing is left beside it."""
    folder = hub.snapshot(home)
    found = {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*") if not path.is_dir()}
    assert found.keys() == NEEDED
    assert all(content == hub.files[name].content for name, content in found.items())
    assert sorted(path.name for path in (hub.store(home) / "blobs").iterdir()) == sorted(
        hub.files[name].tag for name in NEEDED
    )


def refused(process: subprocess.CompletedProcess[str], *parts: str) -> None:
    """Checks that a pull failed, with one line that says these things, and another with what to do."""
    assert (process.returncode, process.stdout) == (1, ""), process
    error = process.stderr[process.stderr.rfind("error: ") :]
    said, hint = error.split("\nhint: ")
    assert "\n" not in said
    assert hint.strip()
    for part in parts:
        assert part in error, process.stderr
    assert "Traceback" not in process.stderr
