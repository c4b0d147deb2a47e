"""Tiny models in the forms that hub repositories have for transformers.js, with the weights of `tiny`: same answers, other graphs.

Attention is written out (MatMul, Softmax, Concat) or GroupQueryAttention; positions come from `position_ids`, from the
mask or from the length of the past; caches and all the rest are float32 or float16; a hybrid has a convolution with a
state in the place of one attention; weights may have four bits, or lie in other files.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import onnx
from numpy.typing import NDArray
from onnx import TensorProto, helper, numpy_helper

from tiny import CONTEXT, EOS, HEAD_DIM, HEADS, HIDDEN, KV_HEADS, LAYERS, VOCAB, weights

KERNEL = 3
"""Tokens that a convolution's state holds."""

BITS_BLOCK = 32

MATRICES = {"head", *(f"{name}{layer}" for layer in range(LAYERS) for name in ("q", "k", "v", "o", "up", "down"))}
"""The weights that may have four bits."""


@dataclass(frozen=True)
class Form:
    """What a graph is like."""

    attention: str = "hand"
    """`hand`; `gqa`, whose lengths come from the mask; `gqa-concat`, whose lengths come from the past's shape."""
    positions: str = "ids"
    """`ids`, `mask` or `past`."""
    kind: str = "float32"
    """Of all tensors, the caches included."""
    cache: str = ""
    """Of the caches, where they differ."""
    convolution: str = ""
    """`pieces`: the first layer is a convolution, with a state; `whole`: one that reads a state only for a single token."""
    keep: str = ""
    """The name of an input for the number of logits to keep."""
    branch: bool = False
    """`use_cache_branch`: whether the past counts."""
    places: bool = False
    """`cache_position` in the place of the past's length, where `positions` is `past`."""
    bits: str = ""
    """`symmetric` or `zero points`: all matrices have four bits; `dynamic`: eight, and what they are multiplied with too."""

    @property
    def cache_kind(self) -> str:
        return self.cache or self.kind


_ONNX = {"float32": TensorProto.FLOAT, "float16": TensorProto.FLOAT16}


