"""Every engine on the extension module's own port: the same answers as on the strict stand-in of the other tests."""

from __future__ import annotations

import threading
from typing import Any

import pytest

from cases import Case, prompt
from emberd import _core, loop
from fakeport import Admit, FakePort, Launch
from support.process import DEADLINE, eventually

if not hasattr(_core, "port"):
    pytest.skip("the extension module is not built", allow_module_level=True)

REQUESTS = [(prompt(1, 3), 5), (prompt(2, 230), 7), (prompt(3, 40), 1), (prompt(4, 900 // 9), 12), (prompt(5, 1), 9)]


def _read(reader: Any) -> tuple[list[int], str]:
    ids: list[int] = []
    while True:
        more, finish = reader.read()
        ids += more
        if finish is not None:
            return ids, finish


def test_an_engine_answers_on_the_real_port_as_on_the_strict_one(case: Case) -> None:
    strict = FakePort().at(0, *(Admit(at, *request) for at, request in enumerate(REQUESTS, 1)))
    case.run(strict, max_batch=3)
    doors, port = _core.port()
    launch = Launch(case.engine, str(case.folder), _core.Settings(max_batch=3), port)
    thread = threading.Thread(target=loop.run, args=(launch,), daemon=True)
    thread.start()

    def ready() -> bool:
        try:
            doors.submit([8], 1).leave()
        except RuntimeError as error:
            if "still loading" not in str(error):
                raise
            return False
        return True

    eventually(ready, "the engine is ready")
    readers = [doors.submit(*request) for request in REQUESTS]
    for at, reader in enumerate(readers, 1):
        assert _read(reader) == (strict.answers[at], strict.finishes[at])
    doors.close()
    thread.join(DEADLINE)
    assert not thread.is_alive()
