"""What only the ONNX engine has: graphs, shared buffers, and folders it cannot run."""

from __future__ import annotations

import json
import mmap
import os
from pathlib import Path

import onnx
import pytest
from onnx import TensorProto, helper

import tiny
from cases import Case, prompt
from emberd import loop
from emberd.engine import EngineError
from emberd.kv import KvCache, Layer
from emberd.rows import Rows
from emberd.session import find_graph, physical_cores
from fakeport import Admit, FakePort, Launch, Sampling, Settings


def refusal(folder: Path) -> str:
    """The first line that a reader gets when the folder is loaded."""
    port = FakePort()
    loop.run(Launch("onnx", str(folder), Settings(), port))
    assert port.reason is not None and "hint:" in port.reason
    return port.reason.splitlines()[0]


def test_a_graph_that_gives_only_logits_answers_like_one_that_sorts_them(
    onnx_case: Case, folders: dict[str, Path]
) -> None:
    from dataclasses import replace

    plain = replace(onnx_case, folder=folders["onnx-logits-only"])
    for sampling in (None, Sampling(1.2, top_p=0.9, seed=3), Sampling(1.0, top_k=20, seed=4), Sampling(3.0, seed=5)):
        assert plain.single(prompt(5, 20), 25, sampling) == onnx_case.single(prompt(5, 20), 25, sampling)


def test_other_seeds_give_other_answers(onnx_case: Case) -> None:
    answers = {tuple(onnx_case.single(prompt(4, 9), 12, Sampling(temperature=1.5, seed=seed))) for seed in range(8)}
    assert len(answers) == 8


