"""Opens an ONNX model folder: finds its graph, reads its config files, creates the session, and says what the graph takes and gives.

The graph is `model.onnx`, or one of those that hub repositories keep in `onnx/`. No sequence is known here. What a
graph takes is read in `layout`, and what it does with it is tried out in `probe`; a graph with the output `argmax` is
one that emberd made, of which nothing need be tried. Such a graph gives `logits` of the last token, `argmax`, and
`topk_values`/`topk_indices`.
"""

from __future__ import annotations

import ctypes
import os
import re
from collections.abc import Collection
from pathlib import Path
from typing import TYPE_CHECKING, Any

import onnxruntime as ort

from emberd import configs, imported, layout
from emberd.engine import EngineError, at_least_one, eos_ids
from emberd.probe import Found, Probe

if TYPE_CHECKING:
    from emberd._core import Settings

DEFAULT_MAX_BATCH = 16

SPIN_US = 20
"""How long a compute thread with nothing to do looks for work before it sleeps, unless the user says."""

SPIN_BACKOFF = 64
"""The most pauses of the processor between two such looks; fewer take more from what else runs on the cores."""

CONTEXTS = ("max_position_embeddings", "n_positions", "max_sequence_length", "max_seq_len", "seq_length", "n_ctx")
"""What configs of different families call the context length."""

_MANIFEST = "emberd.json"
"""What lies in a folder that `emberd models pull` made, whose one graph is of no dtype."""
_IMPORT = "import the model with `emberd models pull`, or give the path of a .gguf file"

_LACKING = re.compile(
    r"find an implementation for (\w+)|[: ]([\w.]+:\w+)\(-?\d+\) is not a registered|No Op registered for (\w+)"
)
"""In the errors that onnxruntime raises for operators that it has not, or not for a processor: which."""

_DAMAGED = "if the file is damaged, `emberd models rm` forgets the model, and its next load fetches what differs anew"


class Model:
    """An open session and the figures an engine needs to drive it."""

    def __init__(self, folder: str, settings: Settings) -> None:
        path = Path(folder)
        if not path.is_dir():
            raise EngineError(f"there is no model folder {folder}", "give the path of a folder that holds model.onnx")
        graph = find_graph(path)
        config = read_config(path / "config.json", required=True)
        self.eos_ids = eos_ids(read_config(path / "generation_config.json"), config)
        context = _context(config) or settings.context_length
        if context is None:
            raise EngineError(
                f"{path / 'config.json'} gives no {CONTEXTS[0]}",
                "import the model with `emberd models pull`, or give context_length",
            )
        self.context_length = min(context, at_least_one("context_length", settings.context_length, context))
        if self.context_length < 2:
            raise EngineError("context_length is 1", "a prompt and its answer need at least 2 tokens")
        self.max_batch = at_least_one("max_batch", settings.max_batch, DEFAULT_MAX_BATCH)
        self.session = _session(graph, settings)
        self.inputs = layout.read(graph, self.session, config)
        self.layers = self.inputs.layers
        outputs = {each.name: each for each in self.session.get_outputs()}
        if "logits" not in outputs:
            raise EngineError(f"{graph} has no output named logits, but {', '.join(outputs)}", _IMPORT)
        if len(outputs["logits"].shape or ()) != 3:
            raise EngineError(
                f"{graph} has logits of shape {outputs['logits'].shape}; expected [batch, sequence, vocab]", _IMPORT
            )
        self.logits_type = layout.dtype(graph, outputs["logits"])
        self.has_argmax = "argmax" in outputs
        vocab = outputs["logits"].shape[-1]
        known = vocab if isinstance(vocab, int) else _figure(config, "vocab_size")
        if self.has_argmax and self.inputs.plain() and known:
            found = Found(shared=True, chunks=True, padding=False, wide=False, vocab_size=known)
        else:
            found = Probe(self.session, self.inputs, known).find(graph)
        self.vocab_size = found.vocab_size
        self.shared = found.shared
        """Whether the cache is in shared buffers; else each pass makes a new one."""
        self.chunks = found.chunks
        """Whether a prompt can be read in pieces; else it is read in one pass, and from its beginning."""
        self.padding = found.padding
        """Whether sequences with caches of their own can decode together."""
        self.wide_logits = found.wide
        """Whether the logits are those of every token of a pass; else of the last one."""
        self.candidates = 0
        """How many of the highest logits the graph sorts itself; 0 when it does not."""
        if "topk_values" in outputs and "topk_indices" in outputs:
            self.candidates = int(outputs["topk_values"].shape[-1])
        self.positions = _positions(self.session, outputs.keys())
        """The longest pass of which the graph gives the logits of every token; 0 when it gives only those of the last."""

    @property
    def reusable(self) -> bool:
        """Whether a prompt can start from the keys and values that an earlier one left: not where there is more to it."""
        return self.chunks and not self.inputs.states


