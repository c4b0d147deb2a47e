"""What clients and logs hear of a hub: which trouble is final, how often a slow hub is told of, and never a password.

The hub is one on loopback, with a small repository that no engine opens.
"""

from __future__ import annotations

import errno
import os
import shlex
import ssl
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING

import httpx2
import pytest

from emberd.hub_errors import Where, explain, public
from support.hub import REPO, TOKEN, WEIGHTS, Fault, Hub, asks, loopback_hub, pulled, pulls, refused, small_model
from support.worker import chat

if TYPE_CHECKING:
    from collections.abc import Iterator

pytestmark = [pytest.mark.timeout(600)]


@pytest.fixture
def hub() -> Iterator[Hub]:
    """A hub with the small repository."""
    with loopback_hub(small_model()) as hub:
        yield hub


def nothing(hub: Hub, tmp_path: Path) -> dict[str, str]:
    """No Python where one should be."""
    return {"EMBERD_PYTHON": str(tmp_path / "no")}


def bare(hub: Hub, tmp_path: Path) -> dict[str, str]:
    """A Python that has no packages."""
    script = tmp_path / "python"
    script.write_text(f'#!/bin/sh\nexec {shlex.quote(sys.executable)} -S -E "$@"\n')
    script.chmod(0o755)
    return {"EMBERD_PYTHON": str(script)}


def without(hub: Hub, tmp_path: Path) -> dict[str, str]:
    """A Python that has no `huggingface_hub`."""
    (tmp_path / "huggingface_hub.py").write_text("raise ImportError('not installed', name='huggingface_hub')\n")
    return {"PYTHONPATH": os.pathsep.join(filter(None, [str(tmp_path), os.environ.get("PYTHONPATH")]))}


def cache(hub: Hub, tmp_path: Path) -> dict[str, str]:
    """A cache that cannot be."""
    (tmp_path / "file").write_text("a file")
    return {"HF_HUB_CACHE": str(tmp_path / "file" / "hub")}


def scheme(hub: Hub, tmp_path: Path) -> dict[str, str]:
    """A hub that is not one of HTTP."""
    return {"HF_ENDPOINT": f"ftp://127.0.0.1:{hub.port}"}


def full(hub: Hub, tmp_path: Path) -> dict[str, str]:
    """Weights for which no disk has room."""
    hub.files[WEIGHTS].listed = 1 << 60
    return {}


def gone(hub: Hub, tmp_path: Path) -> dict[str, str]:
    """A hub that is not there: its port is one that was just given back."""
    with loopback_hub({}) as other:
        return {"HF_ENDPOINT": other.address}


def cut(hub: Hub, tmp_path: Path) -> dict[str, str]:
    """A transfer that breaks."""
    hub.faults[WEIGHTS] = Fault(cut=1_000_000)
    return {}


def killed(hub: Hub, tmp_path: Path) -> dict[str, str]:
    """A process that is killed, as one is where memory runs out."""
    script = tmp_path / "python"
    script.write_text("#!/bin/sh\nkill -9 $$\n")
    script.chmod(0o755)
    return {"EMBERD_PYTHON": str(script)}


@pytest.mark.parametrize(
    ("trouble", "said"),
    [
        (nothing, "could not run"),
        (bare, "No module named"),
        (without, "need huggingface_hub"),
        (cache, "could not be kept"),
        (scheme, "cannot be reached"),
        (full, "has room for"),
        (gone, None),
        (cut, None),
        (killed, None),
    ],
    ids=lambda each: getattr(each, "__name__", ""),
)
def test_a_chat_hears_of_trouble_that_lasts_and_is_hung_up_on_for_other(
    trouble: object, said: str | None, hub: Hub, place: Path, home: Path, tmp_path: Path
) -> None:
    assert callable(trouble)
    with asks(place, home, hub, **trouble(hub, tmp_path)) as one, one.connect() as client:
        client.send(chat(1))
        client.finish()
        replies = [reply for reply in client.rest() if reply["type"] != "progress"]
    if said is None:
        assert replies == []
    else:
        [reply] = replies
        assert (reply["type"], reply["id"]) == ("error", 1)
        assert said in reply["error"]
        assert " (hint: " in reply["error"]


def test_a_setting_that_is_wrong_lasts_and_a_network_that_fails_does_not() -> None:
    where = Where(REPO, "http://hub", Path("/cache"), False, 10.0)
    certificate = ssl.SSLCertVerificationError(1, "[SSL: CERTIFICATE_VERIFY_FAILED] certificate verify failed")
    lasting = [
        httpx2.UnsupportedProtocol("Request URL has an unsupported protocol 'ftp://'."),
        httpx2.InvalidURL("Invalid port: 'x'"),
        httpx2.LocalProtocolError("Illegal header value b'Bearer x\\n'"),
        httpx2.TooManyRedirects("Exceeded maximum allowed redirects."),
        httpx2.ProxyError("407 Proxy Authentication Required"),
        httpx2.ProxyError("Invalid username/password"),
        httpx2.ConnectError(str(certificate)),
        PermissionError(errno.EACCES, "Permission denied", "/cache/x"),
        OSError(errno.ENOSPC, "No space left on device"),
        ValueError("Unknown scheme for proxy URL"),
    ]
    passing = [
        httpx2.ConnectError("[Errno 111] Connection refused"),
        httpx2.ConnectError("[Errno -2] Name or service not known"),
        httpx2.ConnectTimeout("timed out"),
        httpx2.ReadTimeout("timed out"),
        httpx2.ReadError("[Errno 104] Connection reset by peer"),
        httpx2.RemoteProtocolError("peer closed connection without sending complete message body"),
        httpx2.DecodingError("incorrect header check"),
        httpx2.ProxyError("502 Bad Gateway"),
        ConnectionResetError(errno.ECONNRESET, "Connection reset by peer"),
    ]
    for error in lasting:
        trouble = explain(error, where, None)
        assert (trouble.lasting, trouble.passing) == (True, False), repr(error)
    for error in passing:
        trouble = explain(error, where, None)
        assert (trouble.lasting, trouble.passing) == (False, True), repr(error)
    # Nothing to try again at once, and nothing that a person has to mend.
    busy = explain(OSError(errno.EMFILE, "Too many open files"), where, None)
    assert (busy.lasting, busy.passing) == (False, False)


