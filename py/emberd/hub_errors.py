"""What the failures of a hub, a network and a disk mean to a person: what happened, to which file, what to do, and whether it may pass.

Nothing is fetched here. `huggingface_hub` is imported when there is something to explain, since only the process that fetches has it.
"""

from __future__ import annotations

import errno
import os
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TextIO

LOGIN = "set HF_TOKEN, or log in with hf auth login"
AGAIN = "load the model again: what has come is kept"
_EXHAUSTED = (errno.EMFILE, errno.ENFILE, errno.ENOMEM, errno.EAGAIN)
"""What a busy machine lacks for a while."""


class Trouble(Exception):
    """Why there is no model: what happened, and what to do.

    `passing` trouble may be over with the next attempt, after `wait` seconds; `lasting` trouble stays until a person does something about it.
    """

    def __init__(
        self, message: str, hint: str, passing: bool = False, wait: float | None = None, lasting: bool = False
    ) -> None:
        super().__init__(message)
        self.message, self.hint, self.passing, self.wait, self.lasting = message, hint, passing, wait, lasting


@dataclass
class Where:
    """What is fetched, from where, and to where."""

    repo: str
    hub: str
    """The hub's address, without a password."""
    cache: Path
    """The user's hub cache."""
    known: bool
    """Whether the user has a token."""
    limit: float
    """Seconds that the hub may be silent."""

    def of(self, name: str | None) -> str:
        """A file of the repository, or the repository."""
        return f"{name} of {self.repo}" if name else self.repo


def public(said: str) -> str:
    """The same without passwords in addresses (`http://user:password@host`) and without the user's token."""
    said = re.sub(r"(?<=://)[^/\s?#\"']*@", "", said)
    for secret in _secrets():
        said = said.replace(secret, "***")
    return said


def _secrets() -> Iterator[str]:
    for name in ("HF_TOKEN", "HF_ACCESS_TOKEN"):
        token = os.environ.get(name, "").strip()
        if len(token) >= 4:
            yield token
    for name, value in os.environ.items():
        # However wrong such an address is: nothing of what stands before its last @ may be said.
        if name == "HF_ENDPOINT" or name.lower().endswith("_proxy"):
            password = value.partition("://")[2].rpartition("@")[0].partition(":")[2]
            yield from (word for word in (password, *re.split(r"[:/?#]", password)) if len(word) >= 4)


class Clean:
    """A stream that says only what is `public`. For the log, which carries other libraries' words."""

    def __init__(self, stream: TextIO) -> None:
        self._stream = stream

    def write(self, said: str) -> int:
        """Writes it, cleaned."""
        return self._stream.write(public(said))

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)


def text(error: BaseException) -> str:
    """An exception's own words, on one line."""
    return " ".join(str(error).split()) or type(error).__name__


def broken(where: Where, name: str | None, how: str) -> Trouble:
    """A connection that ended before it should have."""
    what = f"{where.of(name)} could not be fetched: the connection to {where.hub} broke off{how}"
    return Trouble(what, AGAIN, passing=True)


def explain(error: Exception, where: Where, name: str | None) -> Trouble:
    """What an exception means, met while this file, or the list of files, was fetched."""
    import httpx2 as http
    from huggingface_hub.errors import GatedRepoError, HfHubHTTPError

    if isinstance(error, Trouble):
        return error
    what = f"{where.of(name)} could not be fetched"
    terms = f"accept its terms at {where.hub}/{where.repo}, then {LOGIN}"
    if isinstance(error, GatedRepoError):
        return Trouble(f"{where.repo} is only for those who have accepted its terms", terms, lasting=True)
    if isinstance(error, HfHubHTTPError):
        after = error.response.headers.get("retry-after") or ""
        wait = float(after) if re.fullmatch(r"\d{1,9}", after) else None
        message, hint, passing = _status(error.response.status_code, where, terms, wait)
        # Of a range that is refused nothing is kept: the next attempt begins at the beginning.
        lasting = error.response.status_code < 500 and error.response.status_code not in (408, 416, 429)
        return Trouble(f"{what} from {where.hub}: {message}", hint, passing, wait, lasting)
    network = "check the network, proxies and HF_ENDPOINT, then load the model again"
    unreachable = f"{what}: the hub at {where.hub} cannot be reached: {text(error)}"
    if isinstance(error, http.ConnectError | http.ConnectTimeout):
        refused = "CERTIFICATE_VERIFY_FAILED" in str(error)  # It is refused the next time as well.
        return Trouble(unreachable, network, passing=not refused, lasting=refused)
    if isinstance(error, http.ProxyError):
        # A proxy that refuses, or wants a password; others say that the hub is not to be had just now.
        refused = re.match(r"4\d\d\b|Invalid|Requested", str(error)) is not None
        return Trouble(unreachable, network, passing=not refused, lasting=refused)
    if isinstance(error, http.UnsupportedProtocol | http.InvalidURL | http.LocalProtocolError | http.TooManyRedirects):
        return Trouble(unreachable, network, lasting=True)
    if isinstance(error, http.TimeoutException):
        return Trouble(f"{what}: the hub at {where.hub} sent nothing for {where.limit:g} s", network, passing=True)
    if isinstance(error, http.RequestError | ConnectionError | TimeoutError):
        return broken(where, name, f": {text(error)}")
    if isinstance(error, OSError):
        kept = f"{where.of(name)} could not be kept: {text(error)}"
        lasting = error.errno not in _EXHAUSTED
        return Trouble(kept, f"check {where.cache}, or set HF_HOME to another folder", lasting=lasting)
    return Trouble(
        f"{what}: {type(error).__name__}: {text(error)}", "set HF_ENDPOINT to a Hugging Face hub", lasting=True
    )


def _status(status: int, where: Where, terms: str, wait: float | None) -> tuple[str, str, bool]:
    """What happened, what to do, and whether it may pass."""
    if status == 401 and where.known:
        hint = "check HF_TOKEN, or log in again with hf auth login"
        return "it does not accept the token (HTTP 401)", hint, False
    if status == 401:
        return "it is private or does not exist (HTTP 401)", f"check the name; if it is private, {LOGIN}", False
    if status == 403:
        return "it is forbidden (HTTP 403)", terms, False
    if status == 404:
        return "there is no such thing (HTTP 404)", "check the name, and HF_ENDPOINT", False
    if status == 429:
        again = "later" if wait is None else f"in {wait:g} s"
        return "too many requests (HTTP 429)", f"load the model again {again}; HF_TOKEN raises the limit", True
    if status == 408 or status >= 500:
        return f"the hub failed (HTTP {status})", "load the model again later; what has come is kept", True
    return f"HTTP {status}", "load the model again; check HF_ENDPOINT if it stays", False
