"""Fetches a model from a Hugging Face hub into the user's hub cache: `python -m emberd.hub ORG/NAME --form onnx|mlx`.

Runs as a process of its own, which `rust/models/hub.rs` starts: no worker and no engine ever imports `huggingface_hub`.
Standard output carries one JSON object a line (`plan`, then for each file `file`, `bytes`…, `done`, then `ready`; or
`error`; `again` wherever a request is made once more), standard error the log, neither of them a password or token; the
process ends when its standard input does. Endpoint, token and cache are `huggingface_hub`'s, as is the layout of the
cache (`hub_cache`). The transfer itself is made here: the library (2.4) drops what has come when it is
interrupted, tells of it only every ten megabytes, and waits without a limit for some answers.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import shutil
import sys
import threading
import time
import traceback
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import TYPE_CHECKING, NoReturn, TypeVar

from emberd.hub_cache import PARTIAL, Item, checksum, link, plain, settle, sound, sweep, write
from emberd.hub_errors import Clean, Trouble, Where, broken, explain, public, text

if TYPE_CHECKING:
    from huggingface_hub.hf_api import RepoFile, RepoSibling

T = TypeVar("T")

REPORT_EVERY = 0.05
"""Seconds between two reports of the same file; the reader lets fewer through."""
RETRIES = 4
"""How often a request that failed in passing is made again while nothing comes; `EMBERD_HUB_RETRIES`."""
FIRST_WAIT, LONGEST_WAIT = 0.5, 30.0
"""Seconds before it is made again: doubled each time, or what the hub asks for; a longer wait is the user's to decide."""
HASTE = 3.0
"""Seconds that a hub has for its list where the answer could be done without."""
SLACK = 16 << 20
"""Bytes that stay free on the disk."""
SHARED = re.compile(
    r"(config|generation_config)\.json|(tokenizer|special_tokens|added_tokens|chat_template|vocab|merges)[\w.-]*"
    r"|additional_chat_templates/[\w-]+\.jinja",
    re.ASCII,
)
"""What a model of any form may need besides its weights."""
MLX = re.compile(r"[\w.-]+\.(safetensors|safetensors\.index\.json|tiktoken)", re.ASCII)
"""The weights of an MLX model, and what older tokenizers keep their vocabulary in."""


def say(event: str, **more: object) -> None:
    """Tells the process that waits."""
    out = sys.__stdout__ or sys.stdout
    out.write(json.dumps({"event": event, **more}) + "\n")
    out.flush()


def wanted(names: Iterable[str], form: str, graphs: Iterable[str]) -> tuple[list[str], str | None]:
    """The files that make a model, weights last so that a folder with weights has all else; and the graph, if any."""
    names = sorted(names)
    chosen = [name for name in names if SHARED.fullmatch(name) and not name.endswith(".safetensors")]
    if form == "mlx":
        return chosen + [name for name in names if MLX.fullmatch(name)], None
    graph = next((graph for graph in graphs if graph in names), None)
    if graph is not None:
        # Weights beside the graph: model_q4.onnx_data, model_q4.onnx_data_1 or model.onnx.data.
        beside = re.compile(re.escape(graph) + r"[._]data[\w.-]*", re.ASCII).fullmatch
        chosen += [graph] + [name for name in names if beside(name)]
    return chosen, graph