# What is said.


def test_a_password_in_the_hubs_address_is_said_to_nobody(hub: Hub, place: Path, home: Path) -> None:
    address = hub.address.replace("http://", "http://person:s3cr3t@")
    for fault in (Fault(status=500), Fault(status=404), Fault(status=403)):
        for file in ("", WEIGHTS):
            hub.faults = {file: fault}
            done = pulls(hub, home, HF_ENDPOINT=address)
            refused(done, f"(HTTP {fault.status})", hub.address)
            assert "s3cr3t" not in done.stderr
    hub.faults.clear()
    for wrong in (
        address.replace("http:", "ftp:"),
        f"{address}x",
        address.replace("s3cr3t", "s3cr3t/#"),
    ):
        done = pulls(hub, home, HF_ENDPOINT=wrong, EMBERD_LOG="debug")
        assert (done.returncode, REPO in done.stderr) == (1, True)
        assert "s3cr3t" not in done.stderr
    hub.faults[WEIGHTS] = Fault(cut=1_000_000)
    with asks(place, home, hub, HF_ENDPOINT=address) as one, one.connect() as client:
        reply = client.ask({"type": "load", "id": 1})
        assert f"the connection to {hub.address} broke off" in reply["error"]
        assert "s3cr3t" not in one.process.said()


def test_what_is_secret_is_not_public(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_TOKEN", "hf_secret\n")
    monkeypatch.setenv("HTTPS_PROXY", "http://person:pass/word@proxy")
    assert public("for url 'https://a:b@c/d@e', b'Bearer hf_secret\\n'") == "for url 'https://c/d@e', b'Bearer ***\\n'"
    assert public("Invalid port: 'pass/word'") == "Invalid port: '***'"
    assert public("mail to person@host") == "mail to person@host"


def test_the_token_may_be_in_omps_own_variable(hub: Hub, home: Path) -> None:
    pulled(hub, home, HF_TOKEN="", HF_ACCESS_TOKEN="hf_of_omp")
    assert {each.token for each in hub.asked if not each.large} == {"Bearer hf_of_omp"}
    for record in (home / "hub").iterdir():
        record.unlink()
    hub.asked.clear()
    pulled(hub, home, HF_ACCESS_TOKEN="hf_of_omp")
    assert {each.token for each in hub.asked} == {f"Bearer {TOKEN}"}


def test_a_request_that_is_made_again_is_said_in_the_log(hub: Hub, home: Path) -> None:
    hub.faults[WEIGHTS] = Fault(status=503, headers={"retry-after": "0"}, times=1)
    done = pulls(hub, home, EMBERD_HUB_RETRIES="1")
    assert done.returncode == 0
    [line] = [line for line in done.stderr.splitlines() if "again in 0" in line]
    assert "WARN" in line
    assert f"{WEIGHTS} of {REPO} could not be fetched from {hub.address}: the hub failed (HTTP 503)" in line


def test_a_slow_hub_is_told_of_ten_times_a_second_and_at_its_end(hub: Hub, place: Path, home: Path) -> None:
    # Some 45 pieces, as many reports of the process that fetches, and less than half as many due.
    hub.faults[WEIGHTS] = Fault(pace=0.05)
    with asks(place, home, hub) as one, one.connect() as client:
        client.send({"type": "load", "id": 1})
        events, ends = [], {}
        while (reply := client.read())["type"] == "progress":
            event = reply["event"]
            events.append(event)
            if event["status"] == "done":
                ends[event["file"]] = time.monotonic()
        assert reply["type"] == "error"
    of_weights = [event for event in events if event.get("file") == WEIGHTS]
    first, last = events.index(of_weights[0]), events.index(of_weights[-1])
    progress = [event for event in of_weights if event["status"] == "progress"]
    totals = [event for event in events[first : last + 1] if event["status"] == "progress_total"]
    # From the request to the end as it was read: no less than the time in which they were made. One report comes
    # before the request, one with its first bytes, and one at the end whenever that is.
    elapsed = ends[WEIGHTS] - hub.gets(WEIGHTS)[0].time
    assert 2 <= len(progress) == len(totals) <= 10 * elapsed + 3
    for file in hub.fetched():
        said = [event for event in events if event.get("file") == file and event["status"] == "progress"]
        assert said[-1]["loaded"] == said[-1]["total"] == len(hub.files[file].content)
    assert totals[-1]["loaded"] == totals[-1]["total"]
