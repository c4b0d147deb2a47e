"""What activations are in an imported model where they meet weights of 4 bits: 32-bit floats, or bytes with a scale a block.

The weights are the file's own in both. Rounded activations are what llama.cpp multiplies, too: the default model is 0.0024 nats from
32-bit floats then, in place of 0.0002, and on processors that multiply bytes a pass over 8 rows takes some 0.6 of the
time. They are no default, because rounding makes much of little: logits of the same text then differ by up to one where it was
read in other pieces, and with them now and then a greedy answer, where floats differ by a ten-thousandth. The two are one
attribute of the graph (`accuracy_level` of MatMulNBits) apart, which is set as the graph is opened; the folder stays as it is.
Only of graphs that emberd made is it known where the attribute is.
"""

from __future__ import annotations

from pathlib import Path

FLOAT = b"accuracy_level\x18\x01"
"""Name and value, as the importer's protocol buffers have them: field 3, a number, 1."""

INT8 = b"accuracy_level\x18\x04"

EXTERNAL = "session.model_external_initializers_file_folder_path"
"""The session option that says where the weights of a graph are which is not opened by its path."""


def with_bytes(graph: Path) -> bytes | None:
    """A graph that emberd made with bytes for floats; `None` where there are none to change."""
    model = graph.read_bytes()
    return model.replace(FLOAT, INT8) if FLOAT in model else None
