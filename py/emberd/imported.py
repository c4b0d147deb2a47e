"""Graphs that emberd imported, as they are opened: with operators of emberd's own, and with activations in bytes.

The file in the folder is plain ONNX Runtime's and stays as it is; the core rewrites it in memory. The operators
(`rust/kernels`) take the place of what lies between two matrix products: half as many nodes, and sums whose order does
not depend on what else is in a pass. Activations are rounded to 8 bits a block where they meet weights of 4 bits, as
llama.cpp rounds them: the default model is 0.0024 nats from 32-bit floats then, in place of 0.0002, and a pass takes
0.5 to 0.7 of the time. Rounding makes full steps of the smallest difference, so with the runtime's own attention, which
sums one token otherwise than several, a text read in other pieces has other logits (up to one apart); with emberd's
they are equal to the bit on processors whose products are (x86-64 with VNNI).
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
    """Opens a graph as `settings` say: with emberd's operators and activations in bytes, unless they want it otherwise.

    Where the operators cannot be used, the runtime's own are, and standard error says why. Raises what onnxruntime raises.
    """
    model = graph.read_bytes()
    int8 = settings.activations != "float"
    options.add_session_config_entry(EXTERNAL, str(graph.resolve().parent))
    if settings.kernels != "onnxruntime" and (fused := _core.rewritten(model, own=True, int8=int8)) is not None:
        try:
            options.register_custom_ops_library(_core.__file__)
            return _open(fused, options)
        except Exception as error:  # a different private type for each way in which it can fail
            plain = _open(_core.rewritten(model, own=False, int8=int8) or model, options)
            reason = " ".join(str(error).split())
            print(f"emberd: {graph} runs without emberd's own operators, and slower: {reason}", file=sys.stderr)
            return plain
    return _open(_core.rewritten(model, own=False, int8=int8) or model, options)


def _open(model: bytes, options: ort.SessionOptions) -> ort.InferenceSession:
    return ort.InferenceSession(model, options, providers=["CPUExecutionProvider"])