class Fetch:
    """One fetch of one repository."""

    def __init__(self, repo: str) -> None:
        import httpx2
        from huggingface_hub import HfApi, constants, get_token, set_client_factory
        from huggingface_hub.utils import build_hf_headers

        self.repo = repo
        self.retries = int(_number("EMBERD_HUB_RETRIES", RETRIES))
        self.cache = Path(constants.HF_HUB_CACHE).absolute()
        self.store = self.cache / f"models--{repo.replace('/', '--')}"
        self.headers = {**build_hf_headers(library_name="emberd"), "Accept-Encoding": "identity"}
        limit = _number("EMBERD_HUB_TIMEOUT", constants.HF_HUB_DOWNLOAD_TIMEOUT)
        self.where = where = Where(repo, public(constants.ENDPOINT), self.cache, get_token() is not None, limit)

        def bounded(request: httpx2.Request) -> None:
            request.extensions["timeout"] = dict.fromkeys(("connect", "read", "write", "pool"), where.limit)

        hooks = {"request": [bounded]}
        set_client_factory(lambda: httpx2.Client(event_hooks=hooks, follow_redirects=True, timeout=None))
        self._api = HfApi(library_name="emberd")

    def run(self, form: str, graphs: list[str], whole: bool) -> None:
        """Fetches what is missing and says so. Where the cache has a `whole` model, a slow hub is not waited for."""
        from huggingface_hub.utils import WeakFileLock

        patience = self.where.limit, self.retries
        if whole:
            self.where.limit, self.retries = min(self.where.limit, HASTE), 0
        commit, items, tags = self.plan(form, graphs)
        self.where.limit, self.retries = patience
        folder = self.store / "snapshots" / commit
        lock = self.cache / ".locks" / self.store.name / "emberd.lock"
        lock.parent.mkdir(parents=True, exist_ok=True)
        with WeakFileLock(lock):  # Another process that fetches the same is waited for; then most is here.
            # Contents are compared as well: this process runs where emberd has no record that vouches for them.
            missing = [item for item in items if not sound(folder / item.name, item)]
            files = [
                {"name": each.name, "bytes": each.size, "done": 0 if each in missing else each.size} for each in items
            ]
            say("plan", commit=commit, folder=str(folder), files=files)
            self._room(missing)
            for item in missing:
                say("file", name=item.name)
                self.fetch(item, commit, folder)
                say("done", name=item.name)
            write(self.store / "refs" / "main", commit)
            sweep(self.store, tags)
        say("ready")

    def plan(self, form: str, graphs: list[str]) -> tuple[str, list[Item], set[str]]:
        """The commit that the main branch is at, what is wanted of it, and the tags of all its files."""
        info = self.patiently(
            lambda: self._api.model_info(self.repo, revision="main", files_metadata=True, timeout=self.where.limit),
            None,
        )
        commit = plain(info.sha or "")
        items = {each.rfilename: _item(each.rfilename, each) for each in info.siblings or ()}
        names, graph = wanted(items, form, graphs)
        if any(items[name].size < 0 for name in names):  # A mirror that knows only the listing by folders.
            from huggingface_hub.hf_api import RepoFile

            tree = self.patiently(
                lambda: list(self._api.list_repo_tree(self.repo, recursive=True, revision=commit)), None
            )
            items = {each.path: _item(each.path, each) for each in tree if isinstance(each, RepoFile)}
            names, graph = wanted(items, form, graphs)
        if form == "onnx" and graph is None:
            others = ", ".join(sorted(name for name in items if name.endswith(".onnx"))) or "no .onnx file at all"
            hint = f"it has {others}; PI_TINY_DTYPE says which weights are meant"
            raise Trouble(f"{self.repo} has no {graphs[0]}", hint, lasting=True)
        if form == "mlx" and not any(name.endswith(".safetensors") for name in names):
            raise Trouble(
                f"{self.repo} has no .safetensors file", "give a repository with weights for MLX", lasting=True
            )
        tags = {tag for item in items.values() for tag in (item.sha256, item.blob) if tag}
        return commit, [items[name] for name in names if items[name].size >= 0], tags

    def fetch(self, item: Item, commit: str, folder: Path) -> None:
        """Brings one file into the cache: its bytes under the hub's tag for them, and a link to them in the snapshot."""
        from huggingface_hub import get_hf_file_metadata, hf_hub_url

        url = hf_hub_url(self.repo, item.name, revision=commit)
        about = self.patiently(lambda: get_hf_file_metadata(url, timeout=self.where.limit, headers=self.headers), item)
        if about.etag is None:
            raise Trouble(
                f"{self.where.hub} gives no tag for {item.name} of {self.repo}",
                "set HF_ENDPOINT to a Hugging Face hub",
                lasting=True,
            )
        blob = self.store / "blobs" / plain(about.etag)
        if not sound(blob, item):
            blob.parent.mkdir(parents=True, exist_ok=True)
            partial = blob.with_name(blob.name + PARTIAL)
            reported = _Reports(item)
            best = 0

            def grown() -> bool:
                nonlocal best
                at = partial.stat().st_size if partial.exists() else 0
                best, before = max(at, best), best
                return at > before

            grown()
            self.patiently(lambda: self._receive(url, partial, item, reported), item, grown)
            self._verify(partial, item)
            settle(partial)
            partial.replace(blob)
        else:
            _Reports(item)(item.size)
        link(blob, folder / item.name)

    def patiently(self, work: Callable[[], T], item: Item | None, grown: Callable[[], bool] = lambda: False) -> T:
        """Does the work, and again where trouble may pass, until it has failed several times with nothing gained between."""
        failed = 0
        while True:
            try:
                return work()
            except Exception as error:
                trouble = explain(error, self.where, item.name if item else None)
                failed = 0 if grown() else failed + 1
                wait = min(FIRST_WAIT * 2 ** max(failed - 1, 0), LONGEST_WAIT) if trouble.wait is None else trouble.wait
                if not trouble.passing or failed > self.retries or wait > LONGEST_WAIT:
                    raise trouble from error
                say("again", message=public(trouble.message), seconds=wait)
                time.sleep(wait)

    def _receive(self, url: str, partial: Path, item: Item, reported: Callable[[int], None]) -> None:
        """Takes the bytes that are missing from `partial`."""
        from huggingface_hub import get_session
        from huggingface_hub.utils import hf_raise_for_status

        at = partial.stat().st_size if partial.exists() else 0
        if at > item.size:
            partial.unlink()
            at = 0
        reported(at)
        if at == item.size and partial.exists():
            return
        headers = {**self.headers, "Range": f"bytes={at}-"} if at else self.headers
        with get_session().stream("GET", url, headers=headers) as response:
            if response.status_code == 416 and at:
                partial.unlink()
                raise Trouble(f"the hub cannot go on with {item.name} at byte {at}", "fetch it again", passing=True)
            hf_raise_for_status(response)
            if response.status_code != 206:
                at = 0
            elif not response.headers.get("content-range", "").startswith(f"bytes {at}-"):
                partial.unlink(missing_ok=True)
                given = response.headers.get("content-range")
                raise Trouble(
                    f"the hub sent {given} of {item.name} instead of what follows byte {at}",
                    "fetch it again",
                    passing=True,
                )
            length = response.headers.get("content-length")
            if length is not None and "content-encoding" not in response.headers and at + int(length) != item.size:
                raise self._wrong(partial, item, f"has {at + int(length)} bytes instead of {item.size}")
            with partial.open("ab" if at else "wb") as file:
                for piece in response.iter_bytes():
                    at += len(piece)
                    if at > item.size:
                        break
                    file.write(piece)
                    reported(at)
        if at > item.size:
            raise self._wrong(partial, item, f"has more than its {item.size} bytes")
        if at < item.size:
            raise broken(self.where, item.name, f" after {at} of {item.size} bytes")

    def _verify(self, partial: Path, item: Item) -> None:
        if item.checksum is None:
            return
        found = checksum(partial, item.checksum)
        if found != item.checksum:
            raise self._wrong(partial, item, f"has the {found} instead of {item.checksum.rpartition(' ')[2]}")

    def _wrong(self, partial: Path, item: Item, what: str) -> Trouble:
        partial.unlink(missing_ok=True)
        hint = "it is not kept; fetch the model again, and if it stays the hub serves another file than it says"
        return Trouble(f"{item.name} of {self.repo} {what}", hint)

    def _room(self, missing: list[Item]) -> None:
        needed = sum(item.size for item in missing)
        free = shutil.disk_usage(self.cache).free
        if needed and needed + SLACK > free:
            raise Trouble(
                f"{self.repo} needs {needed / 1e6:.0f} MB, and {self.cache} has room for {free / 1e6:.0f}",
                "free some space, or set HF_HOME to a folder on another disk",
                lasting=True,
            )


