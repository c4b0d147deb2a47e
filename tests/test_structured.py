"""Structured output of the real model over HTTP: every answer is of its form, whatever samples it and whoever is beside it."""

from __future__ import annotations

import json
import os
import re
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import TYPE_CHECKING, Any

import jsonschema
import openai
import pytest

from support.serve import Server, server, text_of

if TYPE_CHECKING:
    from collections.abc import Iterator

pytestmark = [pytest.mark.model, pytest.mark.timeout(900)]

SCHEMA = {
    "type": "object",
    "properties": {
        "title": {"type": "string", "minLength": 3, "maxLength": 40},
        "year": {"type": "integer", "minimum": 1900, "maximum": 2026},
        "rating": {"type": "number", "minimum": 0, "maximum": 10},
        "genres": {
            "type": "array",
            "items": {"enum": ["drama", "comedy", "science fiction"]},
            "minItems": 1,
            "maxItems": 3,
        },
        "director": {
            "anyOf": [{"type": "null"}, {"$ref": "#/$defs/person"}],
        },
    },
    "required": ["title", "year", "rating", "genres", "director"],
    "additionalProperties": False,
    "$defs": {
        "person": {
            "type": "object",
            "properties": {"name": {"type": "string", "pattern": "^[A-Z][a-z]{1,12} [A-Z][a-z]{1,12}$"}},
            "required": ["name"],
            "additionalProperties": False,
        }
    },
}
FORMAT = {"type": "json_schema", "name": "film", "schema": SCHEMA, "strict": True}
QUESTION = "Describe a film as JSON."


@pytest.fixture(scope="module")
def one(model_home: Path) -> Iterator[Server]:
    """A server for all tests here."""
    model = os.environ.get("EMBERD_TEST_MODEL", "smollm2-135m")
    with server("--model", model, engine="auto", home=model_home) as ready:
        yield ready


def ask(one: Server, seed: int, **more: Any) -> dict[str, Any]:
    body = {"input": QUESTION, "temperature": 1, "seed": seed, "max_output_tokens": 400, "text": {"format": FORMAT}}
    status, response = one.post({**body, **more})
    assert status == 200, response
    return response


def valid(response: dict[str, Any]) -> str:
    assert response["status"] == "completed", response
    text = text_of(response)
    # Any number a bound allows, however long it is written, is one that JSON can hold.
    jsonschema.validate(json.loads(text), SCHEMA)
    return text


def test_twenty_answers_with_as_many_seeds_are_of_their_schema(one: Server) -> None:
    with ThreadPoolExecutor(5) as pool:
        texts = list(pool.map(lambda seed: valid(ask(one, seed)), range(20)))
    assert len(set(texts)) > 10  # the seeds do say something


def test_whatever_controls_an_answer_it_is_of_its_schema(one: Server) -> None:
    for seed, controls in enumerate(
        [
            {"temperature": 0},
            {"temperature": 2, "top_p": 0.9},
            {"top_k": 4, "presence_penalty": 1.5, "frequency_penalty": 1.5},
            {"min_p": 0.1, "repetition_penalty": 1.5},
            {"temperature": 1, "logit_bias": {"2": 100}},
        ]
    ):
        valid(ask(one, seed, **controls))


def test_what_is_told_of_a_form_are_the_models_own_probabilities(one: Server) -> None:
    response = ask(one, 3, top_logprobs=2, temperature=0)
    text = valid(response)
    told = response["output"][0]["content"][0]["logprobs"]
    assert "".join(each["token"] for each in told) == text
    assert any(each["logprob"] < min(top["logprob"] for top in each["top_logprobs"]) for each in told)


def test_a_stream_is_cut_where_it_is_and_says_the_same(one: Server) -> None:
    whole = valid(ask(one, 7))
    body = {"input": QUESTION, "temperature": 1, "seed": 7, "max_output_tokens": 400, "text": {"format": FORMAT}}
    with one.stream(body) as events:
        told = "".join(event["delta"] for name, event in events if name == "response.output_text.delta")
    assert told == whole
    cut = ask(one, 7, max_output_tokens=6)
    assert cut["status"] == "incomplete"
    assert whole.startswith(text_of(cut))


def test_answers_with_a_form_and_without_run_together_as_they_do_alone(one: Server) -> None:
    plain = {"text": {"format": {"type": "text"}}, "max_output_tokens": 40}
    with ThreadPoolExecutor(4) as pool:
        asked = [pool.submit(ask, one, 100 + at, **(plain if at % 2 else {})) for at in range(8)]
        responses = [each.result() for each in asked]
    for at, response in enumerate(responses):
        if at % 2:
            assert response["usage"]["output_tokens"] > 1
        else:
            valid(response)


def test_the_other_forms_are_kept_to(one: Server) -> None:
    pattern = "(yes|no), because [a-z ]{5,60}\\."
    text = text_of(ask(one, 1, text={"format": {"type": "grammar", "syntax": "regex", "definition": pattern}}))
    assert re.fullmatch(pattern, text)
    lark = 'start: "The answer is " NUMBER "."\nNUMBER: /[0-9]{1,4}/'
    text = text_of(ask(one, 1, text={"format": {"type": "grammar", "syntax": "lark", "definition": lark}}))
    assert re.fullmatch(r"The answer is [0-9]{1,4}\.", text)
    response = ask(one, 1, temperature=0, text={"format": {"type": "json_object"}})
    if response["status"] == "completed":
        assert isinstance(json.loads(text_of(response)), dict)
    else:
        assert text_of(response).startswith("{")


def test_the_openai_package_asks_for_a_form_and_parses_it(one: Server) -> None:
    with openai.OpenAI(base_url=f"{one.url}/v1", api_key="k", max_retries=0, timeout=120) as client:
        answer = client.responses.create(
            model="smollm2-135m", input=QUESTION, temperature=0, max_output_tokens=400, text={"format": FORMAT}
        )
        jsonschema.validate(json.loads(answer.output_text), SCHEMA)
        assert answer.text.format.type == "json_schema"
        assert answer.text.format.schema_ == SCHEMA
        with pytest.raises(openai.BadRequestError, match="uniqueItems") as refused:
            bad = {"type": "array", "uniqueItems": True}
            client.responses.create(
                model="smollm2-135m",
                input=QUESTION,
                text={"format": {"type": "json_schema", "name": "bad", "schema": bad, "strict": True}},
            )
        assert refused.value.param == "text.format.schema"
