"""Graphs that emberd imported, as they are opened: with operators of emberd's own.

The file in the folder is plain ONNX Runtime's and stays as it is; the core rewrites it in memory. The operators
(`rust/kernels`) are fewer nodes and faster: a pass takes 0.4 to 0.5 of the time. Products multiply whole numbers, which
are exact, and every sum has one order, so where all products and the attention of a model are emberd's (weights of
Q4_0, Q4_1 and Q8_0 on x86-64 with VNNI), what a text gets is the same to the bit in whatever pieces it is read and
whatever is read beside it.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import TYPE_CHECKING

import onnxruntime as ort

from emberd import _core

if TYPE_CHECKING:
    from emberd._core import Settings

EXTERNAL = "session.model_external_initializers_file_folder_path"
"""The session option that says where the weights of a graph are which is not opened by its path."""


def session(graph: Path, options: ort.SessionOptions, settings: Settings) -> ort.InferenceSession:
    """Opens a graph with emberd's operators, and with the activations of `settings`, unless they want it otherwise.

    Where the operators cannot be used, the runtime's own are, and standard error says why. Raises what onnxruntime raises.
    """
    weights = _beside(graph)
    if weights is None:
        return ort.InferenceSession(str(graph), options, providers=["CPUExecutionProvider"])
    model = graph.read_bytes()
    activations = settings.activations or "int16"
    options.add_session_config_entry(EXTERNAL, str(weights))
    problem = None
    if settings.kernels != "onnxruntime" and (own := _core.rewritten(model, True, activations)) is not None:
        try:
            options.register_custom_ops_library(_core.__file__)
            return _open(own, options)
        except Exception as error:  # a different private type for each way in which it can fail
            problem = error
    opened = _open(_core.rewritten(model, False, activations) or model, options)
    if problem is not None:
        reason = " ".join(str(problem).split())
        print(f"emberd: {graph} runs without emberd's own operators, and slower: {reason}", file=sys.stderr)
    return opened


def _beside(graph: Path) -> Path | None:
    """The folder in which the weights of a graph really lie, as onnxruntime wants it.

    It is the graph's own or, where that is a link, the one it leads to; `None` where it is neither.
    """
    for folder in (graph.parent.resolve(), graph.resolve().parent):
        data = folder / f"{graph.name}.data"
        if data.is_file() and data.resolve() == data:
            return folder
    return None


def _open(model: bytes, options: ort.SessionOptions) -> ort.InferenceSession:
    return ort.InferenceSession(model, options, providers=["CPUExecutionProvider"])
