"""Models of a Hugging Face hub: fetched once, checked, resumed, used without the hub, and every way in which a hub can fail.

The hub is one on loopback. Where the engine has to answer, it serves the real model under the name that the table of models has for a key; elsewhere
a small repository that no engine opens.
"""

from __future__ import annotations

import os
import re
import signal
from pathlib import Path
from typing import TYPE_CHECKING, Any

import onnx
import pytest
from onnx import TensorProto, helper

from support.hub import KEY, NEEDED, REPO, TOKEN, WEIGHTS, Fault, Hub, loopback_hub, small_model
from support.process import DEADLINE, emberd, eventually, run
from support.worker import TAG, Client, chat, worker

if TYPE_CHECKING:
    import subprocess
    from collections.abc import Iterator

pytestmark = [pytest.mark.timeout(600)]

PULL = ("models", "pull", REPO)
QUESTION = "What is the capital of France?"
GOLDEN = "The capital of France is Paris."


@pytest.fixture
def hub() -> Iterator[Hub]:
    """A hub with the small repository."""
    with loopback_hub(small_model()) as hub:
        yield hub


@pytest.fixture(scope="module")
def real(model_home: Path) -> dict[str, bytes]:
    """The real model, as a repository for transformers.js lays it out."""
    folder = model_home / "models" / "smollm2-135m"
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


def asks(path: Path, home: Path, hub: Hub, **env: str) -> Any:
    """A worker for the key of the repository, with the engine for real."""
    return worker(path, "--model-key", KEY, engine="auto", home=home, **hub.env(home, **env))


def load(client: Client) -> list[dict[str, Any]]:
    """The events of a load, which must succeed."""
    client.send({"type": "load", "id": "l"})
    events = []
    while (reply := client.read())["type"] == "progress":
        assert reply["id"] == "l"
        events.append(reply["event"])
    assert reply == {"type": "loaded", "id": "l"}, reply
    return events


def pulls(hub: Hub, home: Path, **env: str) -> subprocess.CompletedProcess[str]:
    return run(*PULL, home=home, **hub.env(home, **env))


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


# The real model, through the worker's socket.


@pytest.mark.model
def test_a_key_is_fetched_told_of_and_answered_and_the_next_worker_needs_no_hub(
    real: dict[str, bytes], place: Path, home: Path
) -> None:
    with loopback_hub(real) as hub:
        with asks(place, home, hub) as one, one.connect() as client:
            events = load(client)
            assert client.ask(chat(1, QUESTION, 32))["text"] == GOLDEN
            assert load(client) == events[-1:]
        needed = real.keys() - {"README.md", "onnx/model_fp16.onnx"}
        assert hub.fetched() == needed
        told(events, {name: len(real[name]) for name in needed})
        # The token is for the hub, and not for wherever it keeps its large files.
        assert {each.token for each in hub.asked if not each.large} == {f"Bearer {TOKEN}"}
        assert {each.token for each in hub.asked if each.large} == {None}
    with asks(place, home, hub) as one, one.connect() as client:
        assert [event["status"] for event in load(client)] == ["ready"]
        assert client.ask(chat(2, QUESTION, 32))["text"] == GOLDEN


def told(events: list[dict[str, Any]], sizes: dict[str, int]) -> None:
    """Checks the events of a load that fetched all of these files."""
    assert {event["modelKey"] for event in events} == {KEY}
    assert events[-1] == {"modelKey": KEY, "status": "ready", "task": "text-generation", "model": REPO}
    assert {event["name"] for event in events[:-1]} == {REPO}
    last: dict[str, Any] = {}
    for name, size in sizes.items():
        own = [event for event in events if event.get("file") == name]
        statuses = [event["status"] for event in own]
        assert statuses == ["initiate", "download", *["progress"] * (len(own) - 3), "done"], statuses
        loaded = [event["loaded"] for event in own[2:-1]]
        assert loaded == sorted(loaded)
        assert own[-2] == {"modelKey": KEY, "status": "progress", "name": REPO, "file": name, "progress": 100.0} | {
            "loaded": size,
            "total": size,
        }
    totals = [event for event in events if event["status"] == "progress_total"]
    assert len(totals) == sum(event["status"] == "progress" for event in events)
    for last in totals:
        assert "file" not in last
        assert last["total"] == sum(sizes.values())
        assert last["loaded"] == sum(each["loaded"] for each in last["files"].values())
        assert last["progress"] == pytest.approx(100 * last["loaded"] / last["total"])
        assert {name: each["total"] for name, each in last["files"].items()} == sizes
    assert last["loaded"] == last["total"]


