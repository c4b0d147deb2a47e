"""Writes a GGUF file anew with its matrices in another type, to see what the import keeps of that type in a whole model.

    python tests/reference/requantize.py MODEL.gguf TYPE OUT.gguf

The values are those of the given file, dequantized. Rows that are not whole super-blocks of a K-quant go into the type of 32 that
llama.cpp takes instead. The embedding, where it is the head too, becomes Q6_K or Q8_0, as in llama.cpp's files.
"""

from __future__ import annotations

import sys
from pathlib import Path

import gguf
import numpy as np

sys.path.append(str(Path(__file__).parent.parent))

from support.kquants import quantized

Q = gguf.GGMLQuantizationType

INSTEAD = {Q.Q2_K: Q.Q4_0, Q.Q3_K: Q.Q4_0, Q.Q4_K: Q.Q5_0, Q.Q5_K: Q.Q5_1, Q.Q6_K: Q.Q8_0}


def fitting(kind: gguf.GGMLQuantizationType, columns: int) -> gguf.GGMLQuantizationType:
    """The type for rows of so many elements."""
    return INSTEAD[kind] if kind in INSTEAD and columns % 256 else kind


def main(source: Path, kind: gguf.GGMLQuantizationType, target: Path) -> None:
    """Write the file."""
    reader = gguf.GGUFReader(str(source))
    writer = gguf.GGUFWriter(target, reader.fields["general.architecture"].contents())
    for name, field in reader.fields.items():
        if not name.startswith("GGUF.") and name not in ("general.architecture", "general.quantization_version"):
            inner = field.types[1] if field.types[0] == gguf.GGUFValueType.ARRAY else None
            writer.add_key_value(name, field.contents(), field.types[0], inner)
    for tensor in reader.tensors:
        values = np.asarray(gguf.quants.dequantize(tensor.data, tensor.tensor_type), np.float32)
        if values.ndim == 1:
            writer.add_tensor(tensor.name, values)
            continue
        wanted = Q.Q6_K if tensor.name == "token_embd.weight" and kind in INSTEAD else kind
        wanted = fitting(wanted, values.shape[1])
        blocks = quantized(values, wanted.name)
        data = gguf.quants.quantize(values, wanted) if blocks is None else blocks
        writer.add_tensor(tensor.name, data, raw_dtype=wanted)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


if __name__ == "__main__":
    main(Path(sys.argv[1]), Q[sys.argv[2]], Path(sys.argv[3]))
