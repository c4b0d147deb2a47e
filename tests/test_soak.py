"""A soak in short, on the real model: clients that join, leave and hang up at random, and a fixed number of requests.

What they send follows from a seed, and nothing here is about time: every answer is well formed or was left by its
reader, and afterwards no slot is lost.
"""

from __future__ import annotations

import asyncio
import sys
from collections.abc import Iterator
from functools import partial
from pathlib import Path

import pytest

sys.path.append(str(Path(__file__).parent.parent / "benches"))

import streams
from wild_clients import Tally, anything, client, counted, fault, together

from support.process import command
from support.serve import server

CLIENTS = 8
REQUESTS = 6
"""Of each client."""


@pytest.fixture(scope="module")
def address(model_home: Path) -> Iterator[str]:
    """A server with the real model and a slot for each client."""
    options = ["--engine", "onnx", "--max-batch", str(CLIENTS), "--cache-bytes", str(8 << 20)]
    with server(*options, home=model_home) as running:
        yield running.address
