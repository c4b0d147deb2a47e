"""What is peculiar to the engine over MLX: its folders, its caches, its memory, and that its answers are those of ONNX."""

from __future__ import annotations

import gc
import importlib.util
import itertools
import json
import random
import re
import subprocess
import sys
import weakref
from dataclasses import replace
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np
import pytest

import tiny
import tiny_mlx
from cases import CASES, Case, prompt
from emberd import loop, mlx_memory
from emberd.engine import Request
from emberd.mlx import MlxEngine
from emberd.mlx_caches import Sizes, always_cut, can_cut, copied, size
from emberd.mlx_memory import BatchBudget
from emberd.mlx_model import Model, classes
from fakeport import Admit, Cancel, FakePort, Launch, Sampling, Settings
from test_controls import CONTROLS

KINDS = {"llama": tiny_mlx.LLAMA, "sliding": tiny_mlx.SLIDING, "mamba": tiny_mlx.MAMBA, "lfm2": tiny_mlx.LFM2}


@pytest.fixture(params=[case for case in CASES if case.engine == "mlx"], ids=lambda case: case.name)
def mlx_case(request: pytest.FixtureRequest, folders: dict[str, Path]) -> Case:
    """Each kind of cache in turn."""
    return replace(request.param, folder=folders[request.param.name])


@pytest.fixture
def llama_case(folders: dict[str, Path]) -> Case:
    """The llama."""
    [case] = [each for each in CASES if each.name == "mlx"]
    return replace(case, folder=folders["mlx"])


def serve(case: Case, port: FakePort, chunk: int = 128, ahead: bool = True, **settings: int) -> FakePort:
    """Serves with what only a test chooses."""
    model = Model(str(case.folder), Settings(**settings))
    engine = MlxEngine(model, port.fail, chunk, settings.get("cache_bytes"), settings.get("kv_bytes"), ahead=ahead)
    loop.serve(engine, port)
    engine.close()
    assert port.violations == []
    return port


def refusal(folder: Path, **settings: int) -> str:
    """The first line that a reader gets when the folder is loaded."""
    port = FakePort()
    loop.run(Launch("mlx", str(folder), Settings(**settings), port))
    assert port.reason is not None and "hint:" in port.reason
    return port.reason.splitlines()[0]


# The same answers as ONNX.


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> tuple[Case, Case]:
    """One model for either engine, its weights on a grid; of this seed, no choice in the tests is so close that 1e-5 in a logit turns it."""
    root = tmp_path_factory.mktemp("pair")
    folders = tiny.build(root / "onnx", 2, eos=[], steps=16), tiny_mlx.build(root / "mlx", seed=2, eos=[], steps=16)
    onnx, mlx = (Case(each.name, each.name, lambda folder, _: folder, long=230, folder=each) for each in folders)
    return onnx, mlx


def test_onnx_and_mlx_agree_token_for_token(pair: tuple[Case, Case]) -> None:
    onnx, mlx = pair
    for seed, sampling in enumerate(
        (None, Sampling(1.0, seed=7), Sampling(1.4, top_p=0.9, seed=8), Sampling(0.8, top_k=20, min_p=0.02, seed=9))
    ):
        for length in (1, 3, 40, 200):
            tokens = prompt(seed * 10 + length, length)
            assert mlx.single(tokens, 40, sampling) == onnx.single(tokens, 40, sampling)


def test_onnx_and_mlx_agree_in_ragged_batches(pair: tuple[Case, Case]) -> None:
    rng = random.Random(3)
    asked: list[tuple[int, Admit]] = []
    for id, sampling in enumerate((*CONTROLS.values(), *[None] * 8), 1):
        if sampling is not None:
            bias = {token % tiny.VOCAB: value for token, value in sampling.logit_bias.items()}
            sampling = replace(sampling, logit_bias=bias, top_logprobs=id % 5 if id % 2 else None)
        asked.append((rng.randint(0, 40), Admit(id, prompt(id, rng.randint(1, 90)), rng.randint(5, 40), sampling)))
    ports = []
    for case in pair:
        port = FakePort()
        for step, order in asked:
            port.at(step, order)
        ports.append(case.run(port, max_batch=6))
    onnx, mlx = ports
    assert mlx.answers == onnx.answers
    assert mlx.finishes == onnx.finishes and len(mlx.finishes) == len(asked)
    assert mlx.logprobs.keys() == onnx.logprobs.keys() != set()
    for id, told in onnx.logprobs.items():
        for (own, top), (other, others) in zip(told, mlx.logprobs[id], strict=True):
            assert other == pytest.approx(own, abs=1e-4)
            assert [value for _, value in others] == pytest.approx([value for _, value in top], abs=1e-4)


