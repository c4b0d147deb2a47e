"""The HTTP door as its users meet it: a process, its ready line, requests of strangers, the commands around it."""

from __future__ import annotations

import json
import shlex
import shutil
import signal
import socket
import subprocess
import sys
from itertools import cycle, islice
from typing import TYPE_CHECKING, Any

import pytest

from support.process import DEADLINE, emberd, eventually, run
from support.serve import Server, Stream, server, text_of

if TYPE_CHECKING:
    from pathlib import Path

WORDS = " a small model keeps warm and answers now"
"""What the mock says, eight tokens, over and over."""


def prompt(texts: list[str], system: str | None = None) -> list[bytes]:
    """The built-in template's prompt for user and assistant in turn, one id an element; special ids are no text."""
    turns = [("system", system)] if system is not None else []
    turns += [("user" if at % 2 == 0 else "assistant", text) for at, text in enumerate(texts)]
    ids: list[bytes] = []
    for role, text in turns:
        ids += [b"", *(bytes([byte]) for byte in f"{role}\n{text}".encode()), b"", b"\n"]
    return [*ids, b"", *(bytes([byte]) for byte in b"assistant\n")]


def prompt_length(texts: list[str]) -> int:
    return len(prompt(texts))


def echoed(texts: list[str], tokens: int, system: str | None = None) -> str:
    """What the echo engine says: the prompt's ids, again and again."""
    return b"".join(islice(cycle(prompt(texts, system)), tokens)).decode()


def asks(one: Server, tokens: int = 8, over: Path | None = None, **more: object) -> str:
    """The text of a short answer."""
    status, response = one.post({"input": "hello", "max_output_tokens": tokens, **more}, over)
    assert status == 200, response
    return text_of(response)


# Ready, and what is said of it.


@pytest.mark.skipif(shutil.which("curl") is None, reason="there is no curl here")
def test_the_example_of_the_ready_line_works_as_it_is_printed(home: Path) -> None:
    with server(home=home) as one:
        one.process.line("emberd chat --url")
        printed = one.process.out.text
        start = printed.index("curl ")
        command = printed[start : printed.index("\n\n", start)]
        done = subprocess.run(
            ["sh", "-c", command], capture_output=True, encoding="utf-8", timeout=DEADLINE, check=False
        )
        assert done.returncode == 0, done.stderr
        events = [json.loads(line[6:]) for line in done.stdout.splitlines() if line.startswith("data: {")]
        assert "".join(event["delta"] for event in events if event["type"] == "response.output_text.delta").startswith(
            WORDS
        )
        assert events[-1]["type"] == "response.completed"
        assert done.stdout.rstrip().endswith("data: [DONE]")


def test_the_other_example_of_the_ready_line_works_as_well(home: Path) -> None:
    with server(home=home) as one:
        arguments = shlex.split(one.process.line("emberd chat --url"))
        assert arguments[0] == "emberd"
        done = run(*arguments[1:], home=home)
        assert (done.returncode, done.stderr) == (0, "")
        assert done.stdout.startswith(WORDS)


@pytest.mark.parametrize("engine", ["mock", "echo"])
def test_health_and_models_tell_of_the_model(engine: str, home: Path) -> None:
    with server(engine=engine, home=home) as one:
        status, health = one.get("/health")
        idle = {"in_flight": 0, "queue_length": 0, "batch_size": 0}
        assert (status, health) == (
            200,
            {"status": "ok", **idle, "models": [{"id": "smollm2-135m", "state": "ready", **idle}]},
        )
        assert one.get("/health?live") == (200, {"status": "alive"})
        status, models = one.get("/v1/models")
        assert (status, models["object"]) == (200, "list")
        [model] = models["data"]
        assert (model["id"], model["object"], model["loaded"], model["context_length"]) == (
            "smollm2-135m",
            "model",
            True,
            8192,
        )
        assert one.get("/v1/models/smollm2-135m") == (200, model)
        status, error = one.get("/v1/models/other")
        assert (status, error["error"]["code"]) == (404, "model_not_found")


def test_a_lazy_server_is_ready_before_its_model(home: Path) -> None:
    with server("--lazy", home=home) as one:
        assert one.get("/v1/models")[1]["data"][0]["loaded"] is False
        assert asks(one) == WORDS
        assert one.get("/v1/models")[1]["data"][0]["loaded"] is True


# Answers.


