"""The real model through both doors: the golden answer, and what only a model that computes can show.

The model is fetched once into the checkout's cache. `EMBERD_TEST_HOME` names another place for it, `EMBERD_TEST_MODEL`
another model folder, which is then taken as it is.
"""

from __future__ import annotations

import itertools
import json
import os
import re
import shutil
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import TYPE_CHECKING, Any

import openai
import pytest

from support.process import emberd, eventually, run
from support.serve import Server, server, text_of
from support.worker import TAG, chat, worker

if TYPE_CHECKING:
    from collections.abc import Iterator

pytestmark = [pytest.mark.model, pytest.mark.timeout(900)]

NAME = "smollm2-135m"
QUESTION = "What is the capital of France?"
GOLDEN = "The capital of France is Paris."
PROMPT_TOKENS = 37
"""Of the question, with the template and its default system text."""
ANSWER_TOKENS = 8
"""Of the golden answer, the end-of-sequence token included."""
LONG_TASK = "Write a very long story about the sea."
"""Answered in far more than a thousand tokens."""


@pytest.fixture(scope="session")
def model() -> str:
    """The model's name, or its folder."""
    return os.environ.get("EMBERD_TEST_MODEL", NAME)


@pytest.fixture(scope="module")
def one(model_home: Path, model: str) -> Iterator[Server]:
    """A server for all tests here that leave it as they find it."""
    with server("--model", model, engine="auto", home=model_home) as ready:
        yield ready


@pytest.fixture
def client(one: Server) -> Iterator[openai.OpenAI]:
    """The openai package, told to take nothing that is not as documented."""
    with openai.OpenAI(
        base_url=f"{one.url}/v1", api_key="k", max_retries=0, timeout=120, _strict_response_validation=True
    ) as client:
        yield client


def asks(one: Server, text: str | list[dict[str, str]] = QUESTION, tokens: int = 32, **more: object) -> dict[str, Any]:
    status, response = one.post({"input": text, "max_output_tokens": tokens, **more})
    assert status == 200, response
    assert isinstance(response, dict)
    return response


# Fetching.


@pytest.mark.skipif("EMBERD_TEST_MODEL" in os.environ, reason="the model is not a fetched one")
def test_a_model_that_is_here_is_not_fetched_again(model_home: Path) -> None:
    def files() -> dict[Path, int]:
        return {
            path: path.stat().st_mtime_ns for path in model_home.rglob("*") if path.is_file() and path.suffix != ".lock"
        }

    before = files()
    done = run("models", "pull", NAME, home=model_home)
    assert (done.returncode, done.stderr) == (0, "")
    folder = Path(done.stdout.strip().removeprefix(f"{NAME} is ready in "))
    assert (folder / "config.json").is_file()
    assert files() == before
    listed = run("models", "list", home=model_home).stdout
    assert re.search(rf"^{NAME} +\S+ MB +ready$", listed, re.MULTILINE), listed


@pytest.mark.skipif("EMBERD_TEST_MODEL" in os.environ, reason="the model is not a fetched one")
@pytest.mark.parametrize("name", ["tokenizer.json", "config.json"])
def test_a_truncated_file_is_refused_by_its_name(name: str, model_home: Path, tmp_path: Path) -> None:
    whole = Path(run("models", "pull", NAME, home=model_home).stdout.strip().removeprefix(f"{NAME} is ready in "))
    broken = tmp_path / "broken"
    broken.mkdir()
    for path in whole.iterdir():
        (broken / path.name).symlink_to(path)
    content = (whole / name).read_bytes()
    (broken / name).unlink()
    (broken / name).write_bytes(content[:-10])
    with emberd("serve", "--port", "0", "--model", broken, home=tmp_path) as process:
        process.logged(f"{name} has {len(content) - 10} bytes instead of {len(content)}")
    shutil.copy(whole / name, tmp_path / "copy")
    (broken / name).unlink()
    (tmp_path / "copy").rename(broken / name)
    with server("--model", broken, engine="auto", home=tmp_path) as one:
        assert text_of(asks(one)) == GOLDEN


# The golden answer.


