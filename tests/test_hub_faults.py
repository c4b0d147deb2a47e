"""What can go wrong with a hub: transfers that break, answers that are errors, files that are not what they should be, and silence.

The hub is one on loopback, with a small repository that no engine opens.
"""

from __future__ import annotations

import os
import signal
from typing import TYPE_CHECKING

import pytest

from support.hub import (
    REPO,
    WEIGHTS,
    Fault,
    File,
    Hub,
    asks,
    hold,
    loopback_hub,
    pulled,
    pulls,
    refused,
    small_model,
    whole,
)
from support.process import DEADLINE, emberd, eventually, run
from support.worker import chat

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

pytestmark = [pytest.mark.timeout(600)]

PULL = ("models", "pull", REPO)
SHORT = "5"
"""Seconds after which a hub has timed out. It holds for the answers that come as well, on a machine that is busy."""


@pytest.fixture
def hub() -> Iterator[Hub]:
    """A hub with the small repository."""
    with loopback_hub(small_model()) as hub:
        yield hub


# Interrupted, and gone on with.


def goes_on(hub: Hub, home: Path) -> None:
    """Pulls the rest, and checks that it is no more than the rest."""
    before = sum(each.sent for each in hub.gets(WEIGHTS))
    [partial] = (hub.store(home) / "blobs").glob("*.incomplete")
    have = partial.stat().st_size
    assert 0 < have <= before
    hub.faults.clear()
    hub.asked.clear()
    pulled(hub, home)
    [rest] = hub.gets(WEIGHTS)
    assert (rest.range, rest.sent) == (f"bytes={have}-", len(hub.files[WEIGHTS].content) - have)
    assert hub.fetched() == {WEIGHTS}


def test_a_download_cut_in_half_is_not_kept_as_one_and_gone_on_with(hub: Hub, home: Path) -> None:
    half = len(hub.files[WEIGHTS].content) // 2
    hub.faults[WEIGHTS] = Fault(cut=half)
    refused(
        pulls(hub, home),
        f"{WEIGHTS} of {REPO} could not be fetched",
        "the connection to",
        "broke off",
        "what has come is kept",
    )
    assert not (hub.snapshot(home) / WEIGHTS).exists()
    goes_on(hub, home)


def test_a_connection_that_breaks_again_and_again_is_gone_on_with_at_once(hub: Hub, home: Path) -> None:
    size = len(hub.files[WEIGHTS].content)
    hub.faults[WEIGHTS] = Fault(cut=size // 2, times=1)
    pulled(hub, home, EMBERD_HUB_RETRIES="1")
    _, second = hub.gets(WEIGHTS)
    assert second.range is not None
    assert int(second.range.removeprefix("bytes=").removesuffix("-")) + second.sent == size
    assert second.sent < size


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGINT])
def test_a_pull_that_was_ended_leaves_no_process_behind_and_is_gone_on_with(number: int, hub: Hub, home: Path) -> None:
    hold(hub)
    with emberd(*PULL, home=home, **hub.env(home)) as process:
        assert hub.held.wait(DEADLINE)
        [partial] = eventually(lambda: [*(hub.store(home) / "blobs").glob("*.incomplete")], "some of it has come")
        eventually(lambda: partial.stat().st_size, "some of it is on the disk")
        process.signal(number)
        assert process.wait() == (130 if number == signal.SIGINT else -number)
        assert hub.left.wait(DEADLINE), "the process that fetches has gone as well"
    assert not (hub.snapshot(home) / WEIGHTS).exists()
    goes_on(hub, home)


def test_a_worker_that_is_ended_in_a_download_ends_the_download(hub: Hub, place: Path, home: Path) -> None:
    hold(hub)
    with asks(place, home, hub) as one, one.connect() as client:
        client.send({"type": "load", "id": 1})
        assert hub.held.wait(DEADLINE)
        one.process.signal(signal.SIGTERM)
        assert one.process.wait() == 143
        assert hub.left.wait(DEADLINE)
    assert not place.exists()


def test_what_was_left_of_other_files_goes_with_the_next_fetch(hub: Hub, home: Path) -> None:
    hub.faults[WEIGHTS] = Fault(cut=1_000_000)
    assert pulls(hub, home).returncode == 1
    hub.faults.clear()
    hub.files[WEIGHTS] = File(hub.files[WEIGHTS].content[::-1])
    pulled(hub, home)


