"""The bare onnxruntime loop as a peer of the HTTP door: runs the loop of `bare_onnx.py` once, prints its rate as JSON.

It is the loop that the engine alone is compared with; here it is only given the door's prompt and answer lengths.
"""

from __future__ import annotations

import argparse
import json
import time

import bare_onnx


def main() -> None:
    """Prints `{"tokens_per_s", "steps"}`: tokens of all rows a second, over the time of the decode steps."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--folder", required=True, help="a model folder with model.onnx")
    parser.add_argument("--batch", type=int, required=True, help="rows that decode together")
    parser.add_argument("--tokens", type=int, required=True, help="tokens of each answer")
    parser.add_argument("--prompt-tokens", type=int, required=True, dest="context", help="prompt tokens of each row")
    parser.add_argument("--threads", type=int, required=True, help="compute threads")
    parser.add_argument(
        "--spin",
        action=argparse.BooleanOptionalAction,
        help="idle compute threads spin for ever or never, not for a moment",
    )
    parser.add_argument(
        "--ragged", action="store_true", help="rows whose lengths differ by one each, as those that joined in turn"
    )
    parser.add_argument("--own", action="store_true", help="emberd's operators, as the engine has them")
    options = parser.parse_args()
    # The first steps warm the buffers up; the clock starts when they are done.
    times = [time.perf_counter() for _ in bare_onnx.bare(options, options.batch)][2:]
    if len(times) < 2:
        parser.error("--tokens is too small to measure a rate")
    steps = len(times) - 1
    print(json.dumps({"tokens_per_s": options.batch * steps / (times[-1] - times[0]), "steps": steps}))


if __name__ == "__main__":
    main()