def test_an_answer_as_one_object_and_as_events_is_the_same(home: Path) -> None:
    with server(home=home) as one:
        body = {"input": [{"role": "user", "content": "hello"}], "max_output_tokens": 20}
        status, response = one.post(body)
        assert status == 200
        assert (response["status"], response["incomplete_details"]) == ("incomplete", {"reason": "max_output_tokens"})
        assert response["usage"]["output_tokens"] == 20
        with one.stream(body) as stream:
            events = list(stream)
        assert stream.done
        names = [name for name, _ in events]
        assert names[:2] == ["response.created", "response.in_progress"]
        assert names[-1] == "response.incomplete"
        assert [event["sequence_number"] for _, event in events] == list(range(len(events)))
        deltas = "".join(event["delta"] for name, event in events if name == "response.output_text.delta")
        assert deltas == text_of(response) == text_of(events[-1][1]["response"])
        counts = ("input_tokens", "output_tokens", "total_tokens")
        usages = (response["usage"], events[-1][1]["response"]["usage"])
        assert {tuple(usage[count] for count in counts) for usage in usages} == {
            (prompt_length(["hello"]), 20, prompt_length(["hello"]) + 20)
        }


def test_the_echo_engine_answers_through_python(home: Path) -> None:
    with server(engine="echo", home=home) as one:
        text = "héllo 👋"
        tokens = prompt_length([text]) * 2
        status, response = one.post({"input": text, "max_output_tokens": tokens})
        assert status == 200
        assert text_of(response) == echoed([text], tokens)


def test_a_unix_socket_serves_the_same(place: Path, home: Path) -> None:
    with server(uds=place, home=home) as one:
        assert str(place) in one.process.line("emberd is ready")
        assert asks(one, over=place) == asks(one)
        with one.stream({"input": "hi", "max_output_tokens": 4}, over=place) as stream:
            assert [name for name, _ in stream][-1] == "response.incomplete"
        one.process.signal(signal.SIGTERM)
        assert one.process.wait() == 0
        assert not place.exists()


@pytest.mark.parametrize("stream", [False, True])
def test_an_error_is_one_of_the_table(stream: bool, home: Path) -> None:
    with server(home=home) as one:
        status, answer = one.post({"model": "gpt-7", "input": "hello", "stream": stream})
        assert status == 404
        assert set(answer) == {"error"}
        error = answer["error"]
        assert (error["type"], error["code"], error["param"]) == ("invalid_request_error", "model_not_found", "model")
        assert "smollm2-135m" in error["message"]


def test_a_client_that_leaves_frees_its_place(slow: dict[str, str], home: Path) -> None:
    # One place and none to wait in, and answers that take minutes: whoever is not let go keeps everybody else out.
    with server("--max-batch", "1", "--queue", "0", engine="echo", home=home, **slow) as one:

        def begun() -> Stream | None:
            stream = one.stream({"input": "hello", "max_output_tokens": 8000})
            if stream.status == 200:
                return stream
            stream.close()
            return None

        for _ in range(3):
            stream = eventually(begun, "there is room for a stream")
            assert stream is not None
            assert any(name == "response.output_text.delta" for name, _ in stream)
            status, refused = one.post({"input": "hello"})
            assert (status, refused["error"]["code"]) == (429, "queue_full")
            stream.close()
        short = {"input": "hello", "max_output_tokens": 3}
        eventually(lambda: one.post(short)[0] == 200, "a later request is answered")


# Ends.


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_stream_that_outlasts_the_grace_ends_with_a_failure(slow: dict[str, str], number: int, home: Path) -> None:
    with server("--grace", "0", engine="echo", home=home, **slow) as one:
        with one.stream({"input": "hello", "max_output_tokens": 8000}) as stream:
            events = iter(stream)
            assert next(events)[0] == "response.created"
            one.process.signal(number)
            name, event = list(events)[-1]
        assert name == "response.failed"
        assert "going away" in event["response"]["error"]["message"]
        assert stream.done
        assert one.process.wait() == 0


def test_a_stream_within_the_grace_comes_to_its_own_end(slow: dict[str, str], home: Path) -> None:
    with server(engine="echo", home=home, **slow) as one:
        with one.stream({"input": "hello", "max_output_tokens": 20}) as stream:
            events = iter(stream)
            assert next(events)[0] == "response.created"
            one.process.signal(signal.SIGTERM)
            name, event = list(events)[-1]
        assert name == "response.incomplete"
        assert text_of(event["response"]) == echoed(["hello"], 20)
        assert stream.done
        assert one.process.wait() == 0