# Import and folders.

PROBE = """
import sys
from pathlib import Path

def resident():
    return int(Path("/proc/self/statm").read_text().split()[1]) * 4096

import json, numpy, mlx.core, mlx.nn
before, known = resident(), set(sys.modules)
import emberd.mlx
from emberd.mlx_model import classes
classes({"model_type": "llama"})
after = resident()
from fakeport import FakePort, Settings
engine = emberd.mlx.load(sys.argv[1], Settings(), FakePort().fail)
print(json.dumps({"bytes": after - before, "new": sorted(set(sys.modules) - known), "modules": sorted(sys.modules)}))
"""


@pytest.mark.skipif(not Path("/proc/self/statm").exists(), reason="reads Linux's own figure of resident memory")
def test_a_cold_start_imports_no_transformers(llama_case: Case) -> None:
    done = subprocess.run(
        [sys.executable, "-c", PROBE, str(llama_case.folder)],
        capture_output=True,
        encoding="utf-8",
        timeout=120,
        check=True,
        env={"PYTHONPATH": ":".join(path for path in sys.path if path)},
    )
    told = json.loads(done.stdout)
    roots = {name.partition(".")[0] for name in told["modules"]}
    assert not roots & {"transformers", "huggingface_hub", "torch", "onnxruntime", "sentencepiece"}
    assert not {"mlx_lm.utils", "mlx_lm.generate", "mlx_lm.tokenizer_utils"} & set(told["modules"])
    assert "mlx_lm.models.llama" in told["modules"]
    assert told["bytes"] < 60 << 20
    # What there is to pay for, of which `make bench` tells the time.
    packages = {name.partition(".")[0] for name in told["new"]} - sys.stdlib_module_names
    assert packages <= {"emberd", "mlx", "mlx_lm", "numpy", "fakeport"}
    assert len([name for name in told["new"] if name.startswith("mlx_lm")]) < 12


@pytest.mark.parametrize("file", ["config.json", "model.safetensors"])
def test_a_missing_file_is_named(file: str, tmp_path: Path) -> None:
    (tiny_mlx.build(tmp_path) / file).unlink()
    assert f"holds no {file}" in refusal(tmp_path)


def test_damaged_weights_are_named(tmp_path: Path) -> None:
    weights = tiny_mlx.build(tmp_path) / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:5000])
    assert f"{weights} cannot be loaded" in refusal(tmp_path)


def test_weights_that_do_not_fit_the_config_are_refused(tmp_path: Path) -> None:
    tiny_mlx.build(tmp_path)
    (tmp_path / "config.json").write_text(json.dumps(tiny_mlx.LLAMA | {"num_hidden_layers": 3}))
    assert "cannot be loaded as llama: " in refusal(tmp_path)


def test_an_unknown_kind_of_model_is_named(tmp_path: Path) -> None:
    tiny_mlx.build(tmp_path)
    for kind, said in (
        ("gpt7", "knows no model of type 'gpt7'"),
        ("../llama", "gives '../llama'"),
        ("", "no model_type"),
    ):
        (tmp_path / "config.json").write_text(json.dumps(tiny_mlx.LLAMA | {"model_type": kind}))
        assert said in refusal(tmp_path)


def test_a_kind_that_shares_anothers_class_is_found_as_mlx_lm_finds_it() -> None:
    llama = classes({"model_type": "llama"})
    assert classes({"model_type": "mistral"}) == llama
    assert classes({"model_type": "falcon_mamba"}) == classes({"model_type": "mamba"}) != llama


def test_code_in_a_folder_is_not_run(tmp_path: Path) -> None:
    tiny_mlx.build(tmp_path)
    (tmp_path / "own.py").write_text("raise SystemExit('it was run')")
    (tmp_path / "config.json").write_text(json.dumps(tiny_mlx.LLAMA | {"model_file": "own.py"}))
    assert "brings its own code (own.py)" in refusal(tmp_path)


def test_weights_of_another_quantizer_are_refused_by_its_name(tmp_path: Path) -> None:
    tiny_mlx.build(tmp_path)
    (tmp_path / "config.json").write_text(
        json.dumps(tiny_mlx.LLAMA | {"quantization_config": {"quant_method": "gptq"}})
    )
    assert "quantized by gptq" in refusal(tmp_path)


