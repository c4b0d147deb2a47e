"""Reads the JSON files of a model folder. What their fields mean is the business of who asks."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from emberd.engine import EngineError


def read_config(path: Path, hint: str, required: bool = False) -> dict[str, Any]:
    """A JSON object from a file; an empty one where the file may be missing and is. Raises `EngineError` with `hint`."""
    try:
        value = json.loads(path.read_bytes())
    except FileNotFoundError:
        if required:
            raise EngineError(f"{path.parent} holds no {path.name}", hint) from None
        return {}
    except ValueError as error:
        raise EngineError(f"{path} is not JSON: {error}", hint) from error
    if not isinstance(value, dict):
        raise EngineError(f"{path} holds no JSON object", hint)
    return value
