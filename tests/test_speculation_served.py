"""Speculation on the real model: what its graph gives for it, and that no answer depends on it."""

from __future__ import annotations

import json
import urllib.request
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import onnxruntime
import pytest

from support.serve import Server, server

if TYPE_CHECKING:
    from collections.abc import Iterator

    from numpy.typing import NDArray

pytestmark = [pytest.mark.model, pytest.mark.timeout(600)]

NAME = "smollm2-135m"
VOCABULARY = 49152
CAPACITY = 128

TEXT = (
    "Northport is a small town at the mouth of the river Lune. It was founded by fishermen who came from the islands in "
    "the west. For two hundred years the town lived from herring, and at the height of the trade more than three "
    "hundred boats lay in the harbour."
)


@pytest.fixture(scope="module")
def graph(model_home: Path) -> onnxruntime.InferenceSession:
    """The graph that `emberd models pull` makes."""
    path = model_home / "models" / NAME / "model.onnx"
    return onnxruntime.InferenceSession(str(path), providers=["CPUExecutionProvider"])


def run(graph: onnxruntime.InferenceSession, ids: NDArray[np.int64]) -> dict[str, NDArray[Any]]:
    """What the graph gives but for the cache, for `[batch, sequence]` ids and nothing before them."""
    batch, sequence = ids.shape
    mask = (np.arange(CAPACITY) < sequence).astype(np.int64)[None, :].repeat(batch, 0)
    feeds: dict[str, NDArray[Any]] = {"input_ids": ids, "attention_mask": mask}
    for value in graph.get_inputs():
        if value.name.startswith("past_key_values."):
            feeds[value.name] = np.zeros((batch, value.shape[1], CAPACITY, value.shape[3]), np.float32)
    names = [each.name for each in graph.get_outputs() if not each.name.startswith("present.")]
    return dict(zip(names, graph.run(names, feeds), strict=True))


@pytest.mark.parametrize(
    ("batch", "sequence", "kept"), [(1, 1, 1), (1, 2, 2), (1, 32, 32), (1, 33, 1), (3, 1, 1), (2, 5, 5), (2, 40, 1)]
)
def test_logits_of_every_position_are_given_of_a_short_pass(
    graph: onnxruntime.InferenceSession, batch: int, sequence: int, kept: int
) -> None:
    ids = np.random.default_rng(1).integers(100, 40000, (batch, sequence))
    made = run(graph, ids)
    assert {name: array.shape for name, array in made.items()} == {
        "logits": (batch, 1, VOCABULARY),
        "argmax": (batch,),
        "topk_values": (batch, 256),
        "topk_indices": (batch, 256),
        "position_logits": (batch * kept, 1, VOCABULARY),
        "position_argmax": (batch * kept,),
        "position_topk_values": (batch * kept, 256),
        "position_topk_indices": (batch * kept, 256),
    }
    for name in ("logits", "argmax", "topk_values", "topk_indices"):
        every = made[f"position_{name}"]
        assert np.array_equal(every[kept - 1 :: kept], made[name])
    rows = made["position_logits"][:, 0]
    assert np.array_equal(made["position_topk_values"], np.take_along_axis(rows, made["position_topk_indices"], 1))
    assert np.array_equal(made["position_argmax"], rows.argmax(1))
    # What stands at a position is what a pass that ends there gives.
    for place in {0, kept // 2} if kept > 1 else ():
        shorter = run(graph, ids[:, : place + 1])
        best = made["position_topk_indices"][place::kept][:, :64]
        found = np.take_along_axis(rows[place::kept], best, 1)
        assert np.allclose(found, np.take_along_axis(shorter["logits"][:, 0], best, 1), atol=1e-3)


def test_the_graph_says_up_to_where_it_does(graph: onnxruntime.InferenceSession) -> None:
    assert graph.get_modelmeta().custom_metadata_map["emberd.positions"] == "32"


@pytest.fixture(scope="module")
def one(model_home: Path) -> Iterator[Server]:
    with server("--model", NAME, engine="onnx", home=model_home) as ready:
        yield ready


def answer(one: Server, **fields: object) -> str:
    """The answer to a request to repeat `TEXT`."""
    body = {"input": f"Repeat the following text word for word.\n\n{TEXT}", "max_output_tokens": 90, **fields}
    request = urllib.request.Request(
        f"{one.url}/v1/responses", json.dumps(body).encode(), {"content-type": "application/json"}
    )
    with urllib.request.urlopen(request, timeout=300) as response:
        text: str = json.load(response)["output"][0]["content"][0]["text"]
    return text


@pytest.mark.parametrize("sampling", [{"temperature": 0}, {"temperature": 0.3, "seed": 5, "presence_penalty": 0.1}])
def test_an_answer_is_the_same_with_speculation_and_without(one: Server, sampling: dict[str, Any]) -> None:
    plain = answer(one, generation_mode="ar", **sampling)
    assert plain.split()[:8] == TEXT.split()[:8]
    assert answer(one, **sampling) == plain
    assert answer(one, generation_mode="mtp", **sampling) == plain
    assert answer(one, extra_body={"generation_mode": "mtp", "mtp_depth": 3}, **sampling) == plain