def test_the_worker_door_gives_the_golden_answer_to_bare_bytes(model_home: Path, model: str, place: Path) -> None:
    with worker(place, "--model", model, engine="auto", home=model_home) as one, one.connect() as client:
        client.socket.sendall(
            b'{"type":"ping","id":"1"}\n'
            b'{"type":"chat","id":"2","messages":[{"role":"user","content":"What is the capital of France?"}]}\n'
        )
        client.finish()
        assert client.line() == f'{{"type":"pong","id":"1","tag":"{TAG}"}}\n'.encode()
        *progress, last = client.rest()
        assert [reply["type"] for reply in progress] == ["progress"]
        assert progress[0]["event"]["status"] == "ready"
        assert last == {"type": "text", "id": "2", "text": GOLDEN}


def test_the_worker_door_takes_prefill_and_stop_and_refuses_what_is_too_long(
    model_home: Path, model: str, place: Path
) -> None:
    with worker(place, "--model", model, engine="auto", home=model_home) as one, one.connect() as client:
        assert client.ask(chat(1, QUESTION, 32, prefill="The capital of France is"))["text"] == " Paris."
        assert client.ask(chat(2, QUESTION, 32, stop="France"))["text"] == "The capital of France"
        too_long = client.ask(chat(3, "word " * 9000))
        assert too_long["type"] == "error"
        assert "window is 8192" in too_long["error"]
        assert client.ask(chat(4, QUESTION))["text"] == GOLDEN


def test_the_http_door_gives_the_golden_answer(one: Server) -> None:
    response = asks(one)
    assert text_of(response) == GOLDEN
    assert response["status"] == "completed"
    usage = response["usage"]
    assert (usage["input_tokens"], usage["output_tokens"]) == (PROMPT_TOKENS, ANSWER_TOKENS)
    assert usage["total_tokens"] == PROMPT_TOKENS + ANSWER_TOKENS


def test_an_answer_is_the_same_however_its_conversation_is_written(one: Server) -> None:
    item = {"type": "message", "role": "user", "content": [{"type": "input_text", "text": QUESTION}]}
    system = "You are a helpful AI assistant named SmolLM, trained by Hugging Face"
    for body in (
        {"input": [{"role": "user", "content": QUESTION}]},
        {"input": [item]},
        {"input": QUESTION, "instructions": system},
        {"input": [{"role": "system", "content": system}, item]},
    ):
        status, response = one.post({**body, "max_output_tokens": 32})
        assert status == 200, response
        assert (text_of(response), response["usage"]["input_tokens"]) == (GOLDEN, PROMPT_TOKENS), body


def test_the_command_line_streams_the_golden_answer(one: Server) -> None:
    done = run("chat", "--url", one.url, QUESTION, home=Path())
    assert (done.returncode, done.stdout, done.stderr) == (0, GOLDEN + "\n", "")


# The openai package.


def test_openai_gets_the_golden_answer_with_and_without_a_stream(client: openai.OpenAI) -> None:
    [model] = client.models.list().data
    whole = client.responses.create(model=model.id, input=QUESTION)
    assert whole.output_text == GOLDEN
    assert whole.usage is not None
    assert (whole.usage.input_tokens, whole.usage.output_tokens) == (PROMPT_TOKENS, ANSWER_TOKENS)
    with client.responses.create(model=model.id, input=QUESTION, stream=True) as stream:
        events = list(stream)
    assert "".join(event.delta for event in events if event.type == "response.output_text.delta") == GOLDEN
    assert [event.sequence_number for event in events] == list(range(len(events)))
    last = events[-1]
    assert last.type == "response.completed"
    assert last.response.output_text == GOLDEN


def test_openai_reads_the_stream_helper_and_the_errors(client: openai.OpenAI) -> None:
    [model] = client.models.list().data
    with client.responses.stream(model=model.id, input=QUESTION) as stream:
        assert stream.get_final_response().output_text == GOLDEN
    with pytest.raises(openai.BadRequestError) as too_long:
        client.responses.create(model=model.id, input="word " * 9000)
    assert too_long.value.code == "context_length_exceeded"
    with pytest.raises(openai.NotFoundError) as unknown:
        client.responses.create(model="gpt-7", input=QUESTION)
    assert (unknown.value.code, unknown.value.param) == ("model_not_found", "model")
    assert client.responses.create(model=model.id, input=QUESTION).output_text == GOLDEN