def test_a_model_without_a_context_of_its_own_takes_the_one_that_is_asked_for(tmp_path: Path) -> None:
    tiny_mlx.build(tmp_path, {key: value for key, value in tiny_mlx.MAMBA.items() if key != "max_position_embeddings"})
    assert "gives no max_position_embeddings; hint: say how long" in refusal(tmp_path)
    port = FakePort().at(0, Admit(1, prompt(1, 5), 3))
    loop.run(Launch("mlx", str(tmp_path), Settings(context_length=500), port))
    assert port.capabilities is not None and port.capabilities.context_length == 500
    assert len(port.answers[1]) == 3


@pytest.mark.parametrize(
    "quantization",
    [{"group_size": 32, "bits": 4}, {"group_size": 64, "bits": 8}, {"group_size": 32, "bits": 4, "mode": "mxfp4"}],
    ids=["4 bits", "8 bits", "mxfp4"],
)
def test_quantized_weights_are_run_as_they_are(quantization: dict[str, Any], tmp_path: Path) -> None:
    packed = Model(str(tiny_mlx.build(tmp_path / "packed", quantization=quantization)), Settings())
    weights = tiny_mlx.llama_weights(0)
    parts = mx.load(str(tmp_path / "packed" / "model.safetensors"))
    for name in [each for each in parts if each.endswith(".scales")]:
        stem = name.removesuffix(".scales")
        weights[f"{stem}.weight"] = mx.dequantize(
            parts[f"{stem}.weight"], parts[name], parts.get(f"{stem}.biases"), dtype=mx.float32, **quantization
        )
    mx.save_safetensors(str(tiny_mlx.build(tmp_path / "wide") / "model.safetensors"), weights)
    wide = Model(str(tmp_path / "wide"), Settings())
    ids = mx.array([prompt(1, 20)])
    logits = [np.array(each(ids, each.new_caches())) for each in (packed, wide)]
    assert np.abs(logits[0] - logits[1]).max() < 1e-3 * np.abs(logits[1]).max()


def test_the_cpu_computes_in_32_bits(tmp_path: Path) -> None:
    folder = tiny_mlx.build(tmp_path)
    half = {name: value.astype(mx.float16) for name, value in mx.load(str(folder / "model.safetensors")).items()}
    mx.save_safetensors(str(folder / "model.safetensors"), half)
    logits = Model(str(folder), Settings())(mx.array([[5]]), Model(str(folder), Settings()).new_caches())
    assert logits.dtype == mx.float32


@pytest.mark.parametrize("kind", tiny_mlx.OTHERS)
def test_other_kinds_of_models_run_in_ragged_batches_and_from_snapshots(kind: str, tmp_path: Path) -> None:
    folder = tiny_mlx.build(tmp_path, tiny_mlx.OTHERS[kind], eos=[])
    case = Case(kind, "mlx", lambda folder, _: folder, long=230, folder=folder)
    port = FakePort()
    for id in range(1, 7):
        port.at(4 * id, Admit(id, prompt(id % 2, 40 + 9 * id), 30 - 3 * id))
    case.run(port, max_batch=3)
    assert port.reason is None and port.failures == {}
    assert port.capabilities is not None and port.capabilities.max_batch == 3
    assert port.cached
    for id in range(1, 7):
        alone = case.run(FakePort().at(0, Admit(1, prompt(id % 2, 40 + 9 * id), 30 - 3 * id)), cache_bytes=0)
        assert port.answers[id] == alone.answers[1]
        assert len(set(alone.answers[1])) > 3, "the answer wanders"


def test_heads_for_further_tokens_are_left_out_as_mlx_lms_classes_leave_them_out(tmp_path: Path) -> None:
    plain = tiny_mlx.build(tmp_path / "plain", tiny_mlx.OTHERS["qwen2"] | {"model_type": "mimo"}, eos=[])
    weights = mx.load(str(plain / "model.safetensors"))
    folder = tiny_mlx.build(tmp_path / "heads", tiny_mlx.OTHERS["qwen2"] | {"model_type": "mimo"}, eos=[])
    heads = {f"model.mtp_layers.0.{name}": mx.ones((4, 4)) for name in ("input_proj.weight", "mlp.up_proj.weight")}
    mx.save_safetensors(str(folder / "model.safetensors"), weights | heads)
    with_heads, without = (Case("mimo", "mlx", lambda folder, _: folder, 230, each) for each in (folder, plain))
    assert with_heads.single(prompt(1, 20), 20) == without.single(prompt(1, 20), 20)