class _Reports:
    """Says how far a file has come: the first time, the last, and between them not too often."""

    def __init__(self, item: Item) -> None:
        self._item, self._last, self._said = item, 0.0, -1

    def __call__(self, done: int) -> None:
        now = time.monotonic()
        if done != self._said and (self._said < 0 or done == self._item.size or now - self._last >= REPORT_EVERY):
            self._last, self._said = now, done
            say("bytes", name=self._item.name, done=done)


def _item(name: str, about: RepoFile | RepoSibling) -> Item:
    """A file as either listing has it; its size is -1 where the listing does not say it."""
    size = about.size if about.size is not None else -1
    return Item(name, size, about.lfs.sha256, None) if about.lfs else Item(name, size, None, about.blob_id)


def _number(name: str, default: float) -> float:
    text = os.environ.get(name, "")
    try:
        number = float(text) if text else float(default)
    except ValueError:
        number = -1.0
    if not 0 <= number < 1e6:
        raise Trouble(f"{name} is {text!r}", "give a number, or unset it", lasting=True)
    return number


def _leave_with_parent() -> None:
    """Ends this process when the one that started it has gone, however it went: nobody else would."""

    def wait() -> None:
        while os.read(0, 4096):
            pass
        os._exit(1)

    threading.Thread(target=wait, daemon=True).start()