def test_openai_reads_log_probabilities(client: openai.OpenAI) -> None:
    [model] = client.models.list().data
    whole = client.responses.create(
        model=model.id, input=QUESTION, top_logprobs=2, include=["message.output_text.logprobs"]
    )
    assert whole.output_text == GOLDEN
    [message] = whole.output
    assert message.type == "message"
    [part] = message.content
    assert part.type == "output_text"
    assert part.logprobs is not None
    told = part.logprobs
    assert b"".join(bytes(each.bytes) for each in told).decode() == GOLDEN
    for each in told:
        # A greedy token is the likeliest.
        assert (each.top_logprobs[0].token, each.top_logprobs[0].logprob) == (each.token, each.logprob)
        assert each.top_logprobs[1].logprob <= each.logprob <= 0
    with client.responses.create(
        model=model.id, input=QUESTION, top_logprobs=2, include=["message.output_text.logprobs"], stream=True
    ) as stream:
        deltas = [event for event in stream if event.type == "response.output_text.delta"]
    assert "".join(each.token for event in deltas for each in event.logprobs) == GOLDEN
    paris = next(each for each in told if each.token == " Paris")
    assert paris.logprob > -0.5, "the model is sure"


# Together.


def test_requests_that_run_together_get_the_answers_that_they_get_alone(one: Server) -> None:
    # Questions with sure answers: a kernel for several rows may round a near tie otherwise than one for a single row.
    questions = [
        f"What is the capital of {country}?" for country in ("France", "Italy", "Spain", "Germany", "Japan", "Greece")
    ]
    alone = [text_of(asks(one, question)) for question in questions]
    assert alone[0] == GOLDEN
    assert len(set(alone)) == len(questions)
    with ThreadPoolExecutor(len(questions)) as pool:
        together = list(pool.map(lambda question: text_of(asks(one, question)), questions))
    assert together == alone


def test_two_answers_really_run_together(one: Server) -> None:
    tokens = 80
    arrivals: list[str] = []
    both = threading.Barrier(2)

    def follow(name: str) -> int:
        with one.stream({"input": LONG_TASK, "max_output_tokens": tokens}) as stream:
            events = iter(stream)
            assert next(events)[0] == "response.created"
            both.wait(30)
            deltas = 0
            for kind, _ in events:
                if kind == "response.output_text.delta":
                    arrivals.append(name)
                    deltas += 1
            return deltas

    with ThreadPoolExecutor(2) as pool:
        counts = list(pool.map(follow, "ab"))
    assert min(counts) > tokens // 2
    changes = sum(before != after for before, after in itertools.pairwise(arrivals))
    # One after the other would be a single change; in step, nearly every delta is one.
    assert changes > 20, "".join(arrivals)


def test_a_prompt_longer_than_the_window_is_refused_and_the_next_request_works(one: Server) -> None:
    for stream in (False, True):
        status, answer = one.post({"input": "word " * 9000, "stream": stream})
        assert (status, answer["error"]["code"]) == (400, "context_length_exceeded")
        assert "8192" in answer["error"]["message"]
    assert text_of(asks(one)) == GOLDEN


# Prefix reuse.


def test_the_next_turn_of_a_conversation_reads_only_what_is_new(one: Server) -> None:
    # A text that no other test sends: the first answer must find nothing but the system text.
    story = " ".join(f"On day {day} the keeper of the lighthouse counted {day * 7 % 31} ships." for day in range(60))
    turn: list[dict[str, str]] = [{"role": "user", "content": f"{story} {QUESTION}"}]
    first = asks(one, turn, tokens=16)
    again = asks(one, turn, tokens=16)
    assert text_of(again) == text_of(first)
    details = [each["usage"]["input_tokens_details"] for each in (first, again)]
    asked = first["usage"]["input_tokens"]
    assert details[0]["cached_tokens"] < 40
    assert details[1]["cached_tokens"] == asked - 2
    turn += [{"role": "assistant", "content": text_of(first)}, {"role": "user", "content": "Thank you. And of Italy?"}]
    usage = asks(one, turn, tokens=4)["usage"]
    assert usage["input_tokens_details"]["cached_tokens"] >= asked
    assert usage["prefill_input_tokens"] == usage["input_tokens"] - usage["cached_prefix_tokens"] < 40


