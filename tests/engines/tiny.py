"""A tiny model folder that a test builds itself: a two-layer decoder over GroupQueryAttention, float32, seeded weights.

The kernels it uses give the same numbers whatever the batch, so answers can be compared token for token. Nothing is
learnt here: the weights are random, scaled so that greedy answers wander through the vocabulary instead of settling
on one token.
"""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import onnx
from numpy.typing import NDArray
from onnx import TensorProto, helper, numpy_helper

LAYERS = 2
HIDDEN = 64
HEADS = 4
KV_HEADS = 2
HEAD_DIM = 16
VOCAB = 320
CONTEXT = 256
EOS = 7
CANDIDATES = 256


def weights(seed: int, steps: int = 0) -> dict[str, NDArray[np.float32]]:
    """Every tensor of the model, from one seed; with `steps`, rounded to so many parts of one."""
    rng = np.random.Generator(np.random.PCG64(seed))

    def matrix(rows: int, columns: int, gain: float = 1.0) -> NDArray[np.float32]:
        return (rng.standard_normal((rows, columns)) * gain / np.sqrt(rows)).astype(np.float32)

    tensors = {"embed": rng.standard_normal((VOCAB, HIDDEN)).astype(np.float32), "head": matrix(HIDDEN, VOCAB, 3.0)}
    for layer in range(LAYERS):
        tensors |= {
            f"q{layer}": matrix(HIDDEN, HEADS * HEAD_DIM, 2.0),
            f"k{layer}": matrix(HIDDEN, KV_HEADS * HEAD_DIM, 2.0),
            f"v{layer}": matrix(HIDDEN, KV_HEADS * HEAD_DIM, 2.0),
            f"o{layer}": matrix(HEADS * HEAD_DIM, HIDDEN, 2.0),
            f"up{layer}": matrix(HIDDEN, 2 * HIDDEN),
            f"down{layer}": matrix(2 * HIDDEN, HIDDEN),
        }
    if steps:
        tensors = {
            name: np.round(value * steps).astype(np.float32) / np.float32(steps) for name, value in tensors.items()
        }
    angles = np.arange(CONTEXT)[:, None] / 10000 ** (np.arange(0, HEAD_DIM, 2) / HEAD_DIM)[None, :]
    return tensors | {
        "gain": np.ones(HIDDEN, np.float32),
        "cos": np.cos(angles).astype(np.float32),
        "sin": np.sin(angles).astype(np.float32),
    }