def test_what_has_come_of_weights_in_another_form_stays_for_a_week(hub: Hub, home: Path) -> None:
    other = "onnx/model_fp16.onnx_data"
    hub.files[other] = File(os.urandom(1_000_000))
    hub.faults[other] = Fault(cut=500_000)

    def left() -> list[Path]:
        return [*hub.store(home).rglob("*.incomplete")]

    assert pulls(hub, home, PI_TINY_DTYPE="fp16").returncode == 1
    [partial] = left()
    have = partial.stat().st_size
    assert pulls(hub, home).returncode == 0
    assert left() == [partial]
    hub.faults.clear()
    hub.asked.clear()
    assert pulls(hub, home, PI_TINY_DTYPE="fp16").returncode == 0
    assert [each.range for each in hub.gets(other)] == [f"bytes={have}-"]
    assert left() == []
    # One that nobody has gone on with for long is given up.
    partial.write_bytes(b"a part")
    os.utime(partial, (0, 0))
    assert run("models", "rm", REPO, home=home).returncode == 0
    pulls(hub, home)
    assert left() == []


def test_a_hub_without_ranges_starts_over(hub: Hub, home: Path) -> None:
    size = len(hub.files[WEIGHTS].content)
    hub.faults[WEIGHTS] = Fault(cut=size // 2)
    assert pulls(hub, home).returncode == 1
    hub.faults[WEIGHTS] = Fault(no_ranges=True)
    hub.asked.clear()
    pulled(hub, home)
    assert [each.sent for each in hub.gets(WEIGHTS)] == [size]


def test_a_range_that_is_refused_starts_over(hub: Hub, home: Path) -> None:
    size = len(hub.files[WEIGHTS].content)
    hub.faults[WEIGHTS] = Fault(cut=size // 2)
    assert pulls(hub, home).returncode == 1
    hub.faults[WEIGHTS] = Fault(status=416, times=1)
    hub.asked.clear()
    pulled(hub, home, EMBERD_HUB_RETRIES="1")
    refusal, whole_file = hub.gets(WEIGHTS)
    assert refusal.range is not None
    assert (whole_file.range, whole_file.sent) == (None, size)


# What a hub can do wrong.


def at(file: str) -> str:
    return f"{file} of {REPO}" if file else REPO


@pytest.mark.parametrize("file", ["", "config.json", WEIGHTS], ids=["the list", "a small file", "a large file"])
@pytest.mark.parametrize(
    ("status", "headers", "said", "hint"),
    [
        (401, {}, "it does not accept the token (HTTP 401)", "HF_TOKEN"),
        (403, {}, "it is forbidden (HTTP 403)", "accept its terms at"),
        (403, {"x-error-code": "GatedRepo"}, "is only for those who have accepted its terms", "HF_TOKEN"),
        (404, {}, "there is no such thing (HTTP 404)", "check the name"),
        (416, {}, "HTTP 416", "load the model again"),
        (429, {"retry-after": "3600"}, "too many requests (HTTP 429)", "in 3600 s"),
        (500, {}, "the hub failed (HTTP 500)", "later"),
    ],
    ids=["401", "403", "gated", "404", "416", "429", "500"],
)
def test_an_answer_that_is_an_error_is_said(
    status: int, headers: dict[str, str], said: str, hint: str, file: str, hub: Hub, home: Path
) -> None:
    hub.faults[file] = Fault(status=status, headers=headers)
    what = REPO if "GatedRepo" in headers.values() else at(file)
    refused(pulls(hub, home), what, said, hint)
    assert not file or not (hub.snapshot(home) / file).exists()
    hub.faults.clear()
    pulled(hub, home)


def test_a_name_that_a_hub_does_not_know_is_said_without_a_token_as_well(hub: Hub, home: Path) -> None:
    done = run("models", "pull", "org/name", home=home, **hub.env(home))
    refused(done, "org/name could not be fetched from http://127.0.0.1:", "(HTTP 404)")
    hub.faults[""] = Fault(status=401)
    refused(pulls(hub, home, HF_TOKEN=""), "it is private or does not exist (HTTP 401)", "HF_TOKEN")


@pytest.mark.parametrize("file", ["", "config.json", WEIGHTS], ids=["the list", "a small file", "a large file"])
def test_a_hub_that_says_nothing_is_not_waited_for_for_ever(file: str, hub: Hub, home: Path) -> None:
    hub.faults[file] = Fault(hold=0)
    refused(pulls(hub, home, EMBERD_HUB_TIMEOUT=SHORT), at(file), f"sent nothing for {SHORT} s", "check the network")


def test_a_transfer_that_stops_is_not_waited_for_for_ever_and_gone_on_with(hub: Hub, home: Path) -> None:
    hold(hub)
    refused(pulls(hub, home, EMBERD_HUB_TIMEOUT=SHORT), WEIGHTS, f"sent nothing for {SHORT} s")
    goes_on(hub, home)


@pytest.mark.parametrize("status", [408, 429, 500, 502, 503])
def test_trouble_that_passes_is_waited_out(status: int, hub: Hub, home: Path) -> None:
    for file in ("", WEIGHTS):
        hub.faults[file] = Fault(status=status, headers={"retry-after": "0"}, times=1)
    pulled(hub, home, EMBERD_HUB_RETRIES="1")
    assert len(hub.gets(WEIGHTS)) == 2


@pytest.mark.parametrize("length", [-1, 1])
@pytest.mark.parametrize("file", ["tokenizer.json", WEIGHTS])
def test_a_file_of_another_length_is_not_kept(length: int, file: str, hub: Hub, home: Path) -> None:
    content = hub.files[file].content
    hub.faults[file] = Fault(content=content[:-1] if length < 0 else content + b"x")
    refused(pulls(hub, home), f"{at(file)} has {len(content) + length} bytes instead of {len(content)}", "not kept")
    nothing_of(file, hub, home)


def test_a_large_file_with_another_content_is_not_kept(hub: Hub, home: Path) -> None:
    content = bytearray(hub.files[WEIGHTS].content)
    content[len(content) // 2] ^= 1
    hub.faults[WEIGHTS] = Fault(content=bytes(content))
    refused(pulls(hub, home), f"{at(WEIGHTS)} has the sha256 ", f" instead of {hub.files[WEIGHTS].sha256}", "not kept")
    nothing_of(WEIGHTS, hub, home)


def nothing_of(file: str, hub: Hub, home: Path) -> None:
    """Checks that neither the file nor part of it is there, and that the next pull fetches it."""
    assert not (hub.snapshot(home) / file).exists()
    assert not [path for path in (hub.store(home) / "blobs").iterdir() if path.name.startswith(hub.files[file].tag)]
    hub.faults.clear()
    pulled(hub, home)


def test_a_hub_that_cannot_be_reached_is_said(home: Path) -> None:
    with loopback_hub({}) as hub:
        pass
    refused(pulls(hub, home), f"{REPO} could not be fetched: the hub at {hub.address} cannot be reached", "HF_ENDPOINT")


def test_a_repository_without_such_weights_is_said_with_those_it_has(home: Path) -> None:
    files = small_model()
    with loopback_hub({name: files[name] for name in files if "q4" not in name}) as hub:
        refused(pulls(hub, home), f"{REPO} has no onnx/model_q4.onnx", "it has onnx/model_fp16.onnx; PI_TINY_DTYPE")
        done = pulls(hub, home, PI_TINY_DTYPE="fp16")
        assert done.returncode == 0, done.stderr
        assert "onnx/model_fp16.onnx" in hub.fetched()


def test_a_python_without_the_library_is_said(hub: Hub, home: Path, tmp_path: Path) -> None:
    (tmp_path / "huggingface_hub.py").write_text("raise ImportError('not installed', name='huggingface_hub')\n")
    path = os.pathsep.join(filter(None, [str(tmp_path), os.environ.get("PYTHONPATH")]))
    refused(pulls(hub, home, PYTHONPATH=path), "models of a hub need huggingface_hub", "pip install huggingface_hub")
    refused(pulls(hub, home, EMBERD_PYTHON=str(tmp_path / "no")), f"could not run {tmp_path / 'no'}", "EMBERD_PYTHON")


def test_a_cache_that_cannot_be_is_said(hub: Hub, home: Path, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("a file")
    cache = str(tmp_path / "file" / "hub")
    refused(pulls(hub, home, HF_HUB_CACHE=cache), f"{REPO} could not be kept: ", f"check {cache}, or set HF_HOME")


@pytest.mark.parametrize("name", ["EMBERD_HUB_TIMEOUT", "EMBERD_HUB_RETRIES"])
def test_a_setting_that_is_no_number_is_said(name: str, hub: Hub, home: Path) -> None:
    refused(pulls(hub, home, **{name: "soon"}), f"{name} is 'soon'", "give a number")


@pytest.mark.parametrize(("status", "lasting"), [(404, True), (500, False)])
def test_the_worker_says_why_on_one_line_and_tries_again(
    status: int, lasting: bool, hub: Hub, place: Path, home: Path
) -> None:
    hub.faults[""] = Fault(status=status)
    with asks(place, home, hub) as one:
        for request in ({"type": "load", "id": 1}, chat(2)):
            with one.connect() as client:
                client.send(request)
                if request["type"] == "chat" and not lasting:
                    # An error would be taken as the model's own, and the model never be asked again.
                    assert client.rest() == []
                    continue
                reply = client.read()
                assert (reply["type"], reply["id"]) == ("error", request["id"])
                assert reply["error"].startswith(f"{REPO} could not be fetched from {hub.address}: ")
                assert f"(HTTP {status}) (hint: " in reply["error"]
                assert "\n" not in reply["error"]
        hub.faults.clear()
        with one.connect() as client:
            assert "cannot be loaded" in client.ask({"type": "load", "id": 3})["error"]
        whole(hub, home)
