"""How far an imported model folder is from the dequantized GGUF: KL divergence and agreement of the likeliest token.

    python tests/reference/kl.py MODEL.gguf FOLDER [FOLDER ...]

Teacher-forced over a fixed text: the reference in `llama.py` sees it at once, a folder token by token (decode) and in
pieces (prefill), so both kernels are measured.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
from folder import Folder
from llama import Llama
from tokenizers import Tokenizer

if TYPE_CHECKING:
    from numpy.typing import NDArray

TEXT = """The small harbour town wakes before the sun. Fishermen untie their boats while the bakery on the corner fills
the street with the smell of bread. By seven o'clock the first ferry leaves for the islands, carrying letters, milk and a
handful of sleepy students. Mrs. Alvarez, who has kept the lighthouse for twenty-three years, writes the weather into a thick
blue book: wind from the west, 12 knots, clear sky, sea calm. She says that every ship has its own voice, and that she can
tell them apart in the fog by the sound of their engines. In the afternoon the market closes and the children run down to
the beach. They build walls of sand against the tide, although they know that the water always wins. When evening comes, the
lamps are lit one by one, and the old men sit outside the cafe and argue about football, politics and the price of fish. At
night only the lighthouse moves, turning slowly, counting the hours for those who cannot sleep.""".replace("\n", " ")

# "What is the capital of France?" in SmolLM2's template with its default system prompt, and what fp32 implementations answer.
GOLDEN_PROMPT = [
    *(1, 9690, 198, 2683, 359, 253, 5356, 5646, 11173, 3365, 3511, 308, 34519, 28, 7018, 411, 407, 19712, 8182, 2, 198),
    *(1, 4093, 198, 1780, 314, 260, 3575, 282, 4649, 47, 2, 198, 1, 520, 9531, 198),
]
GOLDEN_ANSWER = [504, 3575, 282, 4649, 314, 7042, 30, 2]


class Distance(NamedTuple):
    """How far one set of logits is from another, over all their positions."""

    kl: float
    """Mean Kullback-Leibler divergence from the reference, nats."""
    worst: float
    """The largest of the positions' divergences, nats."""
    top1: float
    """Share of positions whose likeliest token is the same, 0 to 1."""
    positions: int


def log_softmax(logits: NDArray[np.float32]) -> NDArray[np.float64]:
    """Return log probabilities of logits, over the last axis."""
    shifted = logits.astype(np.float64) - logits.max(-1, keepdims=True)
    return np.asarray(shifted - np.log(np.exp(shifted).sum(-1, keepdims=True)))


def distance(reference: NDArray[np.float32], other: NDArray[np.float32]) -> Distance:
    """Compare logits `[positions, vocabulary]` with a reference of the same shape."""
    p, q = log_softmax(reference), log_softmax(other)
    kl = (np.exp(p) * (p - q)).sum(-1)
    return Distance(float(kl.mean()), float(kl.max()), float((p.argmax(-1) == q.argmax(-1)).mean()), len(kl))


def main(gguf: Path, folders: list[Path]) -> None:
    """Print a line for each folder."""
    reference = Llama(gguf)
    text = Tokenizer.from_file(str(folders[0] / "tokenizer.json")).encode(TEXT, add_special_tokens=False)
    ids = [1, *text.ids]
    wanted = reference.logits(ids)
    print(f"reference answer as published: {reference.greedy(GOLDEN_PROMPT, {2}, 20) == GOLDEN_ANSWER}")
    chunks = [64] * (len(ids) // 64)
    for path in folders:
        decode = distance(wanted, Folder(path).logits(ids))
        prefill = distance(wanted[63::64], Folder(path).logits(ids, chunks))
        answer = Folder(path).greedy(GOLDEN_PROMPT, {2}, 20)
        print(
            f"{path.name}: decode kl {decode.kl:.6f} (worst {decode.worst:.4f}), top-1 {decode.top1:.1%} of {decode.positions}; "
            f"prefill kl {prefill.kl:.6f} of {prefill.positions}; answer as published: {answer == GOLDEN_ANSWER}"
        )


if __name__ == "__main__":
    main(Path(sys.argv[1]), [Path(folder) for folder in sys.argv[2:]])