@pytest.mark.model
def test_a_folder_of_omps_is_used_and_no_hub_is_asked(real: dict[str, bytes], place: Path, home: Path) -> None:
    folder = home / ".omp" / "agent" / "cache" / "tiny-models" / REPO
    for name, content in real.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_bytes(content)
    with loopback_hub(small_model()) as hub:
        with asks(place, home, hub) as one, one.connect() as client:
            assert [event["status"] for event in load(client)] == ["ready"]
            assert client.ask(chat(1, QUESTION, 32))["text"] == GOLDEN
        assert hub.asked == []
        # One byte short, it is no model any more: the hub has another.
        with (folder / WEIGHTS).open("r+b") as file:
            file.truncate(len(real[WEIGHTS]) - 1)
        pulled(hub, home)


@pytest.mark.model
def test_a_graph_of_another_layout_is_refused_by_its_inputs(place: Path, home: Path) -> None:
    files = small_model()
    ids = helper.make_tensor_value_info("input_ids", TensorProto.INT64, [1, "n"])
    cache = helper.make_tensor_value_info("past_conv.0", TensorProto.FLOAT, [1, 4, 3])
    out = helper.make_tensor_value_info("logits", TensorProto.INT64, [1, "n"])
    nodes = [helper.make_node("Identity", ["input_ids"], ["logits"])]
    graph = helper.make_graph(nodes, "main", [ids, cache], [out])
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 21)], ir_version=10)
    files["onnx/model_q4.onnx"] = model.SerializeToString()
    with loopback_hub(files) as hub, asks(place, home, hub) as one, one.connect() as client:
        reply = client.ask({"type": "load", "id": 1})
        assert reply["type"] == "error"
        assert "has an input past_conv.0; expected input_ids, attention_mask and past_key_values" in reply["error"]


# Who hears of a download, and who does not.


def hold(hub: Hub) -> None:
    hub.faults[WEIGHTS] = Fault(hold=1_000_000)


def test_a_download_goes_on_when_the_one_who_asked_for_it_leaves(hub: Hub, place: Path, home: Path) -> None:
    hold(hub)
    with asks(place, home, hub) as one:
        with one.connect() as first:
            first.send({"type": "load", "id": 1})
            assert hub.held.wait(DEADLINE)
        with one.connect() as second:
            second.send({"type": "load", "id": 2}, {"type": "ping", "id": 3})
            assert second.read() == {"type": "pong", "id": 3, "tag": TAG}
            hub.go.set()
            # It is told of no download: what comes is the answer, which for these weights is that they are none.
            reply = second.read()
            assert (reply["type"], reply["id"]) == ("error", 2), reply
            assert "onnx/model_q4.onnx cannot be loaded" in reply["error"]
    assert not hub.left.is_set()
    assert len(hub.gets(WEIGHTS)) == 1
    whole(hub, home)


@pytest.mark.model
def test_a_second_load_gets_its_own_ready_and_no_other_news(real: dict[str, bytes], place: Path, home: Path) -> None:
    with loopback_hub(real) as hub:
        hold(hub)
        with asks(place, home, hub) as one, one.connect() as first, one.connect() as second:
            first.send({"type": "load", "id": 1})
            assert hub.held.wait(DEADLINE)
            second.send({"type": "load", "id": 2}, {"type": "ping", "id": 3})
            assert second.read()["type"] == "pong"
            hub.go.set()
            ready = {"modelKey": KEY, "status": "ready", "task": "text-generation", "model": REPO}
            assert second.read() == {"type": "progress", "id": 2, "event": ready}
            assert second.read() == {"type": "loaded", "id": 2}
            news = [first.read()]
            while news[-1]["type"] == "progress":
                news.append(first.read())
            assert news[-1] == {"type": "loaded", "id": 1}
            assert {"initiate", "download", "progress", "progress_total", "done", "ready"} == {
                each["event"]["status"] for each in news[:-1]
            }
        assert len(hub.gets(WEIGHTS)) == 1