def graph(seed: int = 0, heads_in_graph: bool = True, positions: int = 0, steps: int = 0) -> onnx.ModelProto:
    """The model as a graph; `heads_in_graph=False` leaves out ArgMax and TopK, as graphs made elsewhere do.

    With `positions` it gives logits of every token of a pass of up to so many, as imported graphs do.
    """
    nodes: list[onnx.NodeProto] = []

    def node(kind: str, inputs: list[str], outputs: list[str], domain: str = "", **attributes: object) -> str:
        nodes.append(helper.make_node(kind, inputs, outputs, domain=domain, **attributes))
        return outputs[0]

    constants = {name: numpy_helper.from_array(value, name) for name, value in weights(seed, steps).items()}

    def constant(name: str, value: NDArray[np.int64] | NDArray[np.int32]) -> str:
        constants[name] = numpy_helper.from_array(value, name)
        return name

    one = constant("one", np.array(1, np.int32))
    axis = constant("axis", np.array([1], np.int64))
    node("ReduceSum", ["attention_mask", axis], ["lengths64"], keepdims=0)
    node("Cast", ["lengths64"], ["lengths"], to=TensorProto.INT32)
    node("Sub", ["lengths", one], ["seqlens_k"])
    node("Shape", ["attention_mask"], ["mask_shape"], start=1, end=2)
    constant("scalar", np.array([], np.int64))
    node("Reshape", ["mask_shape", "scalar"], ["width64"])
    node("Cast", ["width64"], ["total_length"], to=TensorProto.INT32)

    state = node("Gather", ["embed", "input_ids"], ["h"], axis=0)
    for i in range(LAYERS):
        normed = node("SimplifiedLayerNormalization", [state, "gain"], [f"n{i}"], axis=-1, epsilon=1e-5)
        for name in "qkv":
            node("MatMul", [normed, f"{name}{i}"], [f"{name}_{i}"])
        past, present = f"past_key_values.{i}", f"present.{i}"
        node(
            "GroupQueryAttention",
            [f"q_{i}", f"k_{i}", f"v_{i}", f"{past}.key", f"{past}.value", "seqlens_k", "total_length", "cos", "sin"],
            [f"a{i}", f"{present}.key", f"{present}.value"],
            domain="com.microsoft",
            num_heads=HEADS,
            kv_num_heads=KV_HEADS,
            do_rotary=1,
        )
        node("MatMul", [f"a{i}", f"o{i}"], [f"ao{i}"])
        state = node("Add", [state, f"ao{i}"], [f"h{i}"])
        normed = node("SimplifiedLayerNormalization", [state, "gain"], [f"m{i}"], axis=-1, epsilon=1e-5)
        node("MatMul", [normed, f"up{i}"], [f"u{i}"])
        node("Sigmoid", [f"u{i}"], [f"s{i}"])
        node("Mul", [f"u{i}", f"s{i}"], [f"us{i}"])
        node("MatMul", [f"us{i}", f"down{i}"], [f"d{i}"])
        state = node("Add", [state, f"d{i}"], [f"e{i}"])
    if positions:
        node("Shape", ["input_ids"], ["sequence"], start=1, end=2)
        node("LessOrEqual", ["sequence", constant("most", np.array([positions], np.int64))], ["short"])
        node("Where", ["short", "sequence", constant("single", np.array([1], np.int64))], ["kept"])
        node("Sub", ["sequence", "kept"], ["start"])
        node("Slice", [state, "start", constant("end", np.array([2**62], np.int64)), axis], ["every"])
        node("Reshape", ["every", constant("each", np.array([-1, 1, HIDDEN], np.int64))], ["tail"])
    else:
        node("Gather", [state, constant("last", np.array([-1], np.int64))], ["tail"], axis=1)
    node("SimplifiedLayerNormalization", ["tail", "gain"], ["final"], axis=-1, epsilon=1e-5)
    prefix = "position_" if positions else ""
    node("MatMul", ["final", "head"], [f"{prefix}logits"])
    outputs = [helper.make_tensor_value_info("logits", TensorProto.FLOAT, ["batch", 1, VOCAB])]
    if heads_in_graph:
        node("Reshape", [f"{prefix}logits", constant("flat", np.array([-1, VOCAB], np.int64))], ["row"])
        node("ArgMax", ["row"], [f"{prefix}argmax"], axis=-1, keepdims=0)
        top = [f"{prefix}topk_values", f"{prefix}topk_indices"]
        node("TopK", ["row", constant("k", np.array([CANDIDATES], np.int64))], top, axis=-1)
        outputs += [
            helper.make_tensor_value_info("argmax", TensorProto.INT64, ["batch"]),
            helper.make_tensor_value_info("topk_values", TensorProto.FLOAT, ["batch", CANDIDATES]),
            helper.make_tensor_value_info("topk_indices", TensorProto.INT64, ["batch", CANDIDATES]),
        ]
    if positions:
        node("Sub", ["kept", "single"], ["last_kept"])
        rows = constant("rows", np.array([0], np.int64))
        for info in list(outputs):
            node("Slice", [f"position_{info.name}", "last_kept", "end", rows, "kept"], [info.name])
            outputs.append(onnx.ValueInfoProto(name=f"position_{info.name}", type=info.type))
            outputs[-1].type.tensor_type.shape.dim[0].dim_param = "positions"
    inputs = [
        helper.make_tensor_value_info("input_ids", TensorProto.INT64, ["batch", "sequence"]),
        helper.make_tensor_value_info("attention_mask", TensorProto.INT64, ["batch", "total"]),
    ]
    cache = ["batch", KV_HEADS, "capacity", HEAD_DIM]
    for i in range(LAYERS):
        for part in ("key", "value"):
            inputs.append(helper.make_tensor_value_info(f"past_key_values.{i}.{part}", TensorProto.FLOAT, cache))
            outputs.append(helper.make_tensor_value_info(f"present.{i}.{part}", TensorProto.FLOAT, cache))
    body = helper.make_graph(nodes, "tiny", inputs, outputs, initializer=list(constants.values()))
    opsets = [helper.make_opsetid("", 20), helper.make_opsetid("com.microsoft", 1)]
    model = helper.make_model(body, opset_imports=opsets, ir_version=10)
    if positions:
        helper.set_model_props(model, {"emberd.positions": str(positions)})
    return model


def build(
    folder: Path,
    seed: int = 0,
    eos: int | list[int] = EOS,
    heads_in_graph: bool = True,
    positions: int = 0,
    steps: int = 0,
) -> Path:
    """Writes the model folder: `model.onnx`, `config.json`, `generation_config.json`. Returns the folder."""
    folder.mkdir(parents=True, exist_ok=True)
    onnx.save(graph(seed, heads_in_graph, positions, steps), str(folder / "model.onnx"))
    config = {"model_type": "llama", "max_position_embeddings": CONTEXT, "vocab_size": VOCAB, "eos_token_id": EOS}
    (folder / "config.json").write_text(json.dumps(config))
    (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": eos}))
    return folder