def test_the_mask_follows_the_longest_text_and_changes_no_answer(
    onnx_case: Case, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked = {1: (prompt(1, 5), 40), 2: (prompt(2, 60), 30), 3: (prompt(3, 7) * 6, 50), 4: (prompt(4, 150), 20)}
    alone = {id: onnx_case.single(tokens, limit) for id, (tokens, limit) in asked.items()}
    widths: list[int] = []
    lay_out = Rows._lay_out

    def watched(rows: Rows, width: int) -> None:
        widths.append(width)
        lay_out(rows, width)

    monkeypatch.setattr("emberd.rows.NARROWEST", 16)
    monkeypatch.setattr(Rows, "_lay_out", watched)
    port = FakePort()
    for id, (tokens, limit) in asked.items():
        port.at(4 * id, Admit(id, tokens, limit))
    port.at(300, Admit(5, *asked[4]), Admit(6, *asked[1]))  # after all have left
    onnx_case.serve(port, prefill_chunk=32)
    assert port.failures == {}
    assert {id: port.answers[id] for id in asked} == alone
    assert (port.answers[5], port.answers[6]) == (alone[4], alone[1])
    assert widths[0] == 32 and max(widths) == 256 and widths.count(16) == 2, "wider for the longest, narrow when idle"


@pytest.mark.parametrize("file", ["model.onnx", "config.json"])
def test_a_missing_file_is_named(file: str, tmp_path: Path) -> None:
    (tiny.build(tmp_path) / file).unlink()
    assert f"holds no {file}" in refusal(tmp_path)


def test_the_graph_is_the_one_of_the_dtype_wherever_a_repository_keeps_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("PI_TINY_DTYPE", raising=False)
    (tmp_path / "onnx").mkdir()
    places = ("model.onnx", "model_q4.onnx", "onnx/model_q4.onnx")
    for place in places:
        (tmp_path / place).touch()
        assert find_graph(tmp_path) == tmp_path / place
    for dtype, place in {"q8": "onnx/model_quantized.onnx", " FP16 ": "onnx/model_fp16.onnx"}.items():
        with pytest.raises(EngineError, match=f"holds no {place.removeprefix('onnx/')}, and no {place}; hint: "):
            find_graph(tmp_path, dtype)
        (tmp_path / place).touch()
        assert find_graph(tmp_path, dtype) == tmp_path / place
    assert find_graph(tmp_path, "fp32") == tmp_path / "model.onnx"
    (tmp_path / "onnx/model.onnx").touch()
    assert find_graph(tmp_path, "fp32") == tmp_path / "onnx/model.onnx"
    monkeypatch.setenv("PI_TINY_DTYPE", "fp16")
    assert find_graph(tmp_path) == tmp_path / "onnx/model_fp16.onnx"
    for default in ("", "default", "auto", "q4", "no dtype"):
        assert find_graph(tmp_path, default) == tmp_path / "onnx/model_q4.onnx"


def test_weights_that_were_asked_for_are_not_replaced_by_others(tmp_path: Path) -> None:
    (tmp_path / "model.onnx").touch()
    assert find_graph(tmp_path, "") == tmp_path / "model.onnx"
    with pytest.raises(EngineError, match=r"holds no model_q4\.onnx, and no onnx/model_q4\.onnx; hint: "):
        find_graph(tmp_path, "q4")
    # An import has one graph, and no dtype that it could be another than.
    (tmp_path / "emberd.json").touch()
    assert find_graph(tmp_path, "q4") == tmp_path / "model.onnx"


def test_a_repositorys_graph_is_run_as_one_at_the_root_is(onnx_case: Case, tmp_path: Path) -> None:
    from dataclasses import replace

    folder = tiny.build(tmp_path)
    (folder / "onnx").mkdir()
    (folder / "model.onnx").rename(folder / "onnx" / "model_q4.onnx")
    moved = replace(onnx_case, folder=folder)
    assert moved.single(prompt(5, 20), 25) == onnx_case.single(prompt(5, 20), 25)


def test_a_damaged_graph_is_named(tmp_path: Path) -> None:
    graph = tiny.build(tmp_path) / "model.onnx"
    graph.write_bytes(graph.read_bytes()[:5000])
    assert f"{graph} cannot be loaded" in refusal(tmp_path)


def test_a_config_without_a_context_length_is_refused(tmp_path: Path) -> None:
    (tiny.build(tmp_path) / "config.json").write_text(json.dumps({"vocab_size": tiny.VOCAB}))
    assert "max_position_embeddings" in refusal(tmp_path)


def test_a_graph_with_other_inputs_is_told_what_was_expected(tmp_path: Path) -> None:
    folder = tiny.build(tmp_path)
    model = tiny.graph()
    model.graph.input.append(helper.make_tensor_value_info("inputs_embeds", TensorProto.INT64, ["batch", "sequence"]))
    onnx.save(model, str(folder / "model.onnx"))
    reason = refusal(folder)
    assert "has an input inputs_embeds" in reason and "past_key_values.N.key/value" in reason


def test_a_graph_without_a_cache_is_told_what_was_expected(tmp_path: Path) -> None:
    folder = tiny.build(tmp_path)
    ids = helper.make_tensor_value_info("input_ids", TensorProto.INT64, ["batch", "sequence"])
    out = helper.make_tensor_value_info("logits", TensorProto.INT64, ["batch", "sequence"])
    body = helper.make_graph([helper.make_node("Identity", ["input_ids"], ["logits"])], "none", [ids], [out])
    onnx.save(
        helper.make_model(body, opset_imports=[helper.make_opsetid("", 20)], ir_version=10), str(folder / "model.onnx")
    )
    assert "has the inputs input_ids; expected input_ids, attention_mask" in refusal(folder)


def test_a_pass_that_fails_at_load_is_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def extend(self: Rows, row: int, tokens: list[int]) -> None:
        raise RuntimeError("no room\nfor a pass")

    monkeypatch.setattr(Rows, "extend", extend)
    assert "the graph cannot run with shared key and value buffers: no room for a pass" in refusal(tiny.build(tmp_path))


def test_threads_below_one_are_refused(onnx_case: Case) -> None:
    port = onnx_case.run(FakePort(), threads=0)
    assert port.reason is not None and port.reason.startswith("threads is 0; hint:")


def test_the_default_thread_count_is_one_a_core() -> None:
    assert 1 <= physical_cores() <= (os.cpu_count() or 1)


def resident() -> int:
    """Bytes of this process that are in memory."""
    return int(Path("/proc/self/statm").read_text().split()[1]) * mmap.PAGESIZE


@pytest.fixture
def cache() -> KvCache:
    """4 GiB of address space: 8 layers, 16 rows, 8,192 tokens of 2 KiB."""
    layer = Layer("past", "present", heads=8, width=64, dtype="float32")
    return KvCache([layer] * 16, rows=16, context_length=8192)


@pytest.mark.skipif(not Path("/proc/self/statm").exists(), reason="reads Linux's own figure of resident memory")
def test_the_cache_takes_memory_only_for_tokens_in_use_and_gives_it_back(cache: KvCache) -> None:
    token = 16 * 8 * 64 * 4
    before = resident()
    for buffer in cache.buffers:
        buffer[3, :, :512] = 1.0
    used = resident() - before
    assert 0.9 * 512 * token < used < 1.3 * 512 * token
    cache.move(3, 0, 512)
    cache.release(3)
    assert resident() - before < 1.3 * 512 * token
    assert all(buffer[0, :, :512].min() == 1.0 and buffer[3].max() == 0.0 for buffer in cache.buffers[:1])
    cache.release(0)
    cache.release(3)
    assert resident() - before < 0.1 * 512 * token