def test_no_class_of_mlx_lm_has_heads_for_further_tokens() -> None:
    """Where this fails there is something to guess with, and `docs/mlx.md` says that there is not."""
    found = importlib.util.find_spec("mlx_lm")
    assert found is not None and found.origin is not None
    files = list((Path(found.origin).parent / "models").glob("*.py"))
    kept = re.compile(r"self\.\w*(mtp|nextn|eagle)\w*\s*=\s*(\[|nn\.|[A-Z]\w*\()")
    assert len(files) > 50
    assert [file.name for file in files if kept.search(file.read_text(encoding="utf-8"))] == []


# Requests.


def test_a_pass_that_runs_ahead_changes_no_answer(mlx_case: Case) -> None:
    rng = random.Random(8)
    orders = [
        (rng.randint(0, 40), Admit(id, prompt(id, rng.randint(1, 70)), rng.randint(1, 40))) for id in range(1, 20)
    ]
    orders += [(rng.randint(0, 60), Admit(50 + id, prompt(id, 9), 9, Sampling(seed=id))) for id in range(4)]
    cancels = [(step + rng.randint(1, 20), Cancel(order.id)) for step, order in orders[:8]]
    ports = []
    for ahead in (False, True):
        port = FakePort()
        for step, order in (*orders, *cancels):
            port.at(step, order)
        ports.append(serve(mlx_case, port, 32, ahead, max_batch=5))
    assert ports[0].pushes == ports[1].pushes
    assert any(len(each) > 20 for each in ports[0].answers.values())


def test_a_token_beyond_the_vocabulary_fails_its_request_alone(mlx_case: Case) -> None:
    port = FakePort().at(0, Admit(1, prompt(1, 5), 20)).at(4, Admit(2, [8, tiny.VOCAB + 1000, 9], 20))
    port.at(5, Admit(3, prompt(3, 5), 20))
    mlx_case.run(port)
    assert port.reason is None
    assert port.failures == {
        2: f"the prompt cannot be read: token id {tiny.VOCAB + 1000} is beyond the vocabulary of 320"
    }
    for id in (1, 3):
        assert port.answers[id] == mlx_case.single(prompt(id, 5), 20)


# Memory.


@pytest.mark.parametrize("kind", KINDS)
def test_the_bytes_of_a_sequence_are_known_before_it_runs(kind: str, tmp_path: Path) -> None:
    model = Model(str(tiny_mlx.build(tmp_path, KINDS[kind])), Settings())
    sizes = Sizes(model, 50)
    for count, pieces in itertools.product((1, 20, 100, 255), (1, 50)):
        caches = model.new_caches()
        tokens = prompt(1, count)
        for start in range(0, count, pieces):
            mx.eval(model(mx.array([tokens[start : start + pieces]]), caches))
        assert size(caches) <= sizes.of(count) <= size(caches) + sizes.of(1)


@pytest.mark.parametrize("sequences", [1, 2, 5])
def test_the_caches_of_all_requests_never_take_more_than_their_room(mlx_case: Case, sequences: int) -> None:
    """Answers join, grow, make room and leave; what is counted is what is there, padding and spare room of arrays included."""
    model = Model(str(mlx_case.folder), Settings())
    budget = sequences * Sizes(model, 24).of(192)
    port = FakePort().at(0, *(Admit(id, prompt(id, 30 + 9 * id), 40 + 7 * id) for id in range(1, 7)))
    port.at(20, Cancel(2)).leave(35, 4)
    engine = MlxEngine(model, port.fail, 24, 0, budget)
    step, most = engine.step, 0

    def checked() -> list[object]:
        nonlocal most
        made = step()
        rows, budgeted = engine._rows, engine._budget
        there = size(rows._batch._caches) + sum(size(each.caches) for each in rows._prompts.values())
        assert there <= budgeted.resident <= budget
        held = {each.id for each in (*engine._running, *engine._prompts) if each.room}
        assert set(budgeted._rooms) == held
        most = max(most, there)
        return made

    engine.step = checked  # type: ignore[method-assign, assignment]
    loop.serve(engine, port)
    assert engine._budget.resident == 0
    engine.close()
    assert port.violations == [] and port.failures == {}
    assert most > budget // 4
    for id in (1, 3, 5, 6):
        assert port.answers[id] == mlx_case.single(prompt(id, 30 + 9 * id), 40 + 7 * id)


