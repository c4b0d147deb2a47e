"""What the engine over MLX is measured against, made ready: mlx-lm with all that it needs, and models that both can run.

mlx-lm lies in an environment of its own in `.cache`, since ours is to work without what it imports. The models have random
weights, and words for tokens: on a processor MLX takes 0.15 s for a token of the default model, whatever is around it. Nothing
is measured here but a start.
"""

from __future__ import annotations

import contextlib
import json
import os
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

from engine_items import KINDS, WORDS
from engine_peers import CACHE, fresh, make
from harness import ROOT, BenchError, healthy, serving

REQUIREMENTS = ROOT / "requirements" / "mlx-lm.txt"
PLAIN = {"HF_HUB_OFFLINE": "1", "PYTHONWARNINGS": "ignore"}
"""The environment of mlx-lm's programs: everything is here."""

SIZES: dict[str, dict[str, int]] = {
    "tiny": {"max_position_embeddings": 1024},
    "small": {
        "hidden_size": 256,
        "num_hidden_layers": 8,
        "intermediate_size": 768,
        "num_attention_heads": 8,
        "num_key_value_heads": 4,
        "head_dim": 32,
        "max_position_embeddings": 2048,
    },
}
"""Of models, where they are not those of the tests' tiny one: 0.1 and 6 million weights."""

EOS = 2
"""The token that ends an answer."""


def mlx_lm() -> str:
    """The Python of an environment that has mlx-lm with everything it imports."""
    folder = CACHE / "mlx-lm"
    python = folder / "bin" / "python"
    stamp, wanted = folder / "packages", REQUIREMENTS.read_text(encoding="utf-8")
    if not stamp.is_file() or stamp.read_text(encoding="utf-8") != wanted:
        make([sys.executable, "-m", "venv", "--clear", str(folder)], "making an environment for mlx-lm")
        install = [str(python), "-m", "pip", "install", "--quiet", "--no-deps", "--requirement", str(REQUIREMENTS)]
        make(install, "fetching mlx-lm and what it needs")
        stamp.write_text(wanted, encoding="utf-8")
    return str(python)


@contextlib.contextmanager
def server(python: str, folder: Path) -> Iterator[str]:
    """A running `mlx_lm.server`; gives its address."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    command = [python, "-m", "mlx_lm", "server", "--model", str(folder), "--host", "127.0.0.1", "--port", str(port)]
    with serving([*command, "--log-level", "WARNING"], PLAIN) as running:
        address = f"127.0.0.1:{port}"
        running.await_true(lambda: healthy(address))
        yield address


def first_text(python: str, folder: Path) -> float:
    """Milliseconds from the start of `mlx_lm.generate` to the first token of its answer."""
    command = [
        python,
        "-m",
        "mlx_lm",
        "generate",
        "--model",
        str(folder),
        "--prompt",
        "w40 w41 w42",
        "--max-tokens",
        "1",
    ]
    begin = time.perf_counter()
    with subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, env={**os.environ, **PLAIN}
    ) as running:
        assert running.stdout is not None
        answer = b""
        for line in iter(running.stdout.readline, b""):
            if line.startswith(b"====="):  # what it says before an answer
                answer = running.stdout.read(1)
                break
        took = (time.perf_counter() - begin) * 1e3
        running.stdout.read()
    if answer in (b"", b"\n", b"="):
        raise BenchError(f"{' '.join(command)} gave no answer")
    return took


def model(name: str) -> Path:
    """A model of `SIZES` with random weights and a tokenizer of words, among them those of the texts that are asked; made once."""
    target = CACHE / f"mlx-{name}"
    if not target.is_dir():
        with fresh(target) as folder:
            make([sys.executable, __file__, str(folder), json.dumps(SIZES[name])], f"writing a {name} model")
            config = json.loads((folder / "config.json").read_bytes())
            asked = ["Write", "a", "long", "story", "about", "and", *KINDS, *WORDS, *(f"{word}." for word in WORDS)]
            names = [*asked, *(f"w{id}" for id in range(config["vocab_size"] - len(asked)))]
            vocabulary = {name: id for id, name in enumerate(names)}
            words = {"type": "WordLevel", "vocab": vocabulary, "unk_token": "w0"}
            tokenizer = {"version": "1.0", "added_tokens": [], "pre_tokenizer": {"type": "WhitespaceSplit"}}
            (folder / "tokenizer.json").write_text(json.dumps({**tokenizer, "model": words}), encoding="utf-8")
            template = "{% for message in messages %}{{ message['content'] }} {% endfor %}"
            told = {"tokenizer_class": "PreTrainedTokenizerFast", "unk_token": "w0", "chat_template": template}
            (folder / "tokenizer_config.json").write_text(json.dumps(told), encoding="utf-8")
    return target


def _write(folder: Path, sizes: dict[str, int]) -> None:
    """Writes weights and config. MLX is imported in a process of its own."""
    sys.path.append(str(ROOT / "tests" / "engines"))
    import mlx.core as mx

    import tiny_mlx

    # A kind for which transformers takes the tokenizer that is in the folder.
    config = tiny_mlx.LLAMA | sizes | {"eos_token_id": EOS}
    mx.save_safetensors(str(folder / "model.safetensors"), tiny_mlx.other_weights(config, 0), {"format": "mlx"})
    (folder / "config.json").write_text(json.dumps(config), encoding="utf-8")


if __name__ == "__main__":
    _write(Path(sys.argv[1]), json.loads(sys.argv[2]))
