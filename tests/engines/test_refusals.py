"""Graphs and configs that cannot be run: each is refused at load, by what is wrong with it; and configs of other families, which can."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper

import hubgraphs
import tiny
from cases import prompt
from emberd.concat import rows_of
from emberd.engine import EngineError
from emberd.session import Model, find_graph
from fakeport import Settings
from hubgraphs import Form

PLAIN = Form()


def refusal(folder: Path, **settings: int) -> str:
    with pytest.raises(EngineError) as error:
        Model(str(folder), Settings(**settings))
    assert "; hint: " in str(error.value)
    return str(error.value)


def edited(folder: Path, form: Form = PLAIN) -> onnx.ModelProto:
    hubgraphs.build(folder, form)
    return onnx.load(str(find_graph(folder)))


@pytest.mark.parametrize("name", ["inputs_embeds", "token_type_ids", "encoder_hidden_states", "past_observed_mask"])
def test_an_input_that_nobody_can_fill_is_refused_by_name(tmp_path: Path, name: str) -> None:
    model = edited(tmp_path)
    model.graph.input.append(helper.make_tensor_value_info(name, TensorProto.INT64, ["batch", "sequence"]))
    onnx.save(model, str(find_graph(tmp_path)))
    assert f"has an input {name}; expected input_ids" in refusal(tmp_path)


def test_a_model_without_keys_and_values_is_refused(tmp_path: Path) -> None:
    model = edited(tmp_path)
    float_, value = TensorProto.FLOAT, helper.make_tensor_value_info
    taken = [value("input_ids", TensorProto.INT64, ["b", "s"]), value("past_ssm.0", float_, ["b", 4])]
    given = [value("logits", float_, ["b", "s", 4]), value("present_ssm.0", float_, ["b", 4])]
    nodes = [
        helper.make_node("Identity", ["past_ssm.0"], ["present_ssm.0"]),
        helper.make_node("Unsqueeze", ["past_ssm.0", "one"], ["logits"]),
    ]
    one = helper.make_tensor("one", TensorProto.INT64, [1], [1])
    model.graph.CopyFrom(helper.make_graph(nodes, "recurrent", taken, given, initializer=[one]))
    onnx.save(model, str(find_graph(tmp_path)))
    assert "has the inputs input_ids, past_ssm.0; expected input_ids, attention_mask" in refusal(tmp_path)


def test_inputs_of_other_shapes_and_types_are_refused(tmp_path: Path) -> None:
    for number, (name, kind, shape, told) in enumerate(
        [
            ("position_ids", TensorProto.INT64, [3, "batch", "sequence"], "position_ids as tensor(int64) of shape [3,"),
            ("input_ids", TensorProto.INT32, ["batch", "sequence"], "input_ids as tensor(int32)"),
            ("past_key_values.0.key", TensorProto.FLOAT, ["batch", 2, 64, 16], "of a fixed length of 64"),
            ("past_key_values.0.key", TensorProto.FLOAT, ["batch", "heads", "past", 16], "heads and width of past_key"),
            ("past_key_values.0.key", TensorProto.DOUBLE, ["batch", 2, "past", 16], "as tensor(double)"),
        ]
    ):
        folder = tmp_path / str(number)
        model = edited(folder)
        [place] = [n for n, each in enumerate(model.graph.input) if each.name == name]
        model.graph.input[place].CopyFrom(helper.make_tensor_value_info(name, kind, shape))
        bare = helper.make_graph(
            [helper.make_node("Identity", [each.name], [f"out_{each.name}"]) for each in model.graph.input]
            + [helper.make_node("Cast", ["input_ids"], ["logits"], to=TensorProto.FLOAT)],
            "bare",
            model.graph.input,
            [helper.make_empty_tensor_value_info(f"out_{each.name}") for each in model.graph.input]
            + [helper.make_tensor_value_info("logits", TensorProto.FLOAT, None)],
        )
        for each in bare.output:
            each.name = each.name.replace("out_past_key_values", "present")
        for node in bare.node:
            node.output[0] = node.output[0].replace("out_past_key_values", "present")
        opsets = [helper.make_opsetid("", 20)]
        onnx.save(helper.make_model(bare, opset_imports=opsets, ir_version=10), str(find_graph(folder)))
        assert told in refusal(folder)


def test_a_state_whose_size_the_graph_leaves_open_is_that_of_the_config_or_refused(tmp_path: Path) -> None:
    model = edited(tmp_path, Form(convolution="pieces"))
    for each in (*model.graph.input, *model.graph.output):
        if "conv" in each.name:
            each.type.tensor_type.shape.dim[1].dim_param = "hidden"
            each.type.tensor_type.shape.dim[2].dim_param = "window"
    onnx.save(model, str(find_graph(tmp_path)))
    assert "has the state past_conv.0 of shape ['batch_size', 'hidden', 'window']" in refusal(tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    config |= {"hidden_size": tiny.HIDDEN, "conv_L_cache": hubgraphs.KERNEL, "eos_token_id": []}
    (tmp_path / "config.json").write_text(json.dumps(config))
    (tmp_path / "generation_config.json").unlink()
    whole = hubgraphs.build(tmp_path / "whole", Form(convolution="pieces"), eos=[])
    answers = []
    for folder in (tmp_path, whole):
        rows = rows_of(Model(str(folder), Settings()), 32)
        rows.extend(0, prompt(1, 20))
        answers.append(rows.greedy(1))
    assert answers[0] == answers[1]


def test_an_operator_that_there_is_not_is_named(tmp_path: Path) -> None:
    for number, (node, told) in enumerate(
        [
            (helper.make_node("NoSuchOperator", ["logits_0"], ["logits"], domain="com.microsoft"), "NoSuchOperator"),
            (helper.make_node("NoSuchOperator", ["logits_0"], ["logits"]), "NoSuchOperator"),
            (helper.make_node("Attractor", ["logits_0"], ["logits"], domain="org.nowhere"), "Attractor"),
            # Known, but only to graphics cards.
            (
                helper.make_node(
                    "GroupNorm",
                    ["logits_0", "gain", "gain"],
                    ["logits"],
                    groups=1,
                    activation=0,
                    domain="com.microsoft",
                ),
                "GroupNorm",
            ),
        ]
    ):
        folder = tmp_path / str(number)
        model = edited(folder)
        for each in model.graph.node:
            if each.output[0] == "logits":
                each.output[0] = "logits_0"
        model.graph.node.append(node)
        if node.domain == "org.nowhere":
            model.opset_import.append(helper.make_opsetid("org.nowhere", 1))
        onnx.save(model, str(find_graph(folder)))
        reason = refusal(folder)
        assert "cannot be run: onnxruntime" in reason and told in reason.split("for processors")[0], reason


def test_a_graph_whose_answer_does_not_depend_on_its_past_is_refused(tmp_path: Path) -> None:
    model = edited(tmp_path)
    for each in model.graph.node:
        if each.op_type == "Concat" and each.output[0] == "present.0.key":
            each.output[0] = "lost"
            fake = helper.make_node("Mul", ["lost", "nothing"], ["present.0.key"])
            at = list(model.graph.node).index(each)
            break
    nothing = onnx.numpy_helper.from_array(np.array(-3.0, np.float32), "nothing")
    model.graph.initializer.append(nothing)
    model.graph.node.insert(at + 1, fake)
    onnx.save(model, str(find_graph(tmp_path)))
    reason = refusal(tmp_path)
    assert "with shared buffers: " in reason
    assert "with concatenated caches: its logits after a prompt are not those of one pass over all" in reason


# The config.


@pytest.mark.parametrize(
    "config",
    [
        {"n_positions": 128},
        {"text_config": {"max_position_embeddings": 128}},
        {"max_seq_len": 128, "n_ctx": 64},
        {"max_position_embeddings": None, "seq_length": 128},
    ],
)
def test_the_context_length_has_several_names(tmp_path: Path, config: dict[str, object]) -> None:
    folder = hubgraphs.build(tmp_path, Form())
    (folder / "config.json").write_text(json.dumps(config))
    assert Model(str(folder), Settings()).context_length == 128
    assert Model(str(folder), Settings(context_length=100)).context_length == 100


def test_a_context_length_that_is_given_will_do(tmp_path: Path) -> None:
    folder = hubgraphs.build(tmp_path, Form())
    (folder / "config.json").write_text("{}")
    assert Model(str(folder), Settings(context_length=90)).context_length == 90
    assert "gives no max_position_embeddings; hint: " in refusal(folder)
