"""The server's OpenAPI document as a judge of what the server says and takes, and the raw bytes to be judged."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

import jsonschema

if TYPE_CHECKING:
    from support.serve import Server


def call(name: str, **arguments: object) -> str:
    """A call as the mock's model writes it."""
    return f"<tool_call>\n{json.dumps({'name': name, 'arguments': arguments})}\n</tool_call>"


def raw(one: Server, method: str, path: str, body: object = None) -> bytes:
    """The body of an answer as it was read off the wire."""
    connection = one.connection()
    try:
        connection.request(method, path, json.dumps(body), {"content-type": "application/json"})
        return connection.getresponse().read()
    finally:
        connection.close()


def payloads(text: bytes) -> list[bytes]:
    """The data of each event of a whole stream."""
    return [line.removeprefix(b"data: ") for line in text.split(b"\n") if line.startswith(b"data: ")]


def validator(whole: Any, schema: dict[str, Any]) -> jsonschema.Draft202012Validator:
    """Of a schema that refers to the components of a document."""
    return jsonschema.Draft202012Validator({**schema, "components": whole["components"]})


def streamed(content: Any) -> Any:
    """The schema of what is in the events of a stream, by the content of an answer that may be one."""
    data = content["text/event-stream"]["schema"]["properties"]["data"]
    return (data["anyOf"][0] if "anyOf" in data else data)["contentSchema"]


def complain(judge: jsonschema.Draft202012Validator, text: bytes) -> None:
    """Fails where the JSON is not of the schema."""
    found = [f"{error.json_path}: {error.message[:300]}" for error in judge.iter_errors(json.loads(text))]
    assert not found, (found, text)