def test_two_that_fetch_at_once_fetch_once(hub: Hub, home: Path, tmp_path: Path) -> None:
    hold(hub)
    # Homes of their own: what they share is the hub cache.
    with emberd(*PULL, home=tmp_path / "one", **hub.env(home)) as first:
        assert hub.held.wait(DEADLINE)
        with emberd(*PULL, home=tmp_path / "two", **hub.env(home)) as second:
            eventually(lambda: sum(each.file == "" for each in hub.asked) == 2, "the second has asked for the list")
            hub.go.set()
            assert (first.wait(), second.wait()) == (0, 0), first.said() + second.said()
    assert {name: len(hub.gets(name)) for name in NEEDED} == dict.fromkeys(NEEDED, 1)
    whole(hub, home)


# What is here is used.


def test_what_is_here_is_used_without_a_request(hub: Hub, home: Path) -> None:
    pulled(hub, home)
    hub.asked.clear()
    done = pulls(hub, home)
    assert (done.returncode, done.stderr, hub.asked) == (0, "", [])


@pytest.mark.parametrize("offline", ["0", "1"])
def test_a_snapshot_of_another_programs_is_used_where_no_hub_can_be_asked(
    offline: str, real: dict[str, bytes], home: Path, tmp_path: Path
) -> None:
    with loopback_hub(real) as hub:
        assert pulls(hub, tmp_path / "theirs").returncode == 0
    (tmp_path / "theirs" / "hf").rename(home.parent / "hf")
    done = run(
        *PULL, home=home, **hub.env(home, HF_HOME=str(home.parent / "hf"), HF_HUB_CACHE="", HF_HUB_OFFLINE=offline)
    )
    assert done.returncode == 0, done.stderr
    weights = next((home.parent / "hf").rglob("model_q4.onnx_data"))
    weights.resolve().write_bytes(weights.read_bytes()[:-1])
    refused(
        run(
            *PULL, home=home, **hub.env(home, HF_HOME=str(home.parent / "hf"), HF_HUB_CACHE="", HF_HUB_OFFLINE=offline)
        ),
        "has 110454655 bytes and needs 110454656" if offline == "1" else "the hub at http://127.0.0.1",
    )


def test_a_user_who_is_offline_is_told_so_and_no_hub_is_asked(hub: Hub, home: Path) -> None:
    refused(pulls(hub, home, HF_HUB_OFFLINE="1"), f"{REPO} is not on this machine, and HF_HUB_OFFLINE is set", "unset")
    assert hub.asked == []


@pytest.mark.parametrize("name", [WEIGHTS, "tokenizer.json"])
def test_a_file_that_was_truncated_since_is_fetched_again_and_no_other(name: str, hub: Hub, home: Path) -> None:
    pulled(hub, home)
    blob = (hub.snapshot(home) / name).resolve()
    blob.write_bytes(blob.read_bytes()[:-1])
    refused(pulls(hub, home, HF_HUB_OFFLINE="1"), f"{name} has {len(hub.files[name].content) - 1} bytes instead of")
    hub.asked.clear()
    pulled(hub, home)
    assert hub.fetched() == {name}


def test_a_record_that_is_lost_costs_a_question_and_no_download(hub: Hub, home: Path) -> None:
    pulled(hub, home)
    for record in (home / "hub").iterdir():
        record.unlink()
    hub.asked.clear()
    pulled(hub, home)
    assert [(each.method, each.file) for each in hub.asked] == [("GET", "")]


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
    first, second = hub.gets(WEIGHTS)
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