def test_a_second_signal_does_not_wait_for_what_is_in_flight(slow: dict[str, str], home: Path) -> None:
    with (
        server("--grace", "3600", engine="echo", home=home, **slow) as one,
        one.stream({"input": "hello", "max_output_tokens": 8000}) as stream,
    ):
        assert next(iter(stream))[0] == "response.created"
        one.process.signal(signal.SIGTERM)
        while one.accepts():
            pass
        one.process.signal(signal.SIGTERM)
        assert one.process.wait() == 0


def test_a_host_can_be_given_by_name(home: Path) -> None:
    with server("--host", "localhost", home=home) as one:
        assert one.get("/health?live")[0] == 200


def test_a_file_in_the_place_of_the_socket_is_kept(tmp_path: Path, home: Path) -> None:
    notes = tmp_path / "notes.txt"
    notes.write_text("mine")
    done = run("serve", "--port", "0", "--engine", "mock", "--uds", notes, home=home)
    assert done.returncode == 1
    assert "is a file, not a socket" in done.stderr
    assert notes.read_text() == "mine"


def test_a_filter_that_is_none_is_refused(home: Path) -> None:
    done = run("serve", "--port", "0", "--engine", "mock", "--log", "a=b=c", home=home)
    assert done.returncode == 2
    assert "hint: give a level" in done.stderr


def test_a_server_that_ends_takes_nothing_new(home: Path) -> None:
    with server(home=home) as one:
        one.process.signal(signal.SIGTERM)
        assert one.process.wait() == 0
        with pytest.raises(ConnectionRefusedError):
            one.raw()


# Starts that are refused.


def test_an_address_that_others_reach_is_refused_unless_it_is_insisted_on(home: Path) -> None:
    done = run("serve", "--host", "0.0.0.0", "--port", "0", "--engine", "mock", home=home)
    assert done.returncode == 1
    assert done.stdout == ""
    assert "0.0.0.0 can be reached from other machines" in done.stderr
    assert "hint: listen on 127.0.0.1, or say --insecure" in done.stderr