class _Graph:
    """A graph in the making."""

    def __init__(self, form: Form, seed: int) -> None:
        self.form = form
        self.nodes: list[onnx.NodeProto] = []
        self.constants: dict[str, onnx.TensorProto] = {}
        self.weights = weights(seed)
        rng = np.random.Generator(np.random.PCG64(seed + 77))
        for name in ("conv_in", "conv_gate", "conv_out"):
            self.weights[name] = (rng.standard_normal((HIDDEN, HIDDEN)) * 2 / HIDDEN**0.5).astype(np.float32)
        self.weights["kernel"] = rng.standard_normal((HIDDEN, 1, KERNEL)).astype(np.float32)
        self.type = _ONNX[form.kind]
        self.pasts: dict[tuple[int, str], str] = {}
        self.inputs: list[onnx.ValueInfoProto] = []
        self.outputs: list[onnx.ValueInfoProto] = []

    def node(self, kind: str, inputs: list[str], output: str, domain: str = "", **attributes: object) -> str:
        self.nodes.append(helper.make_node(kind, inputs, [output], domain=domain, **attributes))
        return output

    def constant(self, name: str, value: NDArray[np.generic]) -> str:
        self.constants[name] = numpy_helper.from_array(value, name)
        return name

    def numbers(self, *values: int) -> str:
        return self.constant("numbers_" + "_".join(map(str, values)), np.array(values, np.int64))

    def scalar(self, value: int) -> str:
        return self.constant(f"number_{value}", np.array(value, np.int64))

    def weight(self, name: str) -> str:
        return self.constant(name, self.weights[name].astype(self.form.kind))

    def matrix(self, state: str, name: str, output: str) -> str:
        """`state` times a weight, `[rows, columns]`."""
        if not self.form.bits:
            return self.node("MatMul", [state, self.weight(name)], output)
        if self.form.bits == "dynamic":
            return self.eight_bits(state, name, output)
        packed, scales, zeros = four_bits(self.weights[name], self.form.bits == "zero points")
        inputs = [state, self.constant(f"{name}_q", packed), self.constant(f"{name}_s", scales.astype(self.form.kind))]
        if zeros is not None:
            inputs.append(self.constant(f"{name}_z", zeros))
        rows, columns = self.weights[name].shape
        return self.node(
            "MatMulNBits", inputs, output, "com.microsoft", K=rows, N=columns, bits=4, block_size=BITS_BLOCK
        )

    def eight_bits(self, state: str, name: str, output: str) -> str:
        """As onnxruntime's dynamic quantization writes it: one scale for all of `state`, found in each pass."""
        weight = self.weights[name]
        scale = np.abs(weight).max() / 127
        given = [f"{output}_dynamic_{part}" for part in ("in", "scale", "zero")]
        self.nodes.append(helper.make_node("DynamicQuantizeLinear", [state], given))
        eight = self.constant(f"{name}_8", np.round(weight / scale).astype(np.int8))
        whole = self.node("MatMulInteger", [given[0], eight, given[2]], f"{output}_whole")
        scales = self.node(
            "Mul", [given[1], self.constant(f"{name}_s", np.array(scale, np.float32))], f"{output}_scales"
        )
        return self.node("Mul", [self.cast(whole, "float32", f"{output}_float"), scales], output)

    def cast(self, value: str, kind: str, output: str) -> str:
        return self.node("Cast", [value], output, to=_ONNX[kind])

    def take(self, name: str, kind: int, shape: list[int | str]) -> str:
        self.inputs.append(helper.make_tensor_value_info(name, kind, shape))
        return name

    def give(self, name: str, kind: int, shape: list[int | str]) -> None:
        self.outputs.append(helper.make_tensor_value_info(name, kind, shape))

    def build(self) -> onnx.ModelProto:
        form = self.form
        self.take("input_ids", TensorProto.INT64, ["batch_size", "sequence_length"])
        self.take("attention_mask", TensorProto.INT64, ["batch_size", "total_sequence_length"])
        if form.positions == "ids":
            self.take("position_ids", TensorProto.INT64, ["batch_size", "sequence_length"])
        if form.branch:
            self.take("use_cache_branch", TensorProto.BOOL, [1])
        if form.places:
            self.take("cache_position", TensorProto.INT64, ["sequence_length"])
        if form.keep:
            self.take(form.keep, TensorProto.INT64, [])
        self.node("Shape", ["input_ids"], "sequence", start=1, end=2)
        attending = [layer for layer in range(LAYERS) if not (form.convolution and layer == 0)]
        for layer in attending:
            self.past(layer)
        self.node("Shape", [self.pasts[attending[0], "key"]], "past_length", start=2, end=3)
        self.node("Add", ["past_length", "sequence"], "total")
        self.frame()
        state = self.node("Gather", [self.weight("embed"), "input_ids"], "h", axis=0)
        for i in range(LAYERS):
            normed = self.norm(state, f"n{i}")
            mixed = self.attention(i, normed) if i in attending else self.convolution(i, normed)
            state = self.node("Add", [state, mixed], f"h{i}")
            up = self.matrix(self.norm(state, f"m{i}"), f"up{i}", f"u{i}")
            self.node("Sigmoid", [up], f"g{i}")
            self.node("Mul", [up, f"g{i}"], f"ug{i}")
            state = self.node("Add", [state, self.matrix(f"ug{i}", f"down{i}", f"d{i}")], f"e{i}")
        if form.keep:
            kept = self.node("Neg", [form.keep], "kept_from")
            ends = [self.node("Reshape", [kept, self.numbers(1)], "kept_starts"), self.numbers(2**62), self.numbers(1)]
            state = self.node("Slice", [state, *ends], "kept")
        self.matrix(self.norm(state, "final"), "head", "logits")
        self.give("logits", self.type, ["batch_size", "kept" if form.keep else "sequence_length", VOCAB])
        body = helper.make_graph(
            self.nodes, "tiny", self.inputs, self.outputs, initializer=list(self.constants.values())
        )
        opsets = [helper.make_opsetid("", 20), helper.make_opsetid("com.microsoft", 1)]
        return helper.make_model(body, opset_imports=opsets, ir_version=10)

    def norm(self, state: str, output: str) -> str:
        return self.node("SimplifiedLayerNormalization", [state, self.weight("gain")], output, axis=-1, epsilon=1e-5)

    def past(self, layer: int) -> None:
        """Takes the caches of a layer; `pasts` then has them as they are computed with."""
        form, shape = self.form, ["batch_size", KV_HEADS, "past_sequence_length", HEAD_DIM]
        for part in ("key", "value"):
            given = self.take(f"past_key_values.{layer}.{part}", _ONNX[form.cache_kind], list(shape))
            self.give(
                f"present.{layer}.{part}", _ONNX[form.cache_kind], [*shape[:2], "total_sequence_length", HEAD_DIM]
            )
            if form.branch:
                given = self.only_with_branch(given, f"{part}_{layer}_chosen")
            if form.cache_kind != form.kind:
                given = self.cast(given, form.kind, f"past_{layer}_{part}")
            self.pasts[layer, part] = given

    def only_with_branch(self, past: str, output: str) -> str:
        """The past where `use_cache_branch` says that there is one, else none of it."""
        kind = _ONNX[self.form.cache_kind]

        def branch(name: str, node: onnx.NodeProto) -> onnx.GraphProto:
            return helper.make_graph([node], name, [], [helper.make_tensor_value_info(f"{name}_out", kind, None)])

        zero = self.numbers(0)
        return self.node(
            "If",
            ["use_cache_branch"],
            output,
            then_branch=branch(f"{output}_a", helper.make_node("Identity", [past], [f"{output}_a_out"])),
            else_branch=branch(
                f"{output}_b", helper.make_node("Slice", [past, zero, zero, self.numbers(2)], [f"{output}_b_out"])
            ),
        )

    def frame(self) -> None:
        """Positions, angles, the mask's bias and the lengths for GroupQueryAttention."""
        form = self.form
        one, zero = self.scalar(1), self.scalar(0)
        if form.positions == "ids":
            positions = "position_ids"
        elif form.positions == "mask":
            self.node("CumSum", ["attention_mask", one], "counted")
            self.node("Sub", ["counted", one], "counted_from_0")
            self.node("Max", ["counted_from_0", zero], "all_positions")
            ends = [self.node("Neg", ["sequence"], "tail"), self.numbers(2**62), self.numbers(1)]
            positions = self.node("Slice", ["all_positions", *ends], "positions")
        elif form.places:
            positions = self.node("Unsqueeze", ["cache_position", self.numbers(0)], "positions")
        else:
            start = self.node("Squeeze", ["past_length"], "start")
            end = self.node("Squeeze", ["total"], "end")
            positions = self.node(
                "Unsqueeze", [self.node("Range", [start, end, one], "row"), self.numbers(0)], "positions"
            )
        for name in ("cos", "sin"):
            wide = self.node("Gather", [self.weight(name), positions], f"{name}_at", axis=0)
            self.node("Unsqueeze", [wide, self.numbers(1)], f"{name}_of")
        self.node("Squeeze", ["total"], "total_scalar")
        if form.attention == "hand":
            keys = self.node("Range", [zero, "total_scalar", one], "keys")
            offset = self.node("Squeeze", ["past_length"], "offset")
            queries = self.node("Range", [offset, "total_scalar", one], "queries")
            seen = self.node("Unsqueeze", [queries, self.numbers(1)], "queries_down")
            self.node("GreaterOrEqual", [seen, keys], "causal")
            valid = self.node("Cast", ["attention_mask"], "valid", to=TensorProto.BOOL)
            valid = self.node("Unsqueeze", [valid, self.numbers(1, 2)], "valid_keys")
            allowed = self.node("And", ["causal", valid], "allowed")
            least = np.finfo(form.kind).min
            bounds = [self.constant("open", np.array(0, form.kind)), self.constant("shut", np.array(least, form.kind))]
            self.node("Where", [allowed, *bounds], "bias")
            return
        if form.attention == "gqa":
            lengths = self.node("ReduceSum", ["attention_mask", self.numbers(1)], "lengths", keepdims=0)
            total = self.node("Shape", ["attention_mask"], "mask_width", start=1, end=2)
        else:
            rows = self.node("Shape", ["input_ids"], "batch", start=0, end=1)
            lengths = self.node("Expand", ["total", rows], "lengths")
            total = "total"
        last = self.node("Sub", [lengths, one], "last")
        self.node("Cast", [last], "seqlens_k", to=TensorProto.INT32)
        total = self.node("Squeeze", [total], "total_in_cache")
        self.node("Cast", [total], "total_length", to=TensorProto.INT32)

    def heads(self, value: str, count: int, rotate: bool) -> str:
        """`[batch, sequence, heads * width]` as `[batch, heads, sequence, width]`, turned by the positions."""
        split = self.node("Reshape", [value, self.numbers(0, 0, count, HEAD_DIM)], f"{value}_split")
        turned = self.node("Transpose", [split], f"{value}_heads", perm=[0, 2, 1, 3])
        if not rotate:
            return turned
        half = [self.numbers(0), self.numbers(HEAD_DIM // 2), self.numbers(HEAD_DIM)]
        low = self.node("Slice", [turned, half[0], half[1], self.numbers(3)], f"{value}_low")
        high = self.node("Slice", [turned, half[1], half[2], self.numbers(3)], f"{value}_high")
        parts = []
        for name, first, second, kind in (("a", low, high, "Sub"), ("b", high, low, "Add")):
            cos = self.node("Mul", [first, "cos_of"], f"{value}_{name}_cos")
            sin = self.node("Mul", [second, "sin_of"], f"{value}_{name}_sin")
            parts.append(self.node(kind, [cos, sin], f"{value}_{name}"))
        return self.node("Concat", parts, f"{value}_rotated", axis=-1)

    def joined(self, heads: str, output: str) -> str:
        """The other way round."""
        turned = self.node("Transpose", [heads], f"{output}_turned", perm=[0, 2, 1, 3])
        return self.node("Reshape", [turned, self.numbers(0, 0, -1)], output)

    def attention(self, i: int, normed: str) -> str:
        form = self.form
        for name in "qkv":
            self.matrix(normed, f"{name}{i}", f"{name}_{i}")
        q, k, v = self.heads(f"q_{i}", HEADS, True), self.heads(f"k_{i}", KV_HEADS, True), f"v_{i}"
        same = form.cache_kind == form.kind
        present = {part: f"present.{i}.{part}" if same else f"present_{i}_{part}" for part in ("key", "value")}
        if form.attention == "hand":
            every = {}
            for part, new in (("key", k), ("value", self.heads(v, KV_HEADS, False))):
                self.node("Concat", [self.pasts[i, part], new], present[part], axis=2)
                wide = self.node("Unsqueeze", [present[part], self.numbers(2)], f"{part}_{i}_wide")
                twice = self.node("Concat", [wide] * (HEADS // KV_HEADS), f"{part}_{i}_twice", axis=2)
                every[part] = self.node("Reshape", [twice, self.numbers(0, HEADS, -1, HEAD_DIM)], f"{part}_{i}_every")
            keys = self.node("Transpose", [every["key"]], f"keys_{i}", perm=[0, 1, 3, 2])
            scale = self.constant("scale", np.array(HEAD_DIM**-0.5, form.kind))
            scores = self.node("Mul", [self.node("MatMul", [q, keys], f"raw_{i}"), scale], f"scores_{i}")
            weighed = self.node("Softmax", [self.node("Add", [scores, "bias"], f"biased_{i}")], f"weights_{i}", axis=-1)
            out = self.joined(self.node("MatMul", [weighed, every["value"]], f"mixed_{i}"), f"a{i}")
        else:
            out = f"a{i}"
            inputs = [self.joined(q, f"q_{i}_in"), self.joined(k, f"k_{i}_in"), v]
            inputs += [self.pasts[i, "key"], self.pasts[i, "value"], "seqlens_k", "total_length"]
            self.nodes.append(
                helper.make_node(
                    "GroupQueryAttention",
                    inputs,
                    [out, present["key"], present["value"]],
                    domain="com.microsoft",
                    num_heads=HEADS,
                    kv_num_heads=KV_HEADS,
                )
            )
        if not same:
            for part, name in present.items():
                self.cast(name, form.cache_kind, f"present.{i}.{part}")
        return self.matrix(out, f"o{i}", f"ao{i}")

    def convolution(self, i: int, normed: str) -> str:
        """A short causal convolution over tokens, gated; its state is its last `KERNEL` inputs, `[batch, hidden, KERNEL]`."""
        shape: list[int | str] = ["batch_size", HIDDEN, KERNEL]
        given = self.take(f"past_conv.{i}", _ONNX[self.form.cache_kind], shape)
        self.give(f"present_conv.{i}", _ONNX[self.form.cache_kind], shape)
        past = self.cast(given, self.form.kind, f"conv_past_{i}")
        if self.form.convolution == "whole":
            single = self.node("Equal", ["sequence", self.scalar(1)], "single")
            past = self.node("Mul", [past, self.cast(single, self.form.kind, "counts")], f"conv_past_{i}_used")
        value = self.matrix(normed, "conv_in", f"conv_in_{i}")
        gate = self.node("Sigmoid", [self.matrix(normed, "conv_gate", f"conv_gate_{i}")], f"conv_open_{i}")
        new = self.node("Transpose", [value], f"conv_new_{i}", perm=[0, 2, 1])
        every = self.node("Concat", [past, new], f"conv_every_{i}", axis=2)
        ends = [self.numbers(2**62), self.numbers(2)]
        state = self.node("Slice", [every, self.numbers(-KERNEL), *ends], f"conv_state_{i}")
        self.cast(state, self.form.cache_kind, f"present_conv.{i}")
        window = self.node("Slice", [every, self.numbers(1), *ends], f"conv_window_{i}")
        mixed = self.node("Conv", [window, self.weight("kernel")], f"conv_mixed_{i}", group=HIDDEN)
        gated = self.node(
            "Mul", [self.node("Transpose", [mixed], f"conv_out_{i}", perm=[0, 2, 1]), gate], f"conv_gated_{i}"
        )
        return self.matrix(gated, "conv_out", f"ao{i}")


def four_bits(
    weight: NDArray[np.float32], with_zeros: bool
) -> tuple[NDArray[np.uint8], NDArray[np.float32], NDArray[np.uint8] | None]:
    """A matrix `[rows, columns]` as MatMulNBits takes it: blocks along the rows, two values a byte, the lower one first."""
    blocks = weight.T.reshape(weight.shape[1], -1, BITS_BLOCK)
    if with_zeros:
        low, high = blocks.min(-1, keepdims=True), blocks.max(-1, keepdims=True)
        scales = (high - low) / 15
        zeros = np.clip(np.round(-low / scales), 0, 15)
    else:
        scales = np.abs(blocks).max(-1, keepdims=True) / 7
        zeros = np.full_like(scales, 8)
    values = np.clip(np.round(blocks / scales + zeros), 0, 15).astype(np.uint8)
    packed = values[..., 0::2] | values[..., 1::2] << 4
    if not with_zeros:
        return packed, scales[..., 0], None
    flat = zeros[..., 0].astype(np.uint8)
    flat = np.pad(flat, ((0, 0), (0, flat.shape[1] % 2)))
    return packed, scales[..., 0], flat[:, 0::2] | flat[:, 1::2] << 4


def unpacked(
    packed: NDArray[np.uint8], scales: NDArray[np.float32], zeros: NDArray[np.uint8] | None
) -> NDArray[np.float32]:
    """What `four_bits` made, as the matrix that it stands for."""

    def apart(values: NDArray[np.uint8]) -> NDArray[np.float32]:
        return np.stack([values & 15, values >> 4], axis=-1).reshape(*values.shape[:-1], -1).astype(np.float32)

    offsets = np.float32(8) if zeros is None else apart(zeros)[:, : scales.shape[1], None]
    return ((apart(packed) - offsets) * scales[..., None]).reshape(len(packed), -1).T


def graph(form: Form, seed: int = 0) -> onnx.ModelProto:
    """The model in a form."""
    return _Graph(form, seed).build()


def build(
    folder: Path, form: Form, eos: int | list[int] = EOS, file: str = "onnx/model_q4.onnx", files: int = 0
) -> Path:
    """Writes a folder as a repository for transformers.js is laid out; `files` says in how many others the weights are."""
    path = folder / file
    path.parent.mkdir(parents=True, exist_ok=True)
    model = graph(form)
    if files:
        large = [tensor for tensor in model.graph.initializer if len(tensor.raw_data) >= 1024]
        for place, tensor in enumerate(large):
            number = place % files
            name = f"{path.name}_data" + (f"_{number}" if number else "")
            onnx.external_data_helper.set_external_data(tensor, name)
    onnx.save(model, str(path))
    config = {"model_type": "llama", "max_position_embeddings": CONTEXT, "vocab_size": VOCAB, "eos_token_id": EOS}
    (folder / "config.json").write_text(json.dumps(config))
    (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": eos}))
    return folder
