"""Sampling through both doors: what a client asks for in words is what the engine does with ids.

The model is the tiny one, with a vocabulary in which every id is a word: `w40` is the text of id 40.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest

import tiny
from cases import Case, prompt
from emberd import _core
from fakeport import Sampling
from support.serve import Server, server, text_of
from support.worker import chat, worker

if not hasattr(_core, "start"):
    pytest.skip("the extension module is not built", allow_module_level=True)

if TYPE_CHECKING:
    from collections.abc import Iterator

IDS = prompt(6, 12)
WORDS = " ".join(f"w{each}" for each in IDS)


def build(folder: Path, **generation: object) -> Path:
    """The tiny model, with a tokenizer and a template that adds nothing."""
    tiny.build(folder, eos=[])
    vocab = {f"w{each}": each for each in range(tiny.VOCAB)}
    model = {"type": "WordLevel", "vocab": vocab, "unk_token": "w0"}
    tokenizer = {"version": "1.0", "added_tokens": [], "pre_tokenizer": {"type": "WhitespaceSplit"}, "model": model}
    (folder / "tokenizer.json").write_text(json.dumps(tokenizer))
    template = "{% for message in messages %}{{ message.content }} {% endfor %}"
    (folder / "tokenizer_config.json").write_text(json.dumps({"chat_template": template}))
    (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": [], **generation}))
    return folder


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return build(tmp_path_factory.mktemp("tiny"))


@pytest.fixture(scope="module")
def one(folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """A server for all tests here that leave it as they find it."""
    with server("--model", folder, engine="onnx", home=tmp_path_factory.mktemp("home")) as ready:
        yield ready


def ids_of(text: str) -> list[int]:
    return [int(word.removeprefix("w")) for word in text.split()]


def expected(folder: Path, tokens: int, sampling: Sampling | None) -> list[int]:
    """What the engine makes of the prompt without a door."""
    return Case("onnx", "onnx", build, 230, folder).single(IDS, tokens, sampling)


def asks(one: Server, **more: object) -> dict[str, Any]:
    status, response = one.post({"input": WORDS, "max_output_tokens": 24, **more})
    assert status == 200, response
    assert isinstance(response, dict)
    return response


ASKED: list[tuple[dict[str, Any], Sampling]] = [
    ({"repetition_penalty": 1.5}, Sampling(0.0, repetition_penalty=1.5)),
    ({"presence_penalty": 1.5}, Sampling(0.0, presence_penalty=1.5)),
    ({"frequency_penalty": -2}, Sampling(0.0, frequency_penalty=-2.0)),
    ({"logit_bias": {"20": 100, "21": -100}}, Sampling(0.0, logit_bias={20: 100.0, 21: -100.0})),
    ({"temperature": 1.0, "seed": 4, "min_p": 0.25}, Sampling(1.0, seed=4, min_p=0.25)),
    (
        {"temperature": 1.5, "seed": 5, "top_p": 0.75, "top_k": 50, "min_p": 0.03125, "repetition_penalty": 1.25}
        | {"presence_penalty": 0.5, "frequency_penalty": 0.25, "logit_bias": {"30": 2.5}},
        Sampling(1.5, 0.75, 50, 5, 0.03125, 1.25, 0.5, 0.25, {30: 2.5}),
    ),
]


@pytest.mark.parametrize(
    ("asked", "sampling"), ASKED, ids=lambda each: "+".join(each) if isinstance(each, dict) else ""
)
def test_what_is_asked_for_is_done_and_repeated(
    one: Server, folder: Path, asked: dict[str, Any], sampling: Sampling
) -> None:
    response = asks(one, **asked)
    assert ids_of(text_of(response)) == expected(folder, 24, sampling)
    assert {key: response[key] for key in asked} == asked
    with one.stream({"input": WORDS, "max_output_tokens": 24, **asked}) as stream:
        events = list(stream)
    assert "".join(event["delta"] for name, event in events if name.endswith(".delta")) == text_of(response)
    for name, event in events:
        if name in ("response.created", "response.in_progress", "response.incomplete"):
            assert {key: event["response"][key] for key in asked} == asked


def test_neutral_values_change_nothing(one: Server, folder: Path) -> None:
    neutral = {"presence_penalty": 0, "frequency_penalty": 0, "repetition_penalty": 1, "min_p": 0, "logit_bias": {}}
    plainly = expected(folder, 24, None)
    assert ids_of(text_of(asks(one))) == plainly
    response = asks(one, temperature=0, top_logprobs=0, **neutral)
    assert ids_of(text_of(response)) == plainly
    assert {key: response[key] for key in neutral} == neutral
    assert response["output"][0]["content"][0]["logprobs"] == []


def test_a_bias_of_a_token_that_the_model_has_not_is_refused_before_a_stream_begins(one: Server) -> None:
    for stream in (False, True):
        status, answer = one.post({"input": WORDS, "stream": stream, "logit_bias": {"5": 1, "320": 1}})
        assert (status, answer["error"]["code"], answer["error"]["param"]) == (400, "invalid_value", "logit_bias.320")
        assert "outside the vocabulary of 320" in answer["error"]["message"]


@pytest.mark.parametrize(
    ("field", "value", "code"),
    [
        ("min_p", 1.5, "invalid_value"),
        ("repetition_penalty", 0, "invalid_value"),
        ("presence_penalty", -2.5, "invalid_value"),
        ("frequency_penalty", "1", "invalid_type"),
        ("logit_bias", [1], "invalid_type"),
        ("top_logprobs", 21, "invalid_value"),
    ],
)
def test_a_value_that_cannot_be_is_named(one: Server, field: str, value: object, code: str) -> None:
    status, answer = one.post({"input": WORDS, field: value})
    assert (status, answer["error"]["code"], answer["error"]["param"]) == (400, code, field)


# Log probabilities.


@pytest.mark.parametrize("asked", [{"top_logprobs": 3}, {"include": ["message.output_text.logprobs"]}])
def test_log_probabilities_stand_with_every_token_of_the_text(one: Server, asked: dict[str, Any]) -> None:
    more = {"input": WORDS, "max_output_tokens": 10, "temperature": 1.5, "seed": 2, "stop": "w999", **asked}
    status, response = one.post(more)
    assert status == 200
    assert response["top_logprobs"] == asked.get("top_logprobs", 0)
    [part] = response["output"][0]["content"]
    told = part["logprobs"]
    assert [each["token"] for each in told] == part["text"].split()
    for each in told:
        assert bytes(each["bytes"]).decode() == each["token"]
        assert len(each["top_logprobs"]) == asked.get("top_logprobs", 0)
        for likely in [each, *each["top_logprobs"]]:
            assert -100 < likely["logprob"] <= 0
        tops = [likely["logprob"] for likely in each["top_logprobs"]]
        assert tops == sorted(tops, reverse=True)
        assert all(
            likely["token"] != each["token"] or likely["logprob"] == each["logprob"] for likely in each["top_logprobs"]
        )
    assert np.exp([each["logprob"] for each in told]).std() > 0, "not one number for all"
    with one.stream(more) as stream:
        events = list(stream)
    deltas = [event for name, event in events if name == "response.output_text.delta"]
    assert [each for event in deltas for each in event["logprobs"]] == told
    for event in deltas:
        assert [each["token"] for each in event["logprobs"]] == event["delta"].split()
    [done] = [event for name, event in events if name == "response.output_text.done"]
    assert done["logprobs"] == told
    assert events[-1][1]["response"]["output"][0]["content"] == [part]


def test_log_probabilities_of_tokens_that_a_stop_cuts_off_are_not_told(one: Server) -> None:
    whole = asks(one, top_logprobs=1)["output"][0]["content"][0]
    words = whole["text"].split()
    stop = next(word for word in words[3:] if words.index(word) >= 3 and not any(word in each for each in words[:3]))
    place = words.index(stop)
    cut = asks(one, top_logprobs=1, stop=stop)["output"][0]["content"][0]
    assert cut["text"].split() == words[:place]
    # The blank before the stop is its token's own, as this vocabulary is written.
    assert cut["logprobs"][:place] == whole["logprobs"][:place]
    assert len(cut["logprobs"]) <= place + 1


def test_nothing_is_told_to_who_did_not_ask(one: Server) -> None:
    assert asks(one, temperature=1.0, seed=3)["output"][0]["content"][0]["logprobs"] == []


# The model's makers.


def test_the_makers_repetition_penalty_holds_at_both_doors(tmp_path: Path, place: Path) -> None:
    folder = build(tmp_path / "model", repetition_penalty=1.5)
    penalised = expected(folder, 24, Sampling(0.0, repetition_penalty=1.5))
    plainly = expected(folder, 24, None)
    assert penalised != plainly
    with server("--model", folder, engine="onnx", home=tmp_path) as one:
        response = asks(one)
        assert (ids_of(text_of(response)), response["repetition_penalty"]) == (penalised, 1.5)
        assert ids_of(text_of(asks(one, repetition_penalty=1))) == plainly
    with worker(place, "--model", folder, engine="onnx", home=tmp_path) as warm, warm.connect() as client:
        assert ids_of(client.ask(chat("1", WORDS, 24))["text"]) == penalised