def find_graph(folder: Path, dtype: str | None = None) -> Path:
    """The graph of a model folder: `model.onnx` of one that emberd made, else that of the dtype (`PI_TINY_DTYPE`, as omp sets it for its workers).

    Names and places are those of repositories for transformers.js, which may hold one graph for each dtype; the core knows them. Raises `EngineError`
    where there is none: where weights were asked for, no others are taken.
    """
    if (folder / _MANIFEST).is_file():
        places = ["model.onnx"]
    else:
        from emberd._core import graphs

        places = graphs(os.environ.get("PI_TINY_DTYPE", "") if dtype is None else dtype)
    for place in places:
        if (folder / place).is_file():
            return folder / place
    raise EngineError(
        f"{folder} holds no {places[-1]}{''.join(f', and no {place}' for place in places[-2::-1])}",
        _others(folder) or _IMPORT,
    )


def read_config(path: Path, required: bool = False) -> dict[str, Any]:
    """A JSON object from a file of the folder, as `configs` reads it."""
    return configs.read_config(path, _IMPORT, required)


def physical_cores() -> int:
    """Cores this process may use, counting two hardware threads of one core once where the system tells (Linux)."""
    if not hasattr(os, "sched_getaffinity"):
        return os.cpu_count() or 1
    cpus = os.sched_getaffinity(0)
    siblings = set()
    for cpu in cpus:
        try:
            siblings.add(Path(f"/sys/devices/system/cpu/cpu{cpu}/topology/thread_siblings_list").read_text())
        except OSError:
            return len(cpus)
    return len(siblings)


def give_back() -> None:
    """Returns freed memory to the system: after a close glibc keeps 184 MiB of the default model, after this 61."""
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None) if os.name == "posix" else None
    if trim is not None:
        trim(0)


def _others(folder: Path) -> str | None:
    """Which graphs a folder of a repository has, and how they are asked for; `None` where it has none."""
    found = {}
    for path in sorted((*folder.glob("onnx/model*.onnx"), *folder.glob("model*.onnx"))):
        suffix = path.stem.removeprefix("model").removeprefix("_")
        found[{"": "fp32", "quantized": "q8"}.get(suffix, suffix)] = path.relative_to(folder)
    if not found:
        return None
    return "set " + ", or ".join(f"PI_TINY_DTYPE={dtype} for {path.as_posix()}" for dtype, path in found.items())


def _session(graph: Path, settings: Settings) -> ort.InferenceSession:
    options = ort.SessionOptions()
    options.intra_op_num_threads = at_least_one("threads", settings.threads, physical_cores())
    options.inter_op_num_threads = 1
    # Threads that wait for the next piece of a pass wake late (a step of one sequence 14 ms; spinning for ever, 11), but on cores
    # that others use too, those that spin take the time of those that work (16 ms; 24). A short wait has nearly all of
    # the one and little of the other (11; 17).
    spin = settings.spin
    options.add_session_config_entry("session.intra_op.allow_spinning", "0" if spin is False else "1")
    if spin is None:
        options.add_session_config_entry("session.intra_op.spin_duration_us", str(SPIN_US))
        options.add_session_config_entry("session.intra_op.spin_backoff_max", str(SPIN_BACKOFF))
    options.log_severity_level = 4  # an error is raised as well: it need not be printed
    try:
        if (graph.parent / _MANIFEST).is_file():
            return imported.session(graph, options, settings)
        return ort.InferenceSession(str(graph), options, providers=["CPUExecutionProvider"])
    except Exception as error:  # onnxruntime raises a different private type for each way a file can be wrong
        text = " ".join(str(error).split())
        lacking = _LACKING.search(text)
        if lacking is not None:
            operator = next(filter(None, lacking.groups()))
            raise EngineError(
                f"{graph} cannot be run: onnxruntime {ort.__version__} has no {operator} for processors ({text})",
                "take weights of another form (PI_TINY_DTYPE), or another repository of the model",
            ) from error
        raise EngineError(f"{graph} cannot be loaded: {text}", _DAMAGED) from error


def _positions(session: ort.InferenceSession, outputs: Collection[str]) -> int:
    """What a graph says of itself, as the importer wrote it: a shape alone does not tell up to where it holds."""
    if not all(f"position_{name}" in outputs for name in ("logits", "argmax", "topk_values", "topk_indices")):
        return 0
    written = session.get_modelmeta().custom_metadata_map.get("emberd.positions", "")
    return int(written) if written.isdecimal() else 0


def _figure(config: dict[str, Any], name: str) -> int | None:
    """A size from a config, or from the part of it that is about text, where there are several."""
    for each in (config, config.get("text_config")):
        value = each.get(name) if isinstance(each, dict) else None
        if isinstance(value, int) and value > 0:
            return value
    return None


def _context(config: dict[str, Any]) -> int | None:
    return next(filter(None, (_figure(config, name) for name in CONTEXTS)), None)
