"""What one process takes to load a model, as JSON: the engine (`engine`), or an `InferenceSession` alone (`bare`).

Resident memory is told in bytes at each stage: with the libraries imported, with the model loaded, while 16 requests
run, and after the close. Run by `memory.py`, each time in a process of its own.
"""

from __future__ import annotations

import argparse
import json
import time
from pathlib import Path

STARTED = time.perf_counter()
PROMPT = 96
"""Tokens of each prompt."""


def resident() -> int:
    """Resident memory of this process, bytes (Linux)."""
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith("VmRSS:"):
            return int(line.split()[1]) * 1024
    raise OSError("the system tells no resident memory")


def bare(folder: Path, threads: int) -> dict[str, float]:
    """Creates a session, as the engine does, and nothing else."""
    import onnxruntime as ort

    imported, memory = time.perf_counter(), resident()
    options = ort.SessionOptions()
    options.intra_op_num_threads = threads
    options.inter_op_num_threads = 1
    session = ort.InferenceSession(str(folder / "model.onnx"), options, providers=["CPUExecutionProvider"])
    done = time.perf_counter()
    assert session.get_inputs()
    return {"imported": memory, "loaded": resident(), "import_s": imported - STARTED, "create_s": done - imported}


def engine(folder: Path, threads: int) -> dict[str, float]:
    """Loads the model as a worker does, runs 16 requests to their last token, and closes it."""
    from emberd._core import Admit, Settings
    from emberd.onnx import load

    figures: dict[str, float] = {"imported": resident()}
    begin = time.perf_counter()
    faults: list[str] = []
    loaded = load(str(folder), Settings(threads=threads, cache_bytes=0), lambda _, fault: faults.append(fault))
    figures |= {"load_s": time.perf_counter() - begin, "loaded": resident()}
    rows = loaded.capabilities.max_batch
    for row in range(rows):
        loaded.take(Admit(row + 1, [300 + row + at for at in range(PROMPT)], 8))
    while loaded.busy:
        figures["used"] = max(figures.get("used", 0.0), resident())
        loaded.step()
    if faults:
        raise SystemExit(faults[0])
    figures["running"] = rows * (PROMPT + 8)
    loaded.close()
    del loaded
    figures["closed"] = resident()
    return figures


def main() -> None:
    """Prints the figures."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("what", choices=["bare", "engine"])
    parser.add_argument("--folder", type=Path, required=True)
    parser.add_argument("--threads", type=int, required=True)
    options = parser.parse_args()
    print(json.dumps((bare if options.what == "bare" else engine)(options.folder, options.threads)))


if __name__ == "__main__":
    main()
