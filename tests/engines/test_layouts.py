"""Graphs of other layouts: what is found out about them at load, and that their answers are those of plain runs."""

from __future__ import annotations

import weakref
from pathlib import Path

import numpy as np
import onnx
import onnxruntime as ort
import pytest
from numpy.typing import NDArray

import hubgraphs
import tiny
from cases import Case, prompt
from emberd.concat import SLACK, ConcatRows, _groups, _Pack, rows_of
from emberd.engine import EngineError
from emberd.onnx import OnnxEngine
from emberd.rows import Rows
from emberd.session import Model, find_graph
from emberd.wide import WideRows
from fakeport import Admit, Cancel, FakePort, Sampling, Settings
from hubgraphs import Form

PLAIN = Form()
HALF = Form(kind="float16")

FOUND = {
    "gqa": (Form(attention="gqa"), "shared chunks wide"),
    "gqa, positions from the mask": (Form(attention="gqa", positions="mask"), "shared chunks wide"),
    "gqa, positions from the past": (Form(attention="gqa", positions="past"), "chunks wide"),
    "gqa, one logit": (Form(attention="gqa", keep="num_logits_to_keep"), "shared chunks"),
    "gqa, half": (Form(attention="gqa", kind="float16"), "shared chunks wide"),
    "gqa, half caches": (Form(attention="gqa", cache="float16"), "chunks wide"),
    "gqa, four bits, half": (Form(attention="gqa", bits="zero points", kind="float16"), "shared chunks wide"),
    "gqa, hybrid": (Form(attention="gqa", convolution="pieces"), "shared chunks wide"),
    "gqa, hybrid that is read whole": (Form(attention="gqa", convolution="whole"), "shared wide"),
    "gqa, branch": (Form(attention="gqa", branch=True), "chunks wide"),
    "gqa, lengths from the past": (Form(attention="gqa-concat"), "chunks wide"),
    "hand": (Form(), "chunks padding wide"),
    "hand, positions from the mask": (Form(positions="mask"), "chunks padding wide"),
    "hand, positions from the past": (Form(positions="past"), "chunks wide"),
    "hand, cache positions": (Form(positions="past", places=True), "chunks wide"),
    "hand, cache positions beside others": (Form(places=True), "chunks padding wide"),
    "hand, one logit": (Form(keep="logits_to_keep"), "chunks padding"),
    "hand, branch": (Form(branch=True), "chunks padding wide"),
    "hand, half": (HALF, "chunks padding wide"),
    "hand, half caches": (Form(cache="float16"), "chunks padding wide"),
    "hand, hybrid": (Form(convolution="pieces"), "chunks padding wide"),
    "hand, hybrid that is read whole": (Form(convolution="whole"), "padding wide"),
    "hand, hybrid, half": (Form(convolution="pieces", kind="float16"), "chunks padding wide"),
    "hand, four bits": (Form(bits="symmetric"), "chunks padding wide"),
    "hand, four bits, zero points": (Form(bits="zero points"), "chunks padding wide"),
    "hand, four bits, half": (Form(bits="zero points", kind="float16"), "chunks padding wide"),
}


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """A folder for each form, without eos ids."""
    root = tmp_path_factory.mktemp("forms")
    return {name: hubgraphs.build(root / name, form, eos=[]) for name, (form, _) in FOUND.items()}


@pytest.fixture(params=FOUND)
def form(request: pytest.FixtureRequest, built: dict[str, Path]) -> tuple[str, Case]:
    """Each form in turn."""
    name: str = request.param
    return name, case_of(built[name])


def case_of(folder: Path) -> Case:
    return Case(folder.name, "onnx", lambda folder, eos: folder, long=230, folder=folder)


