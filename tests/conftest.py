"""Fixtures for tests that start whole processes."""

from __future__ import annotations

import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest


@pytest.fixture
def home(tmp_path: Path) -> Path:
    """A place for models that has none."""
    return tmp_path / "home"


@pytest.fixture
def place() -> Iterator[Path]:
    """Where a socket may be: a folder whose path is short enough for one."""
    with tempfile.TemporaryDirectory(prefix="emberd") as folder:
        yield Path(folder) / "s"