def test_room_is_counted_as_that_of_the_longest_for_each() -> None:
    budget = BatchBudget(lambda tokens: 10 + tokens, 3 * (10 + 128))
    one, two, three = (Request(Admit(id, [1], 1)) for id in (1, 2, 3))  # type: ignore[arg-type]
    assert budget.could_hold(384) and not budget.could_hold(385)
    assert budget.hold(one, 65) and (one.room, budget.resident) == (128, 138)
    assert budget.hold(two, 3) and (two.room, budget.resident) == (64, 2 * 138)
    assert budget.hold(one, 100) and budget.has(128, 0) and not budget.has(129, 0) and not budget.has(65, 1)
    assert budget.hold(three, 128) and not budget.hold(two, 129) and two.room == 64
    budget.give_back(three)
    budget.give_back(three)
    assert three.room == 0 and budget.hold(two, 129) and budget.resident == 2 * (10 + 192)
    budget.give_back(two)
    budget.give_back(one)
    assert budget.resident == 0 and not BatchBudget(lambda tokens: 10, -5).could_hold(1)


def test_a_closed_engine_gives_its_memory_back(llama_case: Case) -> None:
    gc.collect()
    before = mx.get_active_memory()
    engine = loop.load(Launch("mlx", str(llama_case.folder), Settings(), FakePort()))
    engine.take(Admit(1, prompt(1, 150), 50))
    engine.take(Admit(2, prompt(2, 10), 50))
    for _ in range(6):
        engine.step()
    assert mx.get_active_memory() > before + (200 << 10)
    engine.close()
    gone = weakref.ref(engine)
    del engine
    gc.collect()
    assert gone() is None
    assert mx.get_active_memory() <= before
    assert mx.get_cache_memory() == 0


class FakeDevice:
    """Apple silicon, as far as memory goes."""

    def __init__(self, **info: int) -> None:
        self.info = info
        self.limits = {"wired": 0, "cache": 77}
        self.asked: list[tuple[str, int]] = []

    def device_info(self) -> dict[str, Any]:
        return self.info

    def get_active_memory(self) -> int:
        return 6 << 30

    def _set(self, name: str, limit: int) -> int:
        self.asked.append((name, limit))
        before, self.limits[name] = self.limits[name], limit
        return before

    def set_wired_limit(self, limit: int, /) -> int:
        return self._set("wired", limit)

    def set_cache_limit(self, limit: int, /) -> int:
        return self._set("cache", limit)


def test_the_limits_are_those_that_the_device_recommends_and_are_taken_back() -> None:
    device = FakeDevice(max_recommended_working_set_size=16 << 30)
    restore = mlx_memory.limit(device)
    assert device.limits == {"wired": 16 << 30, "cache": 2 << 30}
    restore()
    assert device.limits == {"wired": 0, "cache": 77}
    assert mlx_memory.kv_budget(device) == 5 << 30


def test_a_device_that_recommends_nothing_is_left_as_it_is() -> None:
    device = FakeDevice()
    mlx_memory.limit(device)()
    assert device.asked == []
    assert mlx_memory.kv_budget(device) > 0


def test_an_engine_sets_the_limits_while_it_lives(
    llama_case: Case, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    device = FakeDevice(max_recommended_working_set_size=16 << 30)
    monkeypatch.setattr(mlx_memory, "mx", device)
    engine = loop.load(Launch("mlx", str(llama_case.folder), Settings(), FakePort()))
    assert device.limits == {"wired": 16 << 30, "cache": 2 << 30}
    engine.close()
    assert device.limits == {"wired": 0, "cache": 77}
    assert "no model folder" in refusal(tmp_path / "none")
    assert device.limits == {"wired": 0, "cache": 77}


# Caches.


@pytest.mark.parametrize("kind", KINDS)
def test_a_copy_of_a_cache_lives_on_its_own(kind: str, tmp_path: Path) -> None:
    model = Model(str(tiny_mlx.build(tmp_path, KINDS[kind])), Settings())

    def logits(tokens: list[int], caches: list[Any]) -> Any:
        return np.array(model(mx.array([tokens]), caches)[:, -1])

    caches = model.new_caches()
    logits(prompt(1, 20), caches)
    assert can_cut(caches) == (kind in ("llama", "sliding"))
    assert always_cut(model.new_caches()) == (kind == "llama")
    twin = copied(caches)
    for n in range(30):  # the original goes on, beyond the window
        logits([n + 8], caches)
    after = logits(prompt(2, 5), copied(twin))
    fresh = model.new_caches()
    logits(prompt(1, 20), fresh)
    assert np.abs(after - logits(prompt(2, 5), fresh)).max() < 1e-4
    if can_cut(twin):
        short = copied(twin, 12)
        fresh = model.new_caches()
        logits(prompt(1, 20)[:12], fresh)
        assert np.abs(logits(prompt(2, 5), short) - logits(prompt(2, 5), fresh)).max() < 1e-4