def plainly(folder: Path, tokens: list[int], count: int) -> list[int]:
    """A greedy answer in which every token comes from a pass over all before it, with nothing kept: no cache can be wrong."""
    session = ort.InferenceSession(str(find_graph(folder)), providers=["CPUExecutionProvider"])
    fixed: dict[str, NDArray[np.generic]] = {}
    kinds = {"tensor(float)": np.float32, "tensor(float16)": np.float16}
    for each in session.get_inputs():
        if each.type in kinds:
            shape = [1 if i == 0 else size if isinstance(size, int) else 0 for i, size in enumerate(each.shape)]
            fixed[each.name] = np.zeros(shape, kinds[each.type])
    names = {each.name for each in session.get_inputs()}
    text = list(tokens)
    for _ in range(count):
        feeds = dict(fixed) | {"input_ids": np.array([text]), "attention_mask": np.ones((1, len(text)), np.int64)}
        scalar = np.array(1, np.int64)
        more = {
            "position_ids": np.arange(len(text))[None],
            "cache_position": np.arange(len(text)),
            "use_cache_branch": np.array([False]),
            "num_logits_to_keep": scalar,
            "logits_to_keep": scalar,
        }
        feeds |= {name: value for name, value in more.items() if name in names}
        text.append(int(session.run(["logits"], feeds)[0][0, -1].argmax()))
    return text[len(tokens) :]


def test_what_a_graph_does_is_found_by_running_it(form: tuple[str, Case]) -> None:
    name, case = form
    model = Model(str(case.folder), Settings())
    found = {
        "shared": model.shared,
        "chunks": model.chunks,
        "padding": model.padding,
        "wide": model.wide_logits,
    }
    assert " ".join(each for each, true in found.items() if true) == FOUND[name][1]
    assert model.vocab_size == tiny.VOCAB
    assert model.reusable == (model.chunks and "hybrid" not in name)


def test_an_answer_is_that_of_passes_that_keep_nothing(form: tuple[str, Case]) -> None:
    _, case = form
    for length, count in ((1, 12), (2, 12), (40, 25), (150, 4)):
        assert case.single(prompt(length, length), count) == plainly(case.folder, prompt(length, length), count)


def test_answers_that_run_together_are_those_of_single_runs(form: tuple[str, Case]) -> None:
    _, case = form
    asked = {id: (prompt(id, 1 + id * 9 % 100), 3 + id * 5 % 30) for id in range(1, 13)}
    port = FakePort()
    for id, (tokens, limit) in asked.items():
        port.at(id * 4 % 23, Admit(id, tokens, limit))
    case.run(port, max_batch=5)
    assert port.reason is None and port.failures == {}
    assert port.answers == case.singles(asked)


def test_every_layout_of_the_same_weights_gives_the_same_answers(built: dict[str, Path], onnx_case: Case) -> None:
    asked = {id: (prompt(id, 7 * id), 30) for id in range(1, 6)}
    expected = onnx_case.singles(asked)
    for name, folder in built.items():
        if not any(each in name for each in ("half", "hybrid", "bits")):
            assert case_of(folder).singles(asked) == expected, name


def test_a_prompt_that_cannot_be_read_in_pieces_is_read_in_one(built: dict[str, Path]) -> None:
    port = FakePort().at(0, Admit(1, prompt(1, 5), 30)).at(3, Admit(2, prompt(2, 200), 3))
    case_of(built["hand, hybrid that is read whole"]).run(port, prefill_chunk=16)
    first = next(n for n, steps in enumerate(port.pushes) if any(step[0] == 2 for step in steps))
    assert first in (3, 4)


@pytest.mark.parametrize("name", ["hand", "hand, half caches", "gqa", "hand, positions from the past"])
def test_prompts_start_from_what_earlier_ones_left(built: dict[str, Path], name: str) -> None:
    case = case_of(built[name])
    first = prompt(1, 120)
    asked = {1: (first, 20), 2: (first[:90] + prompt(2, 30), 20), 3: (first, 20)}
    port = FakePort()
    for id, (tokens, limit) in asked.items():
        port.at(1000 * id, Admit(id, tokens, limit))
    case.run(port)
    assert port.cached == {2: 90, 3: 118}
    assert port.answers == case.singles(asked)


