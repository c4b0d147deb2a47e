"""What the import keeps of a model: its distance from the same weights in 32-bit floats, and the published answer.

The reference is an independent forward pass in numpy (`reference/llama.py`), over the whole text at once.
"""

from __future__ import annotations

import sys
import threading
from pathlib import Path
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any, Literal

import numpy as np
import onnx
import pytest

sys.path.append(str(Path(__file__).parent / "reference"))

from folder import Folder
from kl import GOLDEN_ANSWER, GOLDEN_PROMPT, TEXT, distance
from llama import Llama
from tokenizers import Tokenizer

from emberd import _core, loop
from support.process import eventually

if TYPE_CHECKING:
    from numpy.typing import NDArray

pytestmark = [pytest.mark.model, pytest.mark.timeout(600)]

PIECE = 64
"""Tokens of a prefill; what remains of the text is read in one more."""


@pytest.fixture(scope="module")
def folder(model_home: Path) -> Path:
    """The model as `emberd models pull` leaves it."""
    return model_home / "models" / "smollm2-135m"


@pytest.fixture(scope="module")
def text(folder: Path) -> list[int]:
    """The text's ids, after the beginning of a sequence."""
    tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
    return [1, *tokenizer.encode(TEXT, add_special_tokens=False).ids]


@pytest.fixture(scope="module")
def wanted(gguf: Path, text: list[int]) -> NDArray[np.float32]:
    """The reference's logits after each id of the text."""
    return Llama(gguf).logits(text)


WAYS = pytest.mark.parametrize(
    ("kind", "kernels"),
    [("int16", "emberd"), ("float", "emberd"), ("int8", "emberd"), ("float", "onnxruntime"), ("int8", "onnxruntime")],
)
"""Activations and operators: the engine's own choice, and the others that there are."""


def opened(folder: Path, kind: Literal["int16", "float", "int8"], kernels: str) -> Folder:
    """The folder as the engine opens it with these activations and these operators."""
    own = kernels == "emberd"
    graph = _core.rewritten((folder / "model.onnx").read_bytes(), own=own, activations=kind)
    assert (graph is None) == (kernels == "onnxruntime" and kind != "int8")
    return Folder(folder, graph=graph, operators=_core.__file__ if own else "")


@WAYS
def test_the_import_keeps_the_distribution(
    kind: Literal["int16", "float", "int8"], kernels: str, folder: Path, text: list[int], wanted: NDArray[np.float32]
) -> None:
    found = distance(wanted, opened(folder, kind, kernels).logits(text))
    assert found.positions >= 160
    assert found.kl <= (0.01 if kind == "int8" else 0.0005), found
    assert found.top1 >= 0.95, found
    # No single position is far off either, which a mean over many could hide.
    assert found.worst <= 0.05, found


@WAYS
def test_reading_in_pieces_keeps_it_too(
    kind: Literal["int16", "float", "int8"], kernels: str, folder: Path, text: list[int], wanted: NDArray[np.float32]
) -> None:
    pieces = [PIECE] * (len(text) // PIECE)
    pieces += [len(text) - sum(pieces)]
    ends = np.cumsum(pieces) - 1
    found = distance(wanted[ends], opened(folder, kind, kernels).logits(text, pieces))
    assert found.kl <= 0.01, found


def test_rounded_activations_are_one_attribute_of_each_product_and_nothing_else(folder: Path) -> None:
    before = (folder / "model.onnx").read_bytes()
    after = _core.rewritten(before, own=False, activations="int8")
    assert after is not None
    changed = [place for place, (one, other) in enumerate(zip(before, after, strict=True)) if one != other]
    floats, rounded = (
        [
            next(each.i for each in node.attribute if each.name == "accuracy_level")
            for node in onnx.load_model_from_string(graph).graph.node
            if node.op_type == "MatMulNBits"
        ]
        for graph in (before, after)
    )
    layers = 30
    assert len(changed) == floats.count(1) == 4 * layers, "queries, keys and values; their output; gate and up; down"
    assert set(floats) == {1, 4} and set(rounded) == {4} and len(rounded) == len(floats)
    assert _core.Settings(activations="float").activations == "float"


def test_activations_and_kernels_that_are_none_are_refused() -> None:
    assert (_core.Settings().activations, _core.Settings().kernels) == (None, None)
    assert _core.Settings(kernels="onnxruntime").kernels == "onnxruntime"
    with pytest.raises(ValueError, match="kernels are 'cuda'; hint: emberd or onnxruntime"):
        _core.Settings(kernels="cuda")  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="activations are 'int4'; hint: int16, float or int8"):
        _core.Settings(activations="int4")  # type: ignore[arg-type]


def test_the_reference_and_the_measure_can_tell_a_difference(wanted: NDArray[np.float32]) -> None:
    # A measure that found everything near would let every import pass.
    assert distance(wanted, wanted)[:3] == (0.0, 0.0, 1.0)
    assert distance(wanted, wanted * 1.1).kl > 0.001
    assert distance(wanted, np.roll(wanted, 1, axis=0)).kl > 1


def test_the_tokenizer_and_the_template_give_the_published_prompt(folder: Path) -> None:
    tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
    prompt = (
        "<|im_start|>system\nYou are a helpful AI assistant named SmolLM, trained by Hugging Face<|im_end|>\n"
        "<|im_start|>user\nWhat is the capital of France?<|im_end|>\n<|im_start|>assistant\n"
    )
    assert tokenizer.encode(prompt, add_special_tokens=False).ids == GOLDEN_PROMPT
    assert tokenizer.decode(GOLDEN_ANSWER) == "The capital of France is Paris."


def answers(folder: Path, prompt: list[int], **settings: Any) -> tuple[list[int], str | None]:
    """What the engine answers over a port, greedily, and how it ends."""
    doors, port = _core.port()
    launch = SimpleNamespace(engine="onnx", folder=str(folder), settings=_core.Settings(**settings), port=port)
    thread = threading.Thread(target=loop.run, args=(launch,))
    thread.start()
    try:
        reader = submitted(doors, prompt)
        ids: list[int] = []
        finish = None
        while (news := reader.read()) is not None:
            ids += news[0]
            finish = news[1] or finish
        return ids, finish
    finally:
        doors.close()
        thread.join()


def submitted(doors: _core.Doors, prompt: list[int]) -> _core.Reader:
    """A request, as soon as the engine is ready."""

    def submit() -> _core.Reader | None:
        try:
            return doors.submit(prompt, 32)
        except RuntimeError as error:
            assert "still loading" in str(error), error
            return None

    return eventually(submit, "the engine is ready")


# Not bytes: the first token of the answer is 0.08 ahead of the next, which they decide by chance.
@pytest.mark.parametrize(
    ("kind", "kernels"), [("int16", "emberd"), ("float", "emberd"), ("float", "onnxruntime"), (None, None)]
)
@pytest.mark.parametrize("chunk", [None, 5], ids=["prompt in one piece", "prompt in pieces of 5"])
def test_the_engine_gives_the_published_answer_token_for_token(
    chunk: int | None, kind: str | None, kernels: str | None, folder: Path
) -> None:
    found = answers(folder, GOLDEN_PROMPT, prefill_chunk=chunk, activations=kind, kernels=kernels)
    assert found == (GOLDEN_ANSWER, "stop")
