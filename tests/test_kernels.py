"""Emberd's operators for ONNX Runtime, against the runtime's own on graphs of one node, and what they promise of a real model."""

from __future__ import annotations

import platform
import re
import shutil
from collections import Counter
from itertools import pairwise
from pathlib import Path
from typing import Any, Literal

import numpy as np
import onnx
import onnxruntime as ort
import pytest
from numpy.typing import NDArray
from onnx import TensorProto, helper, numpy_helper

from emberd import _core, imported

Arrays = dict[str, NDArray[Any]]

FLOAT = TensorProto.FLOAT
CONTEXT = 96


Activations = Literal["int16", "float", "int8"]


def processor_has(flag: str) -> bool:
    """Whether the processor's flags name this one (Linux; elsewhere nothing is known)."""
    try:
        flags = Path("/proc/cpuinfo").read_text()
    except OSError:
        return False
    return platform.machine() == "x86_64" and re.search(rf"\b{flag}\b", flags) is not None


VNNI = all(map(processor_has, ("avx512_vnni", "avx512bw", "avx512f")))
OWN_PRODUCTS = VNNI or all(map(processor_has, ("avx2", "fma")))
"""Whether emberd's products of 4-bit codes are for this processor; those of 8 bits want VNNI."""


def session(
    nodes: list[onnx.NodeProto], inputs: Arrays, outputs: list[str], own: bool, constants: Arrays | None = None
) -> ort.InferenceSession:
    """A graph of these nodes, whose inputs have any shape of as many dimensions."""
    infos = [
        helper.make_tensor_value_info(name, helper.np_dtype_to_tensor_dtype(value.dtype), [None] * value.ndim)
        for name, value in inputs.items()
    ]
    weights = [numpy_helper.from_array(value, name) for name, value in (constants or {}).items()]
    made = [helper.make_tensor_value_info(name, FLOAT, None) for name in outputs]
    graph = helper.make_graph(nodes, "one", infos, made, weights)
    opsets = [helper.make_opsetid("", 21), helper.make_opsetid("com.microsoft", 1), helper.make_opsetid("emberd", 1)]
    options = ort.SessionOptions()
    options.intra_op_num_threads = 2
    options.log_severity_level = 4
    if own:
        options.register_custom_ops_library(_core.__file__)
    model = helper.make_model(graph, opset_imports=opsets, ir_version=10)
    return ort.InferenceSession(model.SerializeToString(), options, providers=["CPUExecutionProvider"])


def close(found: NDArray[Any], wanted: NDArray[Any], tolerance: float = 2e-6) -> None:
    np.testing.assert_allclose(found, wanted, rtol=1e-5, atol=tolerance)


