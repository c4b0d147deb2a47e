"""For schemathesis: a check that an error of the server's is one object that clients can read, whatever the request was, and requests that get far.

Loaded by schemathesis itself (`SCHEMATHESIS_HOOKS`), which is why it imports nothing of the tests.
"""

from __future__ import annotations

import json
import zlib
from typing import Any

import schemathesis


@schemathesis.hook
def map_body(context: Any, body: Any) -> Any:
    """Leaves models out that nobody has, since requests for them would all end at the same place, and has every second answer streamed."""
    if not isinstance(body, dict):
        return body
    if isinstance(body.get("model"), str):
        body = {key: value for key, value in body.items() if key != "model"}
    if body.get("stream") in (None, False) and zlib.crc32(repr(body).encode()) % 2:
        body = {**body, "stream": True}
    return body


@schemathesis.check
def envelope(ctx: Any, response: Any, case: Any) -> None:
    """Every error is JSON with a message, a type, a code and the field at fault, and is of use to whoever reads it."""
    if response.status_code < 400 or case.method.upper() == "HEAD":
        return
    assert response.headers["content-type"] == ["application/json"], response.headers
    body = json.loads(response.content)
    if case.path.startswith("/v1/messages"):  # in the form of Anthropic's API
        assert set(body) == {"type", "error", "request_id"}, body
        assert body["type"] == "error", body
        assert body["error"]["type"], body
        assert body["error"]["message"], body
        assert "(hint: " in body["error"]["message"], body
        return
    assert list(body) == ["error"], body
    error = body["error"]
    assert list(error) == ["message", "type", "param", "code"], error
    assert error["message"], error
    assert error["type"], error
    assert error["code"], error
    assert error["param"] is None or error["param"], error
    assert "(hint: " in error["message"], error