def test_a_port_that_is_taken_is_a_clear_error(home: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        done = run("serve", "--port", str(port), "--engine", "mock", home=home)
    assert done.returncode == 1
    assert f"could not listen on 127.0.0.1, port {port}" in done.stderr
    assert "hint: another emberd may run already" in done.stderr


def test_a_socket_that_is_taken_is_a_clear_error(place: Path, home: Path) -> None:
    with server(uds=place, home=home) as one:
        done = run("serve", "--port", "0", "--uds", place, "--engine", "mock", home=home)
        assert done.returncode == 1
        assert f"a server is already listening on {place}" in done.stderr
        assert asks(one, over=place) == WORDS


@pytest.mark.parametrize(
    ("model", "what", "hint"),
    [
        ("gpt-7", 'no model is called "gpt-7"', "hint: known names: smollm2-135m"),
        ("./nowhere", "there is no file or folder ./nowhere", "hint: check the path"),
        (sys.executable, "is a file, but not a .gguf file", "hint: give a model folder"),
    ],
)
def test_a_model_that_nobody_knows_is_a_clear_error(model: str, what: str, hint: str, home: Path) -> None:
    done = run("serve", "--port", "0", "--engine", "onnx", "--model", model, home=home)
    assert done.returncode == 1
    assert done.stdout == ""
    assert what in done.stderr
    assert hint in done.stderr


def test_two_models_under_one_name_are_refused(model_folder: Path, home: Path) -> None:
    done = run("serve", "--port", "0", "--engine", "onnx", "--model", model_folder, "--model", model_folder, home=home)
    assert done.returncode == 1
    assert 'two models would be served as "model"' in done.stderr


@pytest.mark.parametrize(("engine", "package"), [("onnx", "onnxruntime"), ("mlx", "mlx")])
def test_an_engine_that_is_not_installed_names_the_extra(
    engine: str, package: str, model_folder: Path, tmp_path: Path, home: Path
) -> None:
    trap = tmp_path / "trap"
    trap.mkdir()
    (trap / f"{package}.py").write_text(f"raise ImportError('not installed', name='{package}')\n")
    with emberd(
        "serve", "--port", "0", "--engine", engine, "--model", model_folder, home=home, PYTHONPATH=str(trap)
    ) as process:
        address = process.logged("listening").rpartition('address="')[2].partition('"')[0]
        process.logged(f"pip install 'emberd[{engine}]'")
        one = Server(process, address)
        status, answer = one.post({"input": "hello"})
        assert status == 503
        assert answer["error"]["code"] == "model_load_failed"
        assert f"{package}, which cannot be imported" in answer["error"]["message"]
        assert f"pip install 'emberd[{engine}]'" in answer["error"]["message"]
        status, health = one.get("/health")
        assert (status, health["status"]) == (503, "failed")
        assert f"pip install 'emberd[{engine}]'" in health["message"]
        assert one.get("/health?live")[0] == 200


# The command line.


def test_without_a_command_it_shows_what_there_is(home: Path) -> None:
    done = run(home=home)
    assert (done.returncode, done.stdout) == (2, "")
    assert "Usage: emberd" in done.stderr


def test_help_and_version_are_no_errors(home: Path) -> None:
    for arguments, expected in (
        (["--help"], "Usage: emberd"),
        (["serve", "--help"], "--port <PORT>"),
        (["--version"], "emberd 0."),
    ):
        done = run(*arguments, home=home)
        assert (done.returncode, done.stderr) == (0, "")
        assert expected in done.stdout


@pytest.mark.parametrize(
    "arguments",
    [
        ["bake"],
        ["serve", "--port", "70000"],
        ["serve", "--port"],
        ["serve", "--engine", "steam"],
        ["worker", "--idle-ms", "soon"],
    ],
    ids=" ".join,
)
def test_arguments_that_mean_nothing_are_refused(arguments: list[str], home: Path) -> None:
    done = run(*arguments, home=home)
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr.startswith("error: ")


def test_python_runs_it_as_a_module(home: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-m", "emberd", "--version"],
        capture_output=True,
        encoding="utf-8",
        timeout=DEADLINE,
        check=False,
    )
    assert done.returncode == 0
    assert done.stdout == run("--version", home=home).stdout


def test_the_list_of_models_shows_what_can_be_fetched(home: Path) -> None:
    done = run("models", "list", home=home)
    assert (done.returncode, done.stderr) == (0, "")
    assert "smollm2-135m" in done.stdout
    assert "emberd models pull smollm2-135m" in done.stdout


def test_removing_a_model_that_is_not_here_is_a_clear_error(home: Path) -> None:
    done = run("models", "rm", "smollm2-135m", home=home)
    assert done.returncode == 1
    assert "smollm2-135m" in done.stderr


# emberd chat.


def test_chat_answers_one_question(home: Path) -> None:
    with server(home=home) as one:
        done = run("chat", "--url", one.url, "--max-tokens", "8", "hello", "there", home=home)
        assert (done.returncode, done.stdout, done.stderr) == (0, WORDS + "\n", "")
        assert run("chat", "--url", one.url + "/v1/", "--max-tokens", "8", "hello", home=home).stdout == WORDS + "\n"
        assert run("chat", "--max-tokens", "8", "hello", home=home, EMBERD_URL=one.url).stdout == WORDS + "\n"


def test_chat_keeps_the_conversation_of_its_input(home: Path) -> None:
    with server(engine="echo", home=home) as one:
        done = run("chat", "--url", one.url, "--max-tokens", "90", home=home, stdin="first\n\n  second\n")
        assert (done.returncode, done.stderr) == (0, "")
        first = echoed(["first"], 90)
        second = echoed(["first", first, "second"], 90)
        assert done.stdout == f"{first}\n{second}\n"


def test_chat_sends_its_system_text_and_says_why_it_was_refused(home: Path) -> None:
    with server(engine="echo", home=home) as one:
        done = run("chat", "--url", one.url, "--max-tokens", "50", "--system", "Be brief.", "hello", home=home)
        assert done.stdout == echoed(["hello"], 50, system="Be brief.") + "\n"
        done = run("chat", "--url", one.url, "--model", "gpt-7", "hello", home=home)
        assert (done.returncode, done.stdout) == (1, "")
        assert 'error: no model is called "gpt-7" here' in done.stderr


@pytest.mark.parametrize(
    ("url", "why"),
    [
        ("http://127.0.0.1:9", "could not reach"),
        ("https://127.0.0.1", "does not begin with http://"),
        ("nowhere", "is no address"),
    ],
)
def test_chat_without_a_server_is_a_clear_error(url: str, why: str, home: Path) -> None:
    done = run("chat", "--url", url, "hello", home=home)
    assert (done.returncode, done.stdout) == (1, "")
    assert why in done.stderr
    assert "hint: " in done.stderr


def test_an_interrupt_ends_a_chat_at_once(home: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as silent:
        silent.settimeout(DEADLINE)
        with emberd("chat", "--url", f"http://127.0.0.1:{silent.getsockname()[1]}", "hello", home=home) as process:
            connection, _ = silent.accept()
            with connection:
                assert connection.recv(1)
                process.signal(signal.SIGINT)
                code: Any = process.wait()
                assert code in (130, -signal.SIGINT)
                assert "Traceback" not in process.err.rest()
