"""How a repository's files lie in the user's hub cache: whether one is there and sound, how it is put there, what is left behind.

The layout is `huggingface_hub`'s: the bytes in `blobs`, under the hub's tag for them, and links to them in `snapshots`. Nothing is asked for here.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import re
import shutil
import time
from collections.abc import Collection
from dataclasses import dataclass
from pathlib import Path

PARTIAL = ".emberd.incomplete"
"""What the name of a file that has come in part ends with. It lies beside the cache's blobs, where the library's own partial files lie too."""
KEPT = 7 * 24 * 3600.0
"""Seconds after which a partial file that nobody has added to is given up."""
_PIECE = 1 << 20


@dataclass(frozen=True)
class Item:
    """A file of a repository: its path, its size in bytes where the hub says it, and what the hub knows of its content."""

    name: str
    size: int
    sha256: str | None
    """Of large files."""
    blob: str | None = None
    """Of all others: git's SHA-1 of the content."""

    @property
    def checksum(self) -> str | None:
        """The checksum by which a copy is known to be sound, with its kind."""
        if self.sha256:
            return f"sha256 {self.sha256}"
        if self.blob and re.fullmatch(r"[0-9a-f]{40}", self.blob):
            return f"git blob {self.blob}"
        return None


def checksum(path: Path, kind: str) -> str:
    """The checksum of a file, of the same kind as a given one."""
    if kind.startswith("sha256 "):
        name, digest = "sha256", hashlib.sha256()
    else:
        name, digest = "git blob", hashlib.sha1(b"blob %d\0" % path.stat().st_size, usedforsecurity=False)
    with path.open("rb") as file:
        while piece := file.read(_PIECE):
            digest.update(piece)
    return f"{name} {digest.hexdigest()}"


def has(path: Path, item: Item) -> bool:
    """Whether the file is there with its size."""
    try:
        return path.stat().st_size == item.size
    except OSError:
        return False


def sound(path: Path, item: Item) -> bool:
    """Whether the file is there with its size and its content. One that has another content is removed: as it is, it would pass for whole."""
    if not has(path, item):
        return False
    if item.checksum is None or checksum(path, item.checksum) == item.checksum:
        return True
    blob = path.resolve()
    for each in (blob, path) if blob.parent.name == "blobs" else (path,):
        with contextlib.suppress(OSError):  # Open elsewhere, on Windows: it is replaced once it has come.
            each.unlink(missing_ok=True)
    return False


def settle(path: Path) -> None:
    """Sees a file's bytes onto the disk: under its own name it must not be found with others after a power cut."""
    with path.open("rb+") as file:
        os.fsync(file.fileno())


def link(blob: Path, pointer: Path) -> None:
    """Makes a snapshot's file: a relative link as the library makes it, or a copy where there are no links."""
    pointer.parent.mkdir(parents=True, exist_ok=True)
    fresh = pointer.with_name(f"{pointer.name}.{os.getpid()}{PARTIAL}")
    try:
        fresh.symlink_to(os.path.relpath(blob, pointer.parent))
    except OSError:
        shutil.copyfile(blob, fresh)
        settle(fresh)
    fresh.replace(pointer)


def write(path: Path, text: str) -> None:
    """Writes a small file in one step."""
    path.parent.mkdir(parents=True, exist_ok=True)
    fresh = path.with_name(f"{path.name}.{os.getpid()}{PARTIAL}")
    fresh.write_text(text)
    fresh.replace(path)


def sweep(store: Path, tags: Collection[str]) -> None:
    """Removes partial files of no use: of files that the repository has no more, of killed processes, and those long forgotten.

    What has come of a file with one of these `tags` stays: it may be of weights in another form, whose fetch will go on.
    """
    for partial in store.rglob(f"*{PARTIAL}"):
        with contextlib.suppress(OSError):
            current = partial.parent.name == "blobs" and partial.name.removesuffix(PARTIAL) in tags
            if not current or time.time() - partial.lstat().st_mtime > KEPT:
                partial.unlink(missing_ok=True)


def plain(text: str) -> str:
    """A commit or tag as it may be in a path, whatever a hub sends."""
    return text if re.fullmatch(r"[A-Za-z0-9_-]{1,128}", text) else hashlib.sha256(text.encode()).hexdigest()