def test_a_hub_without_ranges_starts_over(hub: Hub, home: Path) -> None:
    size = len(hub.files[WEIGHTS].content)
    hub.faults[WEIGHTS] = Fault(cut=size // 2, times=1)
    assert pulls(hub, home).returncode == 1
    hub.faults[WEIGHTS] = Fault(no_ranges=True)
    hub.asked.clear()
    pulled(hub, home)
    assert [each.sent for each in hub.gets(WEIGHTS)] == [size]


def test_a_range_that_is_refused_starts_over(hub: Hub, home: Path) -> None:
    size = len(hub.files[WEIGHTS].content)
    hub.faults[WEIGHTS] = Fault(cut=size // 2, times=1)
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
    refused(pulls(hub, home, EMBERD_HUB_TIMEOUT="0.3"), at(file), "sent nothing for 0.3 s", "check the network")


def test_a_transfer_that_stops_is_not_waited_for_for_ever_and_gone_on_with(hub: Hub, home: Path) -> None:
    hold(hub)
    refused(pulls(hub, home, EMBERD_HUB_TIMEOUT="0.5"), WEIGHTS, "sent nothing for 0.5 s")
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


def test_the_worker_says_why_on_one_line_and_tries_again(hub: Hub, place: Path, home: Path) -> None:
    hub.faults[""] = Fault(status=404)
    with asks(place, home, hub) as one, one.connect() as client:
        for request in ({"type": "load", "id": 1}, chat(2)):
            reply = client.ask(request)
            assert reply["error"].startswith(
                f"{REPO} could not be fetched from {hub.address}: there is no such thing (HTTP 404) (hint: "
            )
            assert "\n" not in reply["error"]
        hub.faults.clear()
        assert "cannot be loaded" in client.ask({"type": "load", "id": 3})["error"]
        whole(hub, home)


# Names.


def test_the_table_is_listed_and_what_was_fetched_is_marked(hub: Hub, home: Path) -> None:
    def listed(*options: str) -> dict[str, str]:
        done = run("models", "list", *options, home=home, **hub.env(home))
        assert (done.returncode, done.stderr) == (0, "")
        return {line.split()[0]: line for line in done.stdout.splitlines()}

    assert KEY not in listed()
    assert len(listed("--all")) == 9
    assert listed("--all")[KEY].endswith(f"not fetched: {REPO}, for title; emberd models pull {KEY}")
    done = run("models", "pull", KEY, home=home, **hub.env(home))
    assert done.stdout == f"{KEY} is ready in {hub.snapshot(home)}\n"
    assert re.search(rf" MB +ready \({REPO}\)$", listed()[KEY])
    blob = (hub.snapshot(home) / WEIGHTS).resolve()
    blob.write_bytes(b"")
    assert "damaged: " in listed()[KEY]
    forgotten = run("models", "rm", KEY, home=home, **hub.env(home))
    assert forgotten.returncode == 0
    assert forgotten.stdout.startswith(f"forgot {REPO}; its files stay in the hub cache")
    assert KEY not in listed()
    again = run("models", "rm", KEY, home=home, **hub.env(home))
    assert (again.returncode, KEY in again.stderr) == (1, True)


@pytest.mark.parametrize(
    ("options", "env", "expected"),
    [
        (("--model-key", KEY), {}, REPO),
        (("--model-key", KEY, "--repo", "org/other"), {}, "org/other"),
        (("--model-key", KEY, "--repo", "org/other", "--model", "org/third"), {}, "org/third"),
        (("--model-key", KEY, "--repo", "org/other"), {"EMBERD_WORKER_MODEL": "org/fourth"}, "org/fourth"),
    ],
)
def test_what_a_worker_serves_is_what_it_was_told(
    options: tuple[str, ...], env: dict[str, str], expected: str, place: Path, home: Path
) -> None:
    with (
        loopback_hub({}, repo="no/repository") as hub,
        worker(place, *options, engine="auto", home=home, **hub.env(home, **env)) as one,
        one.connect() as client,
    ):
        assert client.ask({"type": "load", "id": 1})["error"].startswith(f"{expected} could not be fetched from")


def test_a_key_that_is_not_in_the_table_is_the_default_model_and_said(place: Path, home: Path) -> None:
    with worker(place, engine="auto", home=home) as one:
        assert "serving the default model" in one.process.logged("not in the table")


def test_a_repository_that_is_none_is_an_error_of_the_start(place: Path, home: Path) -> None:
    done = run("worker", "--socket", place, "--model-key", "x", "--tag", "t", "--repo", "../x", home=home)
    assert (done.returncode, place.exists()) == (1, False)
    assert '"../x" is no repository of a hub' in done.stderr


def test_a_folder_that_looks_like_a_model_of_omps_but_is_not_whole_is_passed_over(hub: Hub, home: Path) -> None:
    folder = home / ".omp" / "agent" / "cache" / "tiny-models" / REPO
    folder.mkdir(parents=True)
    (folder / "config.json").write_text("{")
    with emberd(*PULL, home=home, **hub.env(home)) as process:
        assert process.wait() == 0, process.said()
        assert "a folder of omp's is not used" in process.err.rest()
    whole(hub, home)
