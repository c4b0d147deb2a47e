"""onnxruntime-genai's generator on a model folder, as a peer of the engine: prints its rates as JSON.

It runs in an environment that has onnxruntime-genai, and imports nothing of this project. Greedy, rows of one length,
nothing around the generator. The first generator warms the model up and is not counted.
"""

from __future__ import annotations

import argparse
import json
import time

import numpy as np
import onnxruntime_genai as og


def once(model: og.Model, prompts: np.ndarray, tokens: int) -> tuple[float, float]:
    """Seconds to the first token of all rows, and seconds for the others."""
    rows, length = prompts.shape
    params = og.GeneratorParams(model)
    # min_length: an answer that ended early would leave its row idle.
    params.set_search_options(batch_size=rows, min_length=length + tokens, max_length=length + tokens, do_sample=False)
    generator = og.Generator(model, params)
    start = time.perf_counter()
    generator.append_tokens(prompts)
    generator.generate_next_token()
    first = time.perf_counter()
    for _ in range(tokens - 1):
        generator.generate_next_token()
    return first - start, time.perf_counter() - first


def main() -> None:
    """Prints `{"first_s", "tokens_per_s"}`: medians of the turns."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--folder", required=True, help="a model folder with genai_config.json")
    parser.add_argument("--batch", type=int, default=1, help="rows that decode together")
    parser.add_argument("--prompt-tokens", type=int, required=True)
    parser.add_argument("--tokens", type=int, required=True, help="tokens of each answer, at least 2")
    parser.add_argument("--threads", type=int, required=True, help="compute threads")
    parser.add_argument("--turns", type=int, default=3)
    options = parser.parse_args()
    config = og.Config(options.folder)
    threads = {"intra_op_num_threads": options.threads}
    config.overlay(json.dumps({"model": {"decoder": {"session_options": threads}}}))
    model = og.Model(config)
    rng = np.random.default_rng(1)
    prompts = rng.integers(100, 10_000, (options.batch, options.prompt_tokens), np.int32)
    once(model, prompts[:, :16], 4)
    turns = [once(model, prompts, options.tokens) for _ in range(options.turns)]
    first, rest = (float(np.median([turn[part] for turn in turns])) for part in (0, 1))
    print(json.dumps({"first_s": first, "tokens_per_s": options.batch * (options.tokens - 1) / rest}))


if __name__ == "__main__":
    main()
