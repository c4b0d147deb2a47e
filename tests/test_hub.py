"""Models of a Hugging Face hub: fetched once, checked, resumed, used without the hub, and every way in which a hub can fail.

The hub is one on loopback. Where the engine has to answer, it serves the real model under the name that the table of models has for a key; elsewhere
a small repository that no engine opens.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from emberd.hub import wanted
from support.hub import (
    COMMIT,
    KEY,
    NEEDED,
    REPO,
    TOKEN,
    WEIGHTS,
    Fault,
    File,
    Hub,
    asks,
    graph,
    hold,
    loopback_hub,
    pulled,
    pulls,
    refused,
    small_model,
    whole,
)
from support.process import DEADLINE, emberd, environment, eventually, run
from support.worker import TAG, Client, chat, worker

if TYPE_CHECKING:
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


def load(client: Client) -> list[dict[str, Any]]:
    """The events of a load, which must succeed."""
    client.send({"type": "load", "id": "l"})
    events = []
    while (reply := client.read())["type"] == "progress":
        assert reply["id"] == "l"
        events.append(reply["event"])
    assert reply == {"type": "loaded", "id": "l"}, reply
    return events


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


def test_a_graph_of_another_layout_is_refused_by_its_inputs(place: Path, home: Path) -> None:
    files = small_model()
    files["onnx/model_q4.onnx"] = graph("input_ids", "inputs_embeds")
    with loopback_hub(files) as hub, asks(place, home, hub) as one, one.connect() as client:
        reply = client.ask({"type": "load", "id": 1})
        assert reply["type"] == "error"
        assert (
            "has an input inputs_embeds; expected input_ids, attention_mask, position_ids and past_key_values"
            in reply["error"]
        )


def test_a_graph_that_cannot_be_run_is_refused_before_its_weights_come(hub: Hub, place: Path, home: Path) -> None:
    hub.files["onnx/model_q4.onnx"] = File(graph("input_ids", "inputs_embeds"))
    hub.faults[WEIGHTS] = Fault(hold=0)
    with asks(place, home, hub) as one, one.connect() as client:
        # A chat: the refusal is final, and is said.
        reply = client.ask(chat(1))
        assert reply["type"] == "error"
        assert (
            "has an input inputs_embeds; expected input_ids, attention_mask, position_ids and past_key_values"
            in reply["error"]
        )
    assert not (hub.snapshot(home) / WEIGHTS).exists()


# Who hears of a download, and who does not.


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


def library(script: str, home: Path, hub: Hub) -> str:
    """What the library itself says to a script, with its cache where this home has it."""
    env = environment(home, **hub.env(home, HF_HUB_DISABLE_XET="1", HF_HUB_DISABLE_TELEMETRY="1"))
    done = subprocess.run(
        [sys.executable, "-c", f"import huggingface_hub as hf\nREPO = {REPO!r}\n{script}"],
        env=env,
        capture_output=True,
        encoding="utf-8",
        timeout=DEADLINE,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


def test_what_was_fetched_is_the_librarys_too(hub: Hub, home: Path) -> None:
    pulled(hub, home)
    found = library(f"print(hf.hf_hub_download(REPO, {WEIGHTS!r}, local_files_only=True))", home, hub)
    assert found == str(hub.snapshot(home) / WEIGHTS)
    script = "cache = hf.scan_cache_dir()\n[repo] = cache.repos\n[one] = repo.revisions\n"
    said = library(
        script + "print(len(cache.warnings), repo.repo_id, one.refs, one.commit_hash, len(one.files))", home, hub
    )
    assert said == f"0 {REPO} frozenset({{'main'}}) {COMMIT} {len(NEEDED)}"
    # A blob that the library finds is not fetched anew.
    hub.asked.clear()
    library(f"hf.hf_hub_download(REPO, {WEIGHTS!r})", home, hub)
    assert {each.method for each in hub.asked} == {"HEAD"}


@pytest.mark.model
@pytest.mark.parametrize("offline", ["0", "1"])
def test_what_the_library_fetched_is_used_where_no_hub_can_be_asked(
    offline: str, real: dict[str, bytes], home: Path
) -> None:
    with loopback_hub(real) as hub:
        library("hf.snapshot_download(REPO)", home, hub)
    done = pulls(hub, home, HF_HUB_OFFLINE=offline)
    assert (done.returncode, done.stdout) == (0, f"{REPO} is ready in {hub.snapshot(home)}\n"), done.stderr
    assert ("the hub could not be asked" in done.stderr) == (offline == "0")
    with (hub.snapshot(home) / WEIGHTS).resolve().open("r+b") as file:
        file.truncate(len(real[WEIGHTS]) - 1)
    said = f"has {len(real[WEIGHTS]) - 1} bytes and needs {len(real[WEIGHTS])}"
    refused(
        pulls(hub, home, HF_HUB_OFFLINE=offline),
        said if offline == "1" else f"the hub at {hub.address} cannot be reached",
    )


@pytest.mark.model
def test_a_hub_that_says_nothing_is_not_waited_for_where_it_is_not_needed(real: dict[str, bytes], home: Path) -> None:
    with loopback_hub(real) as hub:
        library("hf.snapshot_download(REPO)", home, hub)
        hub.faults[""] = Fault(hold=0)
        # The time-out is as long as this test has patience.
        done = pulls(hub, home)
        assert (done.returncode, done.stdout) == (0, f"{REPO} is ready in {hub.snapshot(home)}\n"), done.stderr
        assert "the hub could not be asked" in done.stderr


def test_what_the_library_fetched_costs_a_question_and_no_download(hub: Hub, home: Path) -> None:
    library("hf.snapshot_download(REPO)", home, hub)
    hub.asked.clear()
    assert pulls(hub, home).returncode == 0
    assert [(each.method, each.file) for each in hub.asked] == [("GET", "")]


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


# Which files, and in which process.


def test_a_mirror_that_lists_no_sizes_is_asked_for_them(hub: Hub, home: Path) -> None:
    hub.sizes = False
    pulled(hub, home)


@pytest.mark.parametrize(
    ("form", "expected"),
    [
        ("onnx", ["config.json", "tokenizer.model", "vocab.txt", "model.onnx", "model.onnx.data", "model.onnx_data_1"]),
        (
            "mlx",
            ["config.json", "tokenizer.model", "vocab.txt", "a.safetensors", "a.safetensors.index.json", "b.tiktoken"],
        ),
    ],
)
def test_a_form_takes_its_files_and_no_others(form: str, expected: list[str]) -> None:
    others = [
        "README.md",
        "config.json.bak/x",
        "onnx/model_fp16.onnx",
        "model.onnx_data/../../x",
        "tokenizer/../../x",
        "sub/a.safetensors",
        "pytorch_model.bin",
    ]
    both = ["config.json", "tokenizer.model", "vocab.txt", "model.onnx", "model.onnx.data", "model.onnx_data_1"]
    names = [*others, *both, "a.safetensors", "a.safetensors.index.json", "b.tiktoken"]
    assert wanted(names, form, ["onnx/model_q4.onnx", "model.onnx"])[0] == expected


def test_no_worker_imports_the_library(hub: Hub, place: Path, home: Path, tmp_path: Path) -> None:
    note = (
        "import os, sys\n"
        "class Note:\n"
        "    def find_spec(self, name, path=None, target=None):\n"
        "        if name in ('huggingface_hub', 'httpx2', 'hf_xet'):\n"
        f"            print(name, os.getpid(), file=open({str(tmp_path / 'notes')!r}, 'a'))\n"
        "sys.meta_path.insert(0, Note())\n"
    )
    (tmp_path / "sitecustomize.py").write_text(note)
    path = os.pathsep.join(filter(None, [str(tmp_path), os.environ.get("PYTHONPATH")]))
    with asks(place, home, hub, PYTHONPATH=path) as one, one.connect() as client:
        assert "cannot be loaded" in client.ask({"type": "load", "id": 1})["error"]
        notes = [line.split() for line in (tmp_path / "notes").read_text().splitlines()]
        assert {name for name, _ in notes} == {"huggingface_hub", "httpx2"}
        assert str(one.process.pid) not in {pid for _, pid in notes}


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
    assert re.search(rf" MB +ready \({REPO}, q4\)$", listed()[KEY])
    blob = (hub.snapshot(home) / WEIGHTS).resolve()
    blob.write_bytes(b"")
    assert "damaged: " in listed()[KEY]
    forgotten = run("models", "rm", KEY, home=home, **hub.env(home))
    assert forgotten.returncode == 0
    assert forgotten.stdout.startswith(f"forgot {REPO}; its files stay in the hub cache")
    assert KEY not in listed()
    again = run("models", "rm", KEY, home=home, **hub.env(home))
    assert (again.returncode, KEY in again.stderr) == (1, True)


def test_the_weights_of_one_repository_in_two_forms_are_told_apart(hub: Hub, home: Path) -> None:
    for dtype in ("", "fp16"):
        assert pulls(hub, home, PI_TINY_DTYPE=dtype).returncode == 0
    rows = [row for row in run("models", "list", home=home).stdout.splitlines() if REPO in row]
    assert [row.rpartition(" (")[2] for row in rows] == [f"{REPO}, fp16)", f"{REPO}, q4)"]


@pytest.mark.parametrize(
    ("options", "env", "expected"),
    [
        ((), {}, REPO),
        (("--repo", "org/other"), {}, "org/other"),
        (("--repo", "org/other", "--model", "org/third"), {}, "org/third"),
        (("--repo", "org/other"), {"EMBERD_WORKER_MODEL": "org/fourth"}, "org/fourth"),
    ],
)
def test_what_a_worker_serves_is_what_it_was_told(
    options: tuple[str, ...], env: dict[str, str], expected: str, place: Path, home: Path
) -> None:
    with (
        loopback_hub({}, repo="no/repository") as hub,
        worker(place, *options, engine="auto", key=KEY, home=home, **hub.env(home, **env)) as one,
        one.connect() as client,
    ):
        assert client.ask({"type": "load", "id": 1})["error"].startswith(f"{expected} could not be fetched from")


def test_a_key_that_is_not_in_the_table_is_the_default_model_and_said(place: Path, home: Path) -> None:
    with worker(place, engine="auto", home=home) as one:
        assert "serving the default model" in one.process.logged("not in the table")


def test_a_weight_format_that_is_none_is_said_and_is_the_default(hub: Hub, home: Path) -> None:
    done = pulls(hub, home, PI_TINY_DTYPE="q5")
    assert done.returncode == 0
    assert "Unsupported PI_TINY_DTYPE=q5" in done.stderr
    whole(hub, home)


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