@pytest.mark.parametrize("name", [name for name in FOUND if "hybrid" in name])
def test_a_hybrid_starts_from_nothing_that_was_left(built: dict[str, Path], name: str) -> None:
    case = case_of(built[name])
    port = FakePort().at(0, Admit(1, prompt(1, 120), 20)).at(1000, Admit(2, prompt(1, 120), 20))
    case.run(port, cache_bytes=1 << 28)
    assert port.cached == {}
    assert port.answers[1] == port.answers[2]


@pytest.mark.parametrize("name", ["hand, hybrid", "gqa, hybrid"])
def test_a_row_that_was_left_in_the_middle_leaves_no_state_to_the_next(built: dict[str, Path], name: str) -> None:
    case = case_of(built[name])
    for cut in (2, 6, 12):
        port = FakePort().at(0, Admit(1, prompt(1, 60), 40)).at(cut, Cancel(1), Admit(2, prompt(2, 3), 20))
        case.run(port, max_batch=1, prefill_chunk=16)
        assert port.answers[2] == case.single(prompt(2, 3), 20)


@pytest.mark.parametrize("name", ["hand", "gqa", "hand, hybrid", "hand, positions from the past"])
def test_a_prompt_that_cannot_be_read_fails_alone(built: dict[str, Path], name: str) -> None:
    case = case_of(built[name])
    port = FakePort().at(0, Admit(1, prompt(1, 5), 20)).at(4, Admit(2, [8, tiny.VOCAB + 1000, 9], 20))
    port.at(5, Admit(3, prompt(3, 5), 20))
    case.run(port)
    assert list(port.failures) == [2]
    for id in (1, 3):
        assert port.answers[id] == case.single(prompt(id, 5), 20)


def test_log_probabilities_and_penalties_are_those_of_another_layout(built: dict[str, Path], onnx_case: Case) -> None:
    asked = Sampling(0.9, top_p=0.9, seed=3, repetition_penalty=1.2, frequency_penalty=0.4, top_logprobs=4)
    expected = onnx_case.run(FakePort().at(0, Admit(1, prompt(4, 20), 25, asked)))
    for name in ("hand", "gqa", "hand, positions from the past"):
        port = FakePort().at(3, Admit(1, prompt(4, 20), 25, asked))
        for id in range(2, 7):
            port.at(id, Admit(id, prompt(id, 5 * id), 30))
        case_of(built[name]).run(port)
        assert port.answers[1] == expected.answers[1]
        for (own, top), (own_there, top_there) in zip(port.logprobs[1], expected.logprobs[1], strict=True):
            assert own == pytest.approx(own_there, abs=1e-4)
            assert [id for id, _ in top] == [id for id, _ in top_there]


# Packs.


def engine_of(folder: Path, **settings: int) -> tuple[OnnxEngine, ConcatRows]:
    engine = OnnxEngine(Model(str(folder), Settings(**settings)), FakePort().fail)
    assert isinstance(engine._rows, ConcatRows)
    return engine, engine._rows


