"""The place of the engine over MLX. There is none yet: what is here says so, once its packages are installed.

Asking for it without them names the extra that brings them, like every engine does.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, NoReturn

from emberd.engine import EngineError

if TYPE_CHECKING:
    from emberd._core import Settings
    from emberd.engine import Fail


def load(folder: str, settings: Settings, fail: Fail) -> NoReturn:
    """Raises `ImportError` when MLX is not installed, else `EngineError`."""
    del folder, settings, fail
    importlib.import_module("mlx.core")
    raise EngineError("there is no mlx engine in this version of emberd", "use --engine onnx")
