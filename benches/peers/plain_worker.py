"""The peer of the worker benchmark: one process that takes requests off one queue and answers one after the other.

The smallest program that serves the same lines faithfully, and shaped like the workers that emberd stands in for: a
ping is answered at once, the model is loaded with the first request, a stop string is looked for in what was made, and
nothing is batched, cancelled or bounded. It runs the same model folder by onnxruntime with the same threads.
"""

from __future__ import annotations

import argparse
import asyncio
import json
from pathlib import Path
from typing import Any


class Model:
    """The model behind the queue: a prompt in, the text of a greedy answer out."""

    def __init__(self, folder: Path, threads: int) -> None:
        import jinja2
        import numpy as np
        import onnxruntime as ort
        import tokenizers

        self._np, self._ort = np, ort
        config = json.loads((folder / "config.json").read_text())
        eos = config["eos_token_id"]
        self._eos = set(eos if isinstance(eos, list) else [eos])
        environment = jinja2.Environment(trim_blocks=True, lstrip_blocks=True)
        self._template = environment.from_string(
            json.loads((folder / "tokenizer_config.json").read_text())["chat_template"]
        )
        self._tokenizer = tokenizers.Tokenizer.from_file(str(folder / "tokenizer.json"))
        settings = ort.SessionOptions()
        settings.intra_op_num_threads, settings.inter_op_num_threads = threads, 1
        # As emberd does it (`py/emberd/session.py`).
        settings.add_session_config_entry("session.intra_op.spin_duration_us", "20")
        settings.add_session_config_entry("session.intra_op.spin_backoff_max", "64")
        self._session = ort.InferenceSession(str(folder / "model.onnx"), settings, providers=["CPUExecutionProvider"])
        self._window = config["max_position_embeddings"]
        self._mask = np.zeros((1, self._window), np.int64)
        self._argmax = np.zeros(1, np.int64)
        self._next = np.zeros((1, 1), np.int64)
        caches = [each for each in self._session.get_inputs() if each.name.startswith("past_key_values.")]
        self._past = {
            each.name: np.zeros((1, each.shape[1], self._window, each.shape[3]), np.float32) for each in caches
        }
        self._decode = self._bind(self._next)

    def _bind(self, tokens: Any) -> Any:
        """Everything bound once: what the fastest plain loop would do."""
        binding = self._session.io_binding()

        def value(array: Any) -> Any:
            return self._ort.OrtValue.ortvalue_from_numpy(array)

        binding.bind_ortvalue_input("input_ids", value(tokens))
        binding.bind_ortvalue_input("attention_mask", value(self._mask))
        for name, array in self._past.items():
            binding.bind_ortvalue_input(name, value(array))
            binding.bind_ortvalue_output(name.replace("past_key_values.", "present."), value(array))
        binding.bind_ortvalue_output("argmax", value(self._argmax))
        return binding

    def chat(self, request: dict[str, Any]) -> str:
        """The text of one answer."""
        prompt = self._template.render(messages=request["messages"], add_generation_prompt=True, enable_thinking=False)
        ids = self._tokenizer.encode(prompt + request.get("prefill", ""), add_special_tokens=False).ids
        length = len(ids)
        self._mask[:] = 0
        self._mask[0, :length] = 1
        tokens = self._np.array([ids], self._np.int64)  # kept until the run is over: a binding does not own it
        self._session.run_with_iobinding(self._bind(tokens))
        made: list[int] = []
        while (token := int(self._argmax[0])) not in self._eos:
            made.append(token)
            text: str = self._tokenizer.decode(made)
            if len(made) == request["maxNewTokens"] or (request.get("stop") and request["stop"] in text):
                break
            self._next[0, 0] = token
            self._mask[0, length] = 1
            length += 1
            self._session.run_with_iobinding(self._decode)
        return self._tokenizer.decode(made)


async def main() -> None:
    """Serves the socket until it is ended."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--socket", required=True)
    parser.add_argument("--tag", default="bench")
    parser.add_argument("--folder", type=Path, required=True, help="a model folder with model.onnx")
    parser.add_argument("--threads", type=int, required=True, help="compute threads")
    options = parser.parse_args()
    jobs: asyncio.Queue[tuple[asyncio.StreamWriter, dict[str, Any]]] = asyncio.Queue()

    def say(writer: asyncio.StreamWriter, message: dict[str, Any]) -> None:
        writer.write(json.dumps(message, separators=(",", ":")).encode() + b"\n")

    async def work() -> None:
        model: Model | None = None
        while True:
            writer, request = await jobs.get()
            if model is None:
                model = await asyncio.to_thread(Model, options.folder, options.threads)
            if request["type"] == "load":
                say(writer, {"type": "loaded", "id": request["id"]})
            else:
                text = await asyncio.to_thread(model.chat, request)
                say(writer, {"type": "text", "id": request["id"], "text": text})

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        while line := await reader.readline():
            request = json.loads(line)
            if request["type"] == "ping":
                say(writer, {"type": "pong", "id": request["id"], "tag": options.tag})
            else:
                jobs.put_nowait((writer, request))

    server = await asyncio.start_unix_server(serve, options.socket)
    print(f"listening on {options.socket}", flush=True)
    async with server:
        await work()


if __name__ == "__main__":
    asyncio.run(main())