def test_requests_of_different_salts_share_nothing_that_is_kept(one: Server) -> None:
    # Several blocks of it: what is shared would show in the count.
    tale = " ".join(f"In year {year} the miller ground {year * 11 % 43} sacks of rye." for year in range(40))

    def cached(salt: str | None) -> int:
        usage = asks(one, f"{tale} {QUESTION}", tokens=4, cache_salt=salt)["usage"]
        assert usage["input_tokens"] > 500
        count: int = usage["input_tokens_details"]["cached_tokens"]
        return count

    assert cached("one") == 0
    assert cached("two") == 0
    assert cached("one") > 500
    assert cached("two") > 500
    # One without a salt finds the system text of its like at most.
    assert cached(None) < 40


def test_answers_are_those_of_a_server_that_keeps_nothing(one: Server, model_home: Path, model: str) -> None:
    with server("--model", model, "--cache-bytes", "0", engine="auto", home=model_home) as cold:
        for question in (QUESTION, "What is the capital of Italy?"):
            for _ in range(2):
                fresh = asks(cold, question)
                assert fresh["usage"]["input_tokens_details"]["cached_tokens"] == 0
                assert text_of(fresh) == text_of(asks(one, question))


# Controls.


def test_a_stop_string_ends_an_answer_before_itself(one: Server) -> None:
    assert text_of(asks(one, stop="France")) == "The capital of "
    assert text_of(asks(one, stop=["Rome", " of Fra"])) == "The capital"
    assert text_of(asks(one, stop="Rome")) == GOLDEN
    with one.stream({"input": QUESTION, "stop": ["ital of"]}) as stream:
        assert "".join(event["delta"] for name, event in stream if name == "response.output_text.delta") == "The cap"


def test_a_limit_makes_an_answer_incomplete(one: Server) -> None:
    response = asks(one, tokens=3)
    assert (response["status"], response["incomplete_details"]) == ("incomplete", {"reason": "max_output_tokens"})
    assert text_of(response) == "The capital of"
    assert response["usage"]["output_tokens"] == 3


def test_a_seed_gives_the_same_answer_again_and_another_another(one: Server) -> None:
    def told(seed: int) -> str:
        return text_of(asks(one, "Tell me something.", tokens=16, temperature=1.0, top_p=0.95, seed=seed))

    first = [told(seed) for seed in range(3)]
    assert [told(seed) for seed in range(3)] == first
    assert len(set(first)) > 1
    assert text_of(asks(one, temperature=0)) == GOLDEN


def test_a_client_that_leaves_frees_its_place_for_the_next(model_home: Path, model: str) -> None:
    # One place and none to wait in: a second request is refused for as long as the first holds it.
    with server("--model", model, "--max-batch", "1", "--queue", "0", engine="auto", home=model_home) as one:
        stream = one.stream({"input": LONG_TASK, "max_output_tokens": 4096})
        events = iter(stream)
        while next(events)[0] != "response.output_text.delta":
            pass
        status, refused = one.post({"input": QUESTION})
        assert (status, refused["error"]["code"]) == (429, "queue_full")
        stream.close()
        left = time.monotonic()
        eventually(lambda: one.post({"input": QUESTION, "max_output_tokens": 32})[0] == 200, "the next is answered")
        # The 4096 tokens would have taken a minute and more; a step and an answer of eight tokens do not.
        assert time.monotonic() - left < 15


def test_a_shutdown_in_the_middle_of_an_answer_ends_it_and_the_process(model_home: Path, model: str) -> None:
    with server("--model", model, "--grace", "0", engine="auto", home=model_home) as one:
        with one.stream({"input": LONG_TASK, "max_output_tokens": 4096}) as stream:
            events = iter(stream)
            while next(events)[0] != "response.output_text.delta":
                pass
            one.process.signal(15)
            last, event = list(events)[-1]
        assert stream.done
        assert last == "response.failed"
        assert "going away" in event["response"]["error"]["message"]
        assert one.process.wait() == 0


def test_events_hold_whole_characters_of_any_script(one: Server) -> None:
    with one.stream({"input": "Repeat after me: 👋🏽 héllo 日本", "max_output_tokens": 40}) as stream:
        deltas = [event["delta"] for name, event in stream if name == "response.output_text.delta"]
    assert deltas
    for delta in deltas:
        assert json.loads(json.dumps(delta).encode()) == delta
        assert not any("\ud800" <= character <= "\udfff" for character in delta)
