"""How faithful imported models are: `make eval`. KL divergence and top-1 agreement against 32-bit floats, and golden answers.

The reference is the forward pass in numpy of `tests/reference`, on the file that a folder was imported from, over the
fixed text there. Each folder sees the text token by token (decode) and in pieces (prefill), so that the kernels of both
are measured. The goldens in `tests/reference/goldens.json` are greedy answers of that reference, token for token. Ends
with 1 where a mean divergence is above `BAR`. Speed is not measured here.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from engine_peers import CACHE, gguf_file
from harness import ROOT, BenchError
from items import find_folder

REFERENCE = ROOT / "tests" / "reference"
sys.path.append(str(REFERENCE))
from folder import Folder  # noqa: E402 - it lies in a folder that has just been named
from kl import GOLDEN_ANSWER, GOLDEN_PROMPT, TEXT, distance  # noqa: E402
from llama import Llama  # noqa: E402
from tokenizers import Tokenizer  # noqa: E402

if TYPE_CHECKING:
    from numpy.typing import NDArray

BAR = 0.01
"""Nats: the largest mean divergence of a model that may be used."""

GOLDENS = REFERENCE / "goldens.json"
SURE = 0.25
"""A golden's tokens are at least this far, in logits, ahead of the next: none of them is a matter of rounding."""

PIECE = 64
"""Tokens of a prefill."""

QUESTIONS = (
    "Who wrote Romeo and Juliet?",
    "Repeat after me: the lamp is lit.",
    "What color is the sky?",
    "How many days are in a week?",
    "What is the opposite of hot?",
)
SYSTEM = "You are a helpful AI assistant named SmolLM, trained by Hugging Face"
HEAD = ("form", "decode: KL", "worst", "top-1", "prefill: KL", "top-1", "goldens", "")


def chat(tokenizer: Tokenizer, text: str) -> list[int]:
    """The ids of a question in ChatML."""
    turns = "".join(f"<|im_start|>{role}\n{said}<|im_end|>\n" for role, said in (("system", SYSTEM), ("user", text)))
    ids: list[int] = tokenizer.encode(f"{turns}<|im_start|>assistant\n", add_special_tokens=False).ids
    return ids


def make_goldens(reference: Llama, folder: Path, tokenizer: Tokenizer, tokens: int) -> list[dict[str, Any]]:
    """Greedy answers of the reference to `QUESTIONS`, each up to where it is not sure.

    The folder guesses them, so that the reference, which has no cache, needs one pass: what it would have said at each
    place is what counts.
    """
    made = []
    for text in QUESTIONS:
        prompt = chat(tokenizer, text)
        guess = Folder(folder).greedy(prompt, {2}, tokens)
        answer: list[int] = []
        for token, logits in zip(guess, reference.logits(prompt + guess)[len(prompt) - 1 :], strict=False):
            best = np.argsort(logits)[-2:]
            if token != best[1] or logits[best[1]] - logits[best[0]] < SURE:
                break
            answer.append(token)
        made.append({"text": text, "prompt": prompt, "answer": answer, "says": tokenizer.decode(answer)})
    return made


def goldens() -> list[tuple[list[int], list[int]]]:
    """Prompts and what follows them."""
    kept = [(golden["prompt"], golden["answer"]) for golden in json.loads(GOLDENS.read_text())]
    return [(GOLDEN_PROMPT, GOLDEN_ANSWER), *kept]


def imported(gguf: Path, form: str, importer: list[str]) -> Path:
    """A folder with the file in another form; the command line makes the exact one alone."""
    folder = CACHE / "eval" / form
    if not (folder / "emberd.json").is_file():
        folder.parent.mkdir(parents=True, exist_ok=True)
        done = subprocess.run([*importer, str(gguf), str(folder), form], cwd=ROOT, check=False)
        if done.returncode != 0:
            raise BenchError(f"the import as {form} ended with {done.returncode}")
    return folder


def evaluate(opened: Callable[[], Folder], ids: list[int], wanted: NDArray[np.float32]) -> tuple[tuple[str, ...], bool]:
    """The cells of a row, and whether what is `opened` may be used."""
    pieces = [PIECE] * (len(ids) // PIECE) + ([rest] if (rest := len(ids) % PIECE) else [])
    decode = distance(wanted, opened().logits(ids))
    prefill = distance(wanted[np.cumsum(pieces) - 1], opened().logits(ids, pieces))
    asked = goldens()
    same = sum(opened().greedy(prompt, {2}, len(answer)) == answer for prompt, answer in asked)
    good = decode.kl <= BAR and prefill.kl <= BAR
    figures = [f"{decode.kl:.6f}", f"{decode.worst:.4f}", f"{decode.top1:.1%} of {decode.positions}"]
    figures += [f"{prefill.kl:.6f}", f"{prefill.top1:.0%} of {prefill.positions}"]
    return (*figures, f"{same} of {len(asked)}", "ok" if good else "**miss**"), good


def parse() -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folders", nargs="*", type=Path, help="further folders that were imported from the same file")
    parser.add_argument("--model", default="smollm2-135m", help="the model (default smollm2-135m)")
    parser.add_argument("--folder", type=Path, help="that model's folder; found when not given")
    parser.add_argument("--gguf", type=Path, help="the file it was imported from; fetched when not given")
    parser.add_argument(
        "--forms", default="fast,fp32", help="other forms to import and measure, or '' (default fast,fp32)"
    )
    parser.add_argument("--importer", help="the import example; built and run by cargo when not given")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--make-goldens", action="store_true", help="write the goldens anew, by the reference")
    return parser.parse_args()


def main() -> int:
    """0: all within the bar; 1: one is not, or could not be measured."""
    options = parse()
    folder = options.folder or find_folder(options.model)
    gguf = options.gguf or gguf_file(folder)
    tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
    reference = Llama(gguf)
    if options.make_goldens:
        made = make_goldens(reference, folder, tokenizer, 24)
        lines = ",\n".join(json.dumps(golden, ensure_ascii=False) for golden in made)
        GOLDENS.write_text(f"[\n{lines}\n]\n", encoding="utf-8")
        print(*(f"{golden['text']} → {golden['says']}" for golden in made), sep="\n")
        return 0
    ids = [1, *tokenizer.encode(TEXT, add_special_tokens=False).ids]
    wanted = reference.logits(ids)
    importer = [options.importer] if options.importer else ["cargo", "run", "--release", "--locked", "--quiet"]
    importer += [] if options.importer else ["--example", "import", "--"]
    folders = {form: imported(gguf, form, importer) for form in filter(None, options.forms.split(","))}
    folders |= {path.name: path for path in options.folders}
    threads = options.threads
    opened: dict[str, Callable[[], Folder]] = {
        "exact": lambda: Folder(folder, threads=threads),
        "as served": lambda: Folder.served(folder, threads=threads),
    }
    opened |= {name: partial(Folder, path, threads=threads) for name, path in folders.items()}
    print(f"{gguf.name}, {len(ids)} tokens; KL in nats, bar {BAR:g}\n\n| {' | '.join(HEAD)} |\n|{'---|' * len(HEAD)}")
    good = True
    for name, each in opened.items():
        row, fine = evaluate(each, ids, wanted)
        good &= fine
        print(f"| {' | '.join((name, *row))} |", flush=True)
    return 0 if good else 1


if __name__ == "__main__":
    try:
        sys.exit(main())
    except BenchError as failure:
        sys.exit(f"error: {failure}")
