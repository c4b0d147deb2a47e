"""Opens an ONNX model folder: finds its graph, reads its config files, creates the session, and says what the graph takes and gives.

The graph is `model.onnx`, or one of those that hub repositories keep in `onnx/`. Nothing is run here and no sequence is known. The layout that is read is the one with shared buffers: `input_ids`,
`attention_mask` and `past_key_values.N.key/value` in, `logits` of the last token and `present.N.key/value` out, with
`argmax` and `topk_values`/`topk_indices` where the graph makes them itself.
"""

from __future__ import annotations

import ctypes
import os
from pathlib import Path
from typing import TYPE_CHECKING, Any

import onnxruntime as ort

from emberd import configs
from emberd.engine import EngineError, at_least_one, eos_ids
from emberd.kv import Layer

if TYPE_CHECKING:
    from emberd._core import Settings

DEFAULT_MAX_BATCH = 16

SPIN_US = 20
"""How long a compute thread with nothing to do looks for work before it sleeps, unless the user says."""

SPIN_BACKOFF = 64
"""The most pauses of the processor between two such looks; fewer take more from what else runs on the cores."""

_TYPES = {"tensor(float)": "float32", "tensor(float16)": "float16"}
_MANIFEST = "emberd.json"
"""What lies in a folder that `emberd models pull` made, whose one graph is of no dtype."""
_IMPORT = "import the model with `emberd models pull`, or give the path of a .gguf file"

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
        context = config.get("max_position_embeddings")
        if not isinstance(context, int) or context < 1:
            raise EngineError(f"{path / 'config.json'} gives no max_position_embeddings", _IMPORT)
        self.context_length = min(context, at_least_one("context_length", settings.context_length, context))
        if self.context_length < 2:
            raise EngineError("context_length is 1", "a prompt and its answer need at least 2 tokens")
        self.max_batch = at_least_one("max_batch", settings.max_batch, DEFAULT_MAX_BATCH)
        self.session = _session(graph, settings)
        self.layers = _layers(graph, self.session)
        outputs = {each.name: each for each in self.session.get_outputs()}
        if "logits" not in outputs:
            raise EngineError(f"{graph} has no output named logits, but {', '.join(outputs)}", _IMPORT)
        vocab = outputs["logits"].shape[-1]
        self.vocab_size = vocab if isinstance(vocab, int) else int(config["vocab_size"])
        self.logits_type = _dtype(graph, outputs["logits"])
        self.has_argmax = "argmax" in outputs
        self.candidates = 0
        """How many of the highest logits the graph sorts itself; 0 when it does not."""
        if "topk_values" in outputs and "topk_indices" in outputs:
            self.candidates = int(outputs["topk_values"].shape[-1])


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
        f"{folder} holds no {places[-1]}{''.join(f', and no {place}' for place in places[-2::-1])}", _IMPORT
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
        return ort.InferenceSession(str(graph), options, providers=["CPUExecutionProvider"])
    except Exception as error:  # onnxruntime raises a different private type for each way a file can be wrong
        text = " ".join(str(error).split())
        raise EngineError(f"{graph} cannot be loaded: {text}", _DAMAGED) from error


def _layers(graph: Path, session: ort.InferenceSession) -> list[Layer]:
    """The cache's tensors, in the order of the graph's inputs. Raises `EngineError` where the layout is another."""
    expected = "input_ids, attention_mask and past_key_values.N.key/value"
    outputs = {each.name for each in session.get_outputs()}
    layers: list[Layer] = []
    plain = {"input_ids", "attention_mask"}
    for each in session.get_inputs():
        if each.name in plain:
            plain.remove(each.name)
            continue
        present = each.name.replace("past_key_values.", "present.", 1)
        shape = each.shape
        if present == each.name or present not in outputs or len(shape) != 4:
            raise EngineError(f"{graph} has an input {each.name}; expected {expected}", _IMPORT)
        heads, width = shape[1], shape[3]
        if not isinstance(heads, int) or not isinstance(width, int):
            raise EngineError(f"{graph} does not give the heads and width of {each.name}, but {shape}", _IMPORT)
        layers.append(Layer(each.name, present, heads, width, _dtype(graph, each)))
    if plain or not layers:
        names = ", ".join(each.name for each in session.get_inputs())
        raise EngineError(f"{graph} has the inputs {names}; expected {expected}", _IMPORT)
    return layers


def _dtype(graph: Path, node: ort.NodeArg) -> str:
    dtype = _TYPES.get(node.type)
    if dtype is None:
        raise EngineError(f"{graph} has {node.name} as {node.type}; expected one of {', '.join(_TYPES)}", _IMPORT)
    return dtype