class Heads:
    """Attention by both operators over caches of their own, from the same numbers."""

    def __init__(self, dim: int, heads: int, kv_heads: int, window: int, batch: int) -> None:
        self.shape = (dim, heads, kv_heads)
        self.batch = batch
        self.random = np.random.default_rng(dim + heads)
        angles = np.outer(np.arange(CONTEXT), 1.0 / 100 ** (np.arange(dim // 2) / (dim / 2)))
        self.angles = (np.cos(angles).astype(np.float32), np.sin(angles).astype(np.float32))
        self.scale = dim**-0.5
        self.window = window
        cache = np.zeros((batch, kv_heads, CONTEXT, dim), np.float32)
        self.caches = {own: (cache.copy(), cache.copy()) for own in (False, True)}
        self.sessions = {own: self._session(own) for own in (False, True)}

    def _session(self, own: bool) -> ort.InferenceSession:
        _, heads, kv_heads = self.shape
        if own:
            node = helper.make_node(
                "Attention", ["qkv", "key", "value", "last", "cos", "sin"], ["out", "keys", "values"], domain="emberd",
                heads=heads, kv_heads=kv_heads, window=self.window, scale=self.scale, block=0, digits=0,
            )  # fmt: skip
        else:
            node = helper.make_node(
                "GroupQueryAttention", ["qkv", "", "", "key", "value", "last", "total", "cos", "sin"],
                ["out", "keys", "values"], domain="com.microsoft", num_heads=heads, kv_num_heads=kv_heads,
                do_rotary=1, scale=self.scale, local_window_size=self.window or -1,
            )  # fmt: skip
        return session([node], self._inputs(own, np.zeros((1, 1, 1), np.float32), [0]), ["out", "keys", "values"], own)

    def _inputs(self, own: bool, qkv: NDArray[np.float32], last: list[int]) -> Arrays:
        key, value = self.caches[own]
        given: Arrays = {"qkv": qkv[0] if own and len(qkv) == 1 else qkv.reshape(-1, qkv.shape[-1]) if own else qkv}
        given |= {"key": key, "value": value, "last": np.array(last, np.int32)}
        given |= {} if own else {"total": np.array(max(last) + 1, np.int32)}
        return given | dict(zip(("cos", "sin"), self.angles, strict=True))

    def tokens(self, count: int) -> NDArray[np.float32]:
        """Queries, keys and values of so many new tokens in each row."""
        dim, heads, kv_heads = self.shape
        return self.random.standard_normal((self.batch, count, (heads + 2 * kv_heads) * dim), np.float32)

    def run(self, own: bool, qkv: NDArray[np.float32], last: list[int]) -> NDArray[np.float32]:
        """One pass; what comes out is `[batch, tokens, heads * dim]`, and the caches are those after it."""
        out, keys, values = self.sessions[own].run(None, self._inputs(own, qkv, last))
        self.caches[own] = (keys, values)
        return np.asarray(out).reshape(*qkv.shape[:2], -1)


SHAPES = [(64, 9, 3), (16, 2, 1), (32, 8, 8), (128, 7, 1), (80, 4, 2), (256, 4, 1), (48, 5, 5)]


@pytest.mark.parametrize("window", [0, 5])
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_attention_is_that_of_the_runtime(shape: tuple[int, int, int], window: int) -> None:
    both = Heads(*shape, window, batch=1)
    length = 0
    for count in (7, 1, 1, 33, 1, 40):
        qkv = both.tokens(count)
        length += count
        close(both.run(True, qkv, [length - 1]), both.run(False, qkv, [length - 1]))
    for own, other in zip(both.caches[True], both.caches[False], strict=True):
        close(own[:, :, :length], other[:, :, :length])


@pytest.mark.parametrize("window", [0, 5])
def test_rows_of_different_lengths_decode_together(window: int) -> None:
    both = Heads(64, 9, 3, window, batch=4)
    last = [0, 1, 17, 60]
    for key, value in both.caches.values():
        random = np.random.default_rng(1)
        key[:], value[:] = random.standard_normal((2, *key.shape), np.float32)
    for step in range(4):
        qkv, places = both.tokens(1), [place + step for place in last]
        close(both.run(True, qkv, places), both.run(False, qkv, places))


@pytest.mark.parametrize("window", [0, 5])
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_a_row_is_equal_to_the_bit_in_whatever_pieces_and_company(shape: tuple[int, int, int], window: int) -> None:
    batch, length = 3, 50
    together = Heads(*shape, window, batch)
    qkv = together.tokens(length)
    wanted = together.run(True, qkv, [length - 1] * batch)
    for cuts in ([0, 1, 2, 10, 43, length], list(range(length + 1))):
        alone = Heads(*shape, window, batch=1)
        pieces = [alone.run(True, qkv[1:2, first:end], [end - 1]) for first, end in pairwise(cuts)]
        np.testing.assert_array_equal(np.concatenate(pieces, 1)[0], wanted[1])
        for one, all_rows in zip(alone.caches[True], together.caches[True], strict=True):
            np.testing.assert_array_equal(one[0], all_rows[1])


def test_several_tokens_of_several_rows_are_read_in_one_pass() -> None:
    both = Heads(64, 9, 3, 0, batch=2)
    lengths = [9, 30]
    parts = [both.tokens(30)[row : row + 1, : lengths[row]] for row in range(2)]
    alone = [Heads(64, 9, 3, 0, batch=1) for _ in parts]
    wanted = [each.run(True, part, [length - 1]) for each, part, length in zip(alone, parts, lengths, strict=True)]
    for row, (single, length) in enumerate(zip(alone, lengths, strict=True)):
        for cache, own in zip(both.caches[True], single.caches[True], strict=True):
            cache[row, :, : length - 4] = own[0, :, : length - 4]
    last = np.concatenate([part[:, -4:] for part in parts])
    found = both.run(True, last, [length - 1 for length in lengths])
    for row, logits in enumerate(wanted):
        np.testing.assert_array_equal(found[row], logits[0, -4:])


@pytest.mark.parametrize(
    ("count", "last", "says"),
    [
        (2, [0], "a row of 1 tokens, 2 of them new"),
        (1, [CONTEXT], f"a row of {CONTEXT + 1} tokens"),
        (1, [-1], "a row of 0 tokens"),
        (1, [0, 0], "2 rows"),
    ],
)
def test_what_does_not_fit_is_refused_and_the_next_pass_works(count: int, last: list[int], says: str) -> None:
    both = Heads(64, 9, 3, 0, batch=1)
    with pytest.raises(Exception, match=says):
        both.run(True, both.tokens(count), last)
    qkv = both.tokens(3)
    close(both.run(True, qkv, [2]), both.run(False, qkv, [2]))


def test_caches_of_a_head_that_is_no_size_of_the_operator_are_refused() -> None:
    both = Heads(32, 2, 2, 0, batch=1)
    both.caches[True] = (np.zeros((1, 2, CONTEXT, 24), np.float32),) * 2
    with pytest.raises(Exception, match="numbers a token for caches"):
        both.run(True, both.tokens(1), [0])


@pytest.mark.parametrize("rows", [1, 5, 300])
@pytest.mark.parametrize("columns", [24, 64, 576])
def test_norms_and_gates_are_those_of_the_runtime(rows: int, columns: int) -> None:
    random = np.random.default_rng(columns)
    x, y, both = (random.standard_normal((rows, size), np.float32) for size in (columns, columns, 2 * columns))
    weight = random.standard_normal(columns, np.float32)
    given: Arrays = {"x": x, "y": y, "weight": weight, "both": 5 * both}
    theirs = session(
        [
            helper.make_node("SkipSimplifiedLayerNormalization", ["x", "y", "weight"], ["normed", "", "", "sum"], domain="com.microsoft", epsilon=1e-5),
            helper.make_node("SimplifiedLayerNormalization", ["x", "weight"], ["plain"], epsilon=1e-5, axis=-1, stash_type=1),
            helper.make_node("Split", ["both"], ["gate", "up"], axis=-1, num_outputs=2),
            helper.make_node("QuickGelu", ["gate"], ["active"], domain="com.microsoft", alpha=1.0),
            helper.make_node("Mul", ["active", "up"], ["gated"]),
        ], given, ["normed", "sum", "plain", "gated"], own=False,
    )  # fmt: skip
    ours = session(
        [
            helper.make_node("AddNorm", ["x", "weight", "y"], ["normed", "sum"], domain="emberd", epsilon=1e-5, block=8, digits=2),
            helper.make_node("AddNorm", ["x", "weight"], ["plain"], domain="emberd", epsilon=1e-5, block=0, digits=0),
            helper.make_node("Gated", ["both"], ["gated"], domain="emberd", block=8, digits=2),
        ], given, ["normed", "sum", "plain", "gated"], own=True,
    )  # fmt: skip
    wanted, found = theirs.run(None, given), ours.run(None, given)
    for name, theirs_, ours_ in zip(("normed", "sum", "plain", "gated"), wanted, found, strict=True):
        close(ours_[:, :columns], theirs_, 5e-5)
        if name in ("normed", "gated"):
            blocks = ours_[:, :columns].reshape(rows, -1, 8).sum(-1)
            width = -(-blocks.shape[1] // 8) * 8
            assert ours_.shape[1] == columns + 2 * width
            sums = ours_[:, columns:].reshape(rows, 2, width)
            for digit in range(2):
                close(sums[:, digit, : blocks.shape[1]], blocks, 1e-4)
                assert not sums[:, digit, blocks.shape[1] :].any()


# A real model.


@pytest.fixture(scope="module")
def folder(model_home: Path) -> Path:
    return model_home / "models" / "smollm2-135m"


def model(folder: Path, own: bool, activations: Activations) -> ort.InferenceSession:
    options = ort.SessionOptions()
    options.intra_op_num_threads = 2
    options.add_session_config_entry("session.model_external_initializers_file_folder_path", str(folder))
    if own:
        options.register_custom_ops_library(_core.__file__)
    graph = (folder / "model.onnx").read_bytes()
    graph = _core.rewritten(graph, own=own, activations=activations) or graph
    return ort.InferenceSession(graph, options, providers=["CPUExecutionProvider"])


def read(session: ort.InferenceSession, ids: NDArray[np.int64], pieces: list[int]) -> NDArray[np.float32]:
    """The logits of every position, `[rows, tokens, vocabulary]`, where rows are read together in these pieces."""
    rows, capacity = len(ids), 64
    caches = {
        each.name: np.zeros((rows, each.shape[1], capacity, each.shape[3]), np.float32)
        for each in session.get_inputs()
        if each.name.startswith("past_")
    }
    made, at = [], 0
    for count in pieces:
        given: Arrays = {"input_ids": ids[:, at : at + count]}
        at += count
        given["attention_mask"] = np.broadcast_to(np.arange(capacity) < at, (rows, capacity)).astype(np.int64)
        presents = [name.replace("past_key_values", "present") for name in caches]
        logits, *after = session.run(["position_logits", *presents], {**given, **caches})
        caches = dict(zip(caches, after, strict=True))
        made.append(logits.reshape(rows, count, -1))
    return np.concatenate(made, 1)


def test_one_node_takes_the_place_of_all_between_two_products(folder: Path) -> None:
    graph = (folder / "model.onnx").read_bytes()
    fused = _core.rewritten(graph, own=True, activations="float")
    assert fused is not None
    before, after = (
        Counter(node.op_type for node in onnx.load_model_from_string(each).graph.node) for each in (graph, fused)
    )
    layers = 30
    assert before["GroupQueryAttention"] == layers and before["MatMulNBits"] == after["MatMulNBits"]
    assert after["Attention"] == after["Gated"] == layers and after["AddNorm"] == 2 * layers + 1
    for gone in ("GroupQueryAttention", "SkipSimplifiedLayerNormalization", "QuickGelu", "MatMul", "Mul"):
        assert after[gone] == 0, gone
    assert after.total() < before.total() / 2
    whole = _core.rewritten(graph, own=True, activations="int16")
    assert whole is not None
    last = Counter(node.op_type for node in onnx.load_model_from_string(whole).graph.node)
    assert last["Product"] == (4 * layers + 1 if VNNI else 4 * layers if OWN_PRODUCTS else 0)
    if VNNI:
        # The head is exact, and its best candidates need no second look.
        assert last["MatMulNBits"] == last["FusedMatMul"] == last["ScatterElements"] == 0 and last["TopK"] == 1
    assert _core.rewritten(graph, own=False, activations="float") is None
    assert _core.rewritten(b"no graph", own=True, activations="int16") is None


def test_a_graph_of_another_author_is_left_alone(folder: Path) -> None:
    graph = onnx.load(folder / "model.onnx", load_external_data=False)
    graph.doc_string = "what the importer never writes"
    assert _core.rewritten(graph.SerializeToString(), own=True, activations="int16") is None


def apart(one: NDArray[np.float32], other: NDArray[np.float32]) -> float:
    """The mean Kullback-Leibler divergence of logits, nats."""
    p, q = (each.astype(np.float64) - each.max(-1, keepdims=True) for each in (one, other))
    p, q = (each - np.log(np.exp(each).sum(-1, keepdims=True)) for each in (p, q))
    return float((np.exp(p) * (p - q)).sum(-1).mean())


@pytest.mark.parametrize("activations", ["int16", "int8", "float"])
def test_a_text_has_the_same_logits_in_whatever_pieces_and_company_it_is_read(
    folder: Path, activations: Activations
) -> None:
    ids = np.random.default_rng(0).integers(10, 40_000, (5, 24))
    own = model(folder, own=True, activations=activations)
    steps = read(own, ids, [1] * 24)
    ways = [read(own, ids, [24]), read(own, ids, [5, 1, 1, 17])]
    ways.append(np.concatenate([read(own, ids[row : row + 1], [3, 1, 20]) for row in range(5)]))
    for way in ways:
        if activations == "int16" and VNNI:
            np.testing.assert_array_equal(way, steps)
        else:
            # Products of the runtime may sum one row otherwise than several; its head rounds to bytes, which makes hundredths of a logit of that.
            assert apart(way, steps) < (0.01 if activations == "int8" else 1e-4)


WITHOUT = "the runtime's own product is taken on this processor"


@pytest.mark.parametrize(
    ("bits", "columns", "rows", "with_zeros"),
    [
        pytest.param(4, 64, 32, True, marks=pytest.mark.skipif(not OWN_PRODUCTS, reason=WITHOUT)),
        pytest.param(4, 96, 16, False, marks=pytest.mark.skipif(not OWN_PRODUCTS, reason=WITHOUT)),
        pytest.param(8, 64, 48, False, marks=pytest.mark.skipif(not VNNI, reason=WITHOUT)),
        pytest.param(8, 160, 16, True, marks=pytest.mark.skipif(not VNNI, reason=WITHOUT)),
    ],
)
def test_a_product_is_that_of_the_runtime(bits: int, columns: int, rows: int, with_zeros: bool) -> None:
    random = np.random.default_rng(columns)
    blocks = columns // 32
    constants: Arrays = {
        "codes": random.integers(0, 256, (rows, blocks, 4 * bits), np.uint8),
        "scales": random.standard_normal((rows, blocks), np.float32),
    }
    if with_zeros:
        constants["zeros"] = random.integers(0, 256, (rows, -(-blocks * bits // 8)), np.uint8)
    attributes: dict[str, Any] = {"K": columns, "N": rows, "bits": bits}
    theirs = helper.make_node(
        "MatMulNBits", ["x", *constants], ["y"], domain="com.microsoft", block_size=32, **attributes
    )
    given: Arrays = {"x": random.standard_normal((19, columns), np.float32)}
    graph = session([theirs], given, ["y"], own=False, constants=constants)
    [wanted] = graph.run(None, given)
    ours = helper.make_node("Product", ["x", *constants], ["y"], domain="emberd", **attributes)
    graph = session([ours], given, ["y"], own=True, constants=constants)
    [found] = graph.run(None, given)
    close(found, wanted, 2e-2 * np.abs(wanted).max() / 100)
    for count in (1, 2, 7, 8, 9, 16):
        [some] = graph.run(None, {"x": given["x"][:count]})
        np.testing.assert_array_equal(some, found[:count])
    [none] = graph.run(None, {"x": given["x"][:0]})
    assert none.shape == (0, rows)
    given["x"][3, 5] = np.nan
    [found] = graph.run(None, given)
    assert np.isnan(found[3]).all() and np.isfinite(found[[2, 4]]).all(), "what is no number stays none"


def test_a_graph_is_opened_where_its_weights_really_lie(folder: Path, tmp_path: Path) -> None:
    beside = tmp_path / "beside"
    beside.mkdir()
    # The graph alone is a link, then both are; and last the weights alone, which the runtime itself does not follow.
    blob = tmp_path / "blob"
    blob.write_bytes((folder / "model.onnx").read_bytes())
    (beside / "model.onnx").symlink_to(blob)
    shutil.copyfile(folder / "model.onnx.data", beside / "model.onnx.data")
    links = tmp_path / "links"
    links.mkdir()
    for name in ("model.onnx", "model.onnx.data"):
        (links / name).symlink_to((folder / name).resolve())
    for place in (beside, links):
        opened = imported.session(place / "model.onnx", ort.SessionOptions(), _core.Settings(threads=2))
        assert {each.name for each in opened.get_inputs()} >= {"input_ids", "attention_mask"}
    (beside / "model.onnx.data").unlink()
    with pytest.raises(Exception, match=r"model\.onnx\.data"):
        imported.session(beside / "model.onnx", ort.SessionOptions(), _core.Settings())


def test_without_the_operators_the_runtimes_own_do_it_and_it_is_said(
    folder: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(_core, "__file__", str(folder / "missing.so"))
    opened = imported.session(folder / "model.onnx", ort.SessionOptions(), _core.Settings())
    said = capfd.readouterr().err
    assert "runs without emberd's own operators, and slower: " in said and "missing.so" in said
    monkeypatch.undo()
    ids = np.array([[1, 9690, 198, 2683, 359, 253]])
    plain = read(model(folder, own=False, activations="float"), ids, [6])
    np.testing.assert_array_equal(read(opened, ids, [6]), plain)
