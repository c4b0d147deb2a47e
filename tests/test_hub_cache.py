"""The user's hub cache: what is damaged in it is found and healed, what is put into it is on the disk, and a dtype is what was asked for.

The hub is one on loopback, with a small repository that no engine opens.
"""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

import pytest

from support.hub import REPO, WEIGHTS, Fault, Hub, graph, loopback_hub, pulled, pulls, refused, small_model
from support.process import run

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

pytestmark = [pytest.mark.timeout(600)]


@pytest.fixture
def hub() -> Iterator[Hub]:
    """A hub with the small repository."""
    with loopback_hub(small_model()) as hub:
        yield hub


def damage(path: Path) -> None:
    """Changes a byte of a file, which keeps its size."""
    content = bytearray(path.resolve().read_bytes())
    content[len(content) // 2] ^= 1
    path.resolve().write_bytes(content)


def forget(home: Path) -> None:
    assert run("models", "rm", REPO, home=home).returncode == 0


@pytest.mark.parametrize("name", [WEIGHTS, "tokenizer.json"], ids=["a large file", "a small file"])
@pytest.mark.parametrize("linked", [True, False], ids=["in the snapshot", "as a blob only"])
def test_a_damaged_file_of_the_right_size_is_healed_once_the_model_is_forgotten(
    linked: bool, name: str, hub: Hub, home: Path
) -> None:
    pulled(hub, home)
    damage(hub.snapshot(home) / name)
    if not linked:
        (hub.snapshot(home) / name).unlink()
    forget(home)
    hub.asked.clear()
    pulled(hub, home)
    assert hub.fetched() == {name}


def test_a_mirror_that_lists_no_sizes_has_its_checksums_compared_as_well(hub: Hub, home: Path) -> None:
    hub.sizes = False
    pulled(hub, home)
    forget(home)
    damage(hub.snapshot(home) / "tokenizer.json")
    pulled(hub, home)


def test_a_damaged_file_is_no_reserve_for_a_hub_that_fails(hub: Hub, home: Path) -> None:
    files = {**small_model(), "onnx/model_q4.onnx": graph("input_ids")}
    with loopback_hub(files) as hub:
        pulled(hub, home)
        forget(home)
        hub.faults["tokenizer.json"] = Fault(status=500)
        pulled(hub, home)
        forget(home)
        damage(hub.snapshot(home) / "tokenizer.json")
        refused(pulls(hub, home), "tokenizer.json", "(HTTP 500)")
        hub.faults.clear()
        pulled(hub, home)


def test_a_small_file_with_another_content_is_not_kept(hub: Hub, home: Path) -> None:
    content = hub.files["tokenizer.json"].content
    hub.faults["tokenizer.json"] = Fault(content=content[::-1])
    refused(pulls(hub, home), "tokenizer.json", f" instead of {hub.files['tokenizer.json'].oid}", "not kept")
    hub.faults.clear()
    pulled(hub, home)


def test_a_file_is_on_the_disk_before_it_has_its_name(hub: Hub, home: Path, tmp_path: Path) -> None:
    notes = tmp_path / "notes"
    (tmp_path / "sitecustomize.py").write_text(
        "import os\n"
        "sync = os.fsync\n"
        "def fsync(file):\n"
        "    sync(file)\n"
        f"    print(os.path.basename(os.readlink(f'/proc/self/fd/{{file}}')), file=open({str(notes)!r}, 'a'))\n"
        "os.fsync = fsync\n"
    )
    path = os.pathsep.join(filter(None, [str(tmp_path), os.environ.get("PYTHONPATH")]))
    pulled(hub, home, PYTHONPATH=path)
    blobs = {blob.name for blob in (hub.store(home) / "blobs").iterdir()}
    assert {f"{name}.emberd.incomplete" for name in blobs} <= set(notes.read_text().split())


def test_weights_that_were_asked_for_are_not_replaced_by_others(home: Path) -> None:
    files = small_model()
    files = {name: content for name, content in files.items() if not name.startswith("onnx/")}
    with loopback_hub({**files, "model.onnx": b"a graph"}) as hub:
        for dtype, graph_of in (("q8", "onnx/model_quantized.onnx"), ("q4", "onnx/model_q4.onnx")):
            refused(pulls(hub, home, PI_TINY_DTYPE=dtype), f"{REPO} has no {graph_of}", "it has model.onnx")
        assert hub.fetched() == set()
        for dtype in ("", "fp32"):
            assert pulls(hub, home, PI_TINY_DTYPE=dtype).returncode == 0
        assert (hub.snapshot(home) / "model.onnx").read_bytes() == b"a graph"


def test_two_dtypes_share_what_is_not_weights(hub: Hub, home: Path) -> None:
    pulled(hub, home)
    hub.asked.clear()
    assert pulls(hub, home, PI_TINY_DTYPE="fp16").returncode == 0
    assert hub.fetched() == {"onnx/model_fp16.onnx"}
    hub.asked.clear()
    assert pulls(hub, home).returncode == 0
    assert hub.asked == []