def test_sequences_decode_in_one_pass_where_padding_allows_it(
    built: dict[str, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    passes: list[int] = []
    run = _Pack.run

    def counted(self: _Pack, tokens: NDArray[np.int64]) -> None:
        passes.append(len(tokens))
        run(self, tokens)

    monkeypatch.setattr(_Pack, "run", counted)
    for name, expected in (("hand", [4]), ("hand, positions from the past", [1] * 4)):
        engine, _ = engine_of(built[name])
        for id in range(4):
            engine.take(Admit(id, prompt(id, 3 + 20 * id), 20))
        while len(engine._running) < 4:
            engine.step()
        passes.clear()
        engine.step()
        assert passes == expected
        engine.close()


def test_padding_is_bounded_by_the_tokens_in_use() -> None:
    assert _groups([5, SLACK + 6, 20, SLACK], padding=True) == [[1, 3, 2], [0]]
    assert _groups([SLACK, 0, 1], padding=True) == [[0, 2, 1]]
    assert _groups([4000, 3000, 2001, 2000, 1500, 100, 50], padding=True) == [[0, 1, 2], [3, 4], [5, 6]]
    assert _groups([7, 7, 7], padding=False) == [[0], [1], [2]]
    assert _groups([], padding=True) == []
    rng = np.random.Generator(np.random.PCG64(3))
    for _ in range(200):
        lengths = rng.integers(1, 8000, rng.integers(1, 17)).tolist()
        groups = _groups(lengths, padding=True)
        assert sorted(row for group in groups for row in group) == list(range(len(lengths)))
        for group in groups:
            longest = max(lengths[row] for row in group)
            assert all(lengths[row] * 2 > longest or longest - lengths[row] <= SLACK for row in group)
        padded = sum(len(group) * max(lengths[row] for row in group) for group in groups)
        assert padded <= 2 * sum(lengths) + SLACK * len(lengths)


def test_a_pack_that_nobody_joins_or_leaves_is_not_copied(built: dict[str, Path]) -> None:
    engine, rows = engine_of(built["hand"])
    for id in range(3):
        engine.take(Admit(id, prompt(id, 20), 40 + 10 * id))
    while len(engine._running) < 3:
        engine.step()
    engine.step()
    [pack] = rows._packs
    for _ in range(20):
        engine.step()
        assert rows._packs == [pack]
    while len(engine._running) == 3:
        engine.step()
    engine.step()
    assert rows._packs != [pack]
    engine.close()


def test_the_last_to_leave_gives_a_packs_memory_back(built: dict[str, Path]) -> None:
    for name in ("hand", "hand, positions from the past"):
        engine, rows = engine_of(built[name])
        for id in range(3):
            engine.take(Admit(id, prompt(id, 20), 40))
        while len(engine._running) < 3:
            engine.step()
        engine.step()
        packs = [weakref.ref(pack) for pack in rows._packs]
        engine.drop(range(3))
        assert packs and all(pack() is None for pack in packs)
        assert rows._packs == [] and not engine.busy
        engine.close()


def test_a_row_can_be_read_on_after_it_has_decoded(built: dict[str, Path]) -> None:
    """Prefill, decode and prefill again, as a conversation that goes on in its row would."""
    for name in ("hand", "gqa", *(name for name in FOUND if "hybrid" in name and "half" not in name)):
        rows = rows_of(Model(str(built[name]), Settings()), 64)
        text, others = prompt(1, 9), prompt(2, 30)
        rows.extend(0, text)
        rows.extend(1, others)
        for row in (0, 1):
            rows.feed(row, 50 + row)
        rows.decode(2)
        rows.extend(0, prompt(3, 4))
        whole = [*text, 50, *prompt(3, 4)]
        assert rows.length(0) == len(whole)
        rows.extend(2, whole)
        assert np.allclose(rows._logits[0], rows._logits[2], atol=1e-4), name
        rows.feed(1, 60)
        rows.move(0, 3)
        rows.move(1, 0)
        rows.decode(1)
        rows.extend(4, [*others, 51, 60])
        assert np.allclose(rows._logits[0], rows._logits[4], atol=1e-4), name


def test_the_layout_says_which_rows_there_are(built: dict[str, Path], onnx_case: Case) -> None:
    for folder, kind in ((onnx_case.folder, Rows), (built["gqa"], WideRows), (built["hand"], ConcatRows)):
        assert type(rows_of(Model(str(folder), Settings()), 8)) is kind


# Weights.


@pytest.mark.parametrize("zeros", [False, True])
def test_four_bit_weights_are_what_their_scales_make_of_them(tmp_path: Path, zeros: bool) -> None:
    """The kernel against the same weights written out in float32."""
    form = Form(bits="zero points" if zeros else "symmetric")
    exact = hubgraphs.graph(Form())
    for tensor in exact.graph.initializer:
        if tensor.name in hubgraphs.MATRICES:
            weight = hubgraphs.unpacked(*hubgraphs.four_bits(onnx.numpy_helper.to_array(tensor), zeros))
            tensor.CopyFrom(onnx.numpy_helper.from_array(weight, tensor.name))
    one, other = hubgraphs.build(tmp_path / "bits", form), hubgraphs.build(tmp_path / "exact", Form())
    onnx.save(exact, str(find_graph(other)))
    rows = [rows_of(Model(str(folder), Settings()), 64) for folder in (one, other)]
    for each in rows:
        each.extend(0, prompt(1, 30))
    assert np.allclose(rows[0]._logits[0], rows[1]._logits[0], atol=2e-3)
    assert np.ptp(rows[1]._logits[0]) > 5


@pytest.mark.parametrize("attention", ["hand", "gqa"])
def test_dynamic_weights_of_eight_bits_differ_in_a_batch_no_more_than_their_scales_do(
    tmp_path: Path, attention: str
) -> None:
    """Every pass has one scale for all its tokens, so that neighbours show in a row's logits, though hardly."""
    model = Model(str(hubgraphs.build(tmp_path, Form(attention=attention, bits="dynamic"))), Settings())
    assert (model.shared, model.chunks, model.padding) == (attention == "gqa", True, attention == "hand")
    rows = rows_of(model, 64)
    for row in range(4):
        rows.extend(row, prompt(row, 5 + 10 * row))
        rows.feed(row, 40 + row)
    rows.extend(4, prompt(2, 25))
    rows.decode(4)
    together = rows._logits[2, 0].copy()
    for row in range(4):
        rows.release(row)
    rows.move(4, 0)
    rows.feed(0, 42)
    rows.decode(1)
    assert np.linalg.norm(together - rows._logits[0, 0]) < 0.1 * np.linalg.norm(together)


@pytest.mark.parametrize("files", [1, 3])
@pytest.mark.parametrize("name", ["hand", "gqa, four bits, half"])
def test_weights_may_lie_in_other_files(tmp_path: Path, built: dict[str, Path], files: int, name: str) -> None:
    folder = hubgraphs.build(tmp_path, FOUND[name][0], eos=[], files=files)
    data = sorted(path.name for path in (folder / "onnx").iterdir())
    assert data == ["model_q4.onnx", *(f"model_q4.onnx_data{f'_{n}' if n else ''}" for n in range(files))]
    assert case_of(folder).single(prompt(1, 20), 20) == case_of(built[name]).single(prompt(1, 20), 20)
    (folder / "onnx" / data[-1]).unlink()
    with pytest.raises(EngineError, match="cannot be loaded"):
        Model(str(folder), Settings())


@pytest.mark.parametrize("dtype", ["fp32", "fp16", "q8", "int8", "uint8", "q4", "q4f16", "bnb4"])
def test_the_graph_of_every_dtype_is_found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, dtype: str) -> None:
    ending = {"fp32": "", "q8": "_quantized"}.get(dtype, f"_{dtype}")
    folder = hubgraphs.build(tmp_path, Form(), eos=[], file=f"onnx/model{ending}.onnx")
    monkeypatch.setenv("PI_TINY_DTYPE", dtype)
    assert case_of(folder).single(prompt(1, 20), 5) == plainly(folder, prompt(1, 20), 5)


def test_a_folder_without_the_graph_that_was_asked_for_says_what_it_has(tmp_path: Path) -> None:
    hubgraphs.build(tmp_path, PLAIN, file="onnx/model_fp16.onnx")
    hubgraphs.build(tmp_path, PLAIN, file="onnx/model_quantized.onnx")
    with pytest.raises(EngineError) as error:
        find_graph(tmp_path, "")
    assert str(error.value).endswith(
        "and no onnx/model_q4.onnx; hint: set PI_TINY_DTYPE=fp16 for onnx/model_fp16.onnx, "
        "or PI_TINY_DTYPE=q8 for onnx/model_quantized.onnx"
    )
