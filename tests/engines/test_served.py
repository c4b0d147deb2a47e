"""A folder as repositories for transformers.js are laid out, through the command and its HTTP door."""

from __future__ import annotations

import json
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import onnx
import pytest
from onnx import TensorProto, helper

import hubgraphs
import tiny
from cases import Case, prompt
from hubgraphs import Form
from support.process import emberd
from support.serve import Server, server, text_of

FORMS = {
    "written-out attention": Form(),
    "group query attention": Form(attention="gqa", keep="num_logits_to_keep"),
    "hybrid of four bits and halves": Form(convolution="pieces", bits="zero points", kind="float16"),
}


def repository(folder: Path, form: Form) -> Path:
    """Config files as transformers writes them, a tokenizer of whole words, and the graph with its weights beside it."""
    hubgraphs.build(folder, form, files=2)
    eos = "</s>"  # a special token is found within words, so it must be no part of one
    vocab = {eos if id == tiny.EOS else f"w{id}": id for id in range(tiny.VOCAB)}
    special = {"single_word": False, "lstrip": False, "rstrip": False, "normalized": False, "special": True}
    tokenizer = {
        "version": "1.0",
        "added_tokens": [{"id": tiny.EOS, "content": eos, **special}],
        "pre_tokenizer": {"type": "WhitespaceSplit"},
        "model": {"type": "WordLevel", "vocab": vocab, "unk_token": "w0"},
    }
    config = {
        "architectures": ["TinyForCausalLM"],
        "model_type": "tiny",
        "n_positions": tiny.CONTEXT,
        "vocab_size": tiny.VOCAB,
        "eos_token_id": tiny.EOS,
        "transformers.js_config": {"use_external_data_format": {"model_q4.onnx": 2}},
    }
    files: dict[str, dict[str, Any]] = {
        "config.json": config,
        "generation_config.json": {"eos_token_id": [tiny.EOS], "transformers_version": "4.57.0"},
        "tokenizer.json": tokenizer,
        "tokenizer_config.json": {
            "tokenizer_class": "PreTrainedTokenizerFast",
            "eos_token": eos,
            "model_max_length": 1000000000000000019884624838656,
            "chat_template": "{% for message in messages %}{{ message['content'] }} {% endfor %}",
        },
        "special_tokens_map.json": {"eos_token": eos},
    }
    for name, content in files.items():
        (folder / name).write_text(json.dumps(content))
    return folder


def words(ids: list[int]) -> str:
    return " ".join(f"w{id}" for id in ids)


def ask(one: Server, tokens: list[int], limit: int) -> str:
    status, response = one.post({"input": words(tokens), "max_output_tokens": limit, "temperature": 0})
    assert status == 200, response
    return text_of(response)


@pytest.mark.parametrize("name", FORMS)
def test_a_repositorys_folder_is_served_as_it_lies(name: str, tmp_path: Path) -> None:
    folder = repository(tmp_path / "repository", FORMS[name])
    case = Case(name, "onnx", lambda folder, eos: folder, long=230, folder=folder)
    asked = {id: (prompt(id, 5 + 9 * id), 20 + id) for id in range(8)}
    expected = {
        id: words([token for token in answer if token != tiny.EOS]) for id, answer in case.singles(asked).items()
    }
    with server("--model", folder, engine="auto", home=tmp_path / "home") as one:
        status, models = one.get("/v1/models")
        assert status == 200
        [model] = models["data"]
        assert model["id"]
        with ThreadPoolExecutor(8) as pool:
            answers = list(pool.map(lambda id: ask(one, *asked[id]), asked))
    assert dict(zip(asked, answers, strict=True)) == expected
    assert len(set(answers)) == 8


def test_a_folder_whose_graph_cannot_be_filled_is_refused_by_the_input(tmp_path: Path) -> None:
    folder = repository(tmp_path / "repository", Form())
    graph = folder / "onnx" / "model_q4.onnx"
    model = onnx.load(str(graph), load_external_data=False)
    model.graph.input.append(helper.make_tensor_value_info("pixel_values", TensorProto.FLOAT, ["batch", 3]))
    graph.write_bytes(model.SerializeToString())
    with emberd("serve", "--port", "0", "--model", folder, home=tmp_path / "home") as process:
        told = process.logged("has an input")
    assert "has an input pixel_values; expected input_ids, attention_mask" in told