def main() -> NoReturn:
    """Runs the command; exits with 0 when the model is in the cache, whole."""
    parser = argparse.ArgumentParser(
        prog="python -m emberd.hub", description="Fetches a model into the user's hub cache."
    )
    parser.add_argument("repo", metavar="ORG/NAME")
    parser.add_argument("--form", choices=("onnx", "mlx"), default="onnx", help="whose files are fetched")
    parser.add_argument(
        "--graph", action="append", default=[], help="the graph's path; the first that is there is taken"
    )
    parser.add_argument(
        "--whole", action="store_true", help="the cache has a whole model: do not wait long for the hub"
    )
    given = parser.parse_args()
    _leave_with_parent()
    # The library takes a variable that is set to nothing at its word.
    for name in [name for name, value in os.environ.items() if name.startswith(("HF_", "HUGGINGFACE_")) and not value]:
        del os.environ[name]
    # Omp's own name for the token; and away with progress bars, a second way of transfer, and requests about who asks.
    if "HF_ACCESS_TOKEN" in os.environ:
        os.environ.setdefault("HF_TOKEN", os.environ["HF_ACCESS_TOKEN"])
    os.environ.update(HF_HUB_DISABLE_PROGRESS_BARS="1", HF_HUB_DISABLE_XET="1", HF_HUB_DISABLE_TELEMETRY="1")
    # What libraries print belongs into the log.
    sys.stdout = sys.stderr = Clean(sys.stderr)
    code, where = 1, None
    try:
        fetch = Fetch(given.repo)
        where = fetch.where
        fetch.run(given.form, given.graph or ["onnx/model_q4.onnx", "model_q4.onnx", "model.onnx"], given.whole)
        code = 0
    except ImportError as error:
        traceback.print_exc()
        what = f"models of a hub need {error.name}, which cannot be imported"
        say("error", message=what, hint="pip install huggingface_hub", lasting=True)
    except Exception as error:
        traceback.print_exc()
        trouble = error if isinstance(error, Trouble) or where is None else explain(error, where, None)
        if not isinstance(trouble, Trouble):
            what = f"{given.repo} could not be fetched: {text(trouble)}"
            trouble = Trouble(
                what, "check HF_ENDPOINT and other settings of huggingface_hub; the log has the detail", lasting=True
            )
        say("error", message=public(trouble.message), hint=public(trouble.hint), lasting=trouble.lasting)
    sys.stderr.flush()
    os._exit(code)


if __name__ == "__main__":
    main()
