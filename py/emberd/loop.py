"""The loop every Python engine runs in, on the one thread that owns its model, and what happens when the engine fails.

No request is left without an end: whatever goes wrong here becomes `port.fail`. The contract is in `docs/port.md`.
"""

from __future__ import annotations

import importlib
import traceback
from typing import TYPE_CHECKING, cast

from emberd.engine import Engine, EngineError, EngineModule

if TYPE_CHECKING:
    from emberd._core import Launch, Port

ENGINES = {"echo": "emberd.echo", "mlx": "emberd.mlx", "onnx": "emberd.onnx"}
"""The engines by name, and the module of each. Nothing of an engine is imported before a launch asks for it."""

EXTRAS = {"mlx": ("mlx", "mlx_lm", "numpy"), "onnx": ("numpy", "onnxruntime")}
"""The packages that each optional extra installs, by the name they are imported under."""


def run(launch: Launch) -> None:
    """Loads the model that `launch` names, serves its port until the port is closed, and frees the model.

    Returns in every case: a failure of the engine is reported through the port, after the model has been freed. Only
    what is not an `Exception` (an interrupt, an exit) is raised again once the port has heard of it.
    """
    port = launch.port
    try:
        engine = load(launch)
        try:
            serve(engine, port)
        finally:
            engine.close()
    except Exception as fault:
        port.fail(None, describe(launch.engine, fault))
    except BaseException as fault:
        port.fail(None, describe(launch.engine, fault))
        raise


def load(launch: Launch) -> Engine:
    """Imports the engine's module and lets it load the model."""
    name = ENGINES.get(launch.engine)
    if name is None:
        raise EngineError(f"there is no engine named {launch.engine!r}", f"use one of {', '.join(ENGINES)}")
    module = cast("EngineModule", importlib.import_module(name))
    return module.load(launch.folder, launch.settings, launch.port.fail)


def serve(engine: Engine, port: Port) -> None:
    """The loop itself: orders in, steps out, until the port is closed."""
    port.ready(engine.capabilities)
    while (orders := port.poll() if engine.busy else port.wait()) is not None:
        for order in orders:
            engine.take(order)
        gone = port.push(engine.step())
        engine.drop(gone)


def describe(engine: str, fault: BaseException) -> str:
    """The text of a failure: its first line is for the reader, the rest for the log."""
    if isinstance(fault, EngineError):
        return str(fault)
    package = (fault.name or "").partition(".")[0] if isinstance(fault, ImportError) else ""
    if package in EXTRAS.get(engine, ()):
        reason = f"the {engine} engine needs {package}, which cannot be imported; hint: pip install 'emberd[{engine}]'"
    else:
        text = " ".join(str(fault).split())
        reason = f"the {engine} engine failed: {type(fault).__name__}" + (f": {text}" if text else "")
    return reason + "\n" + "".join(traceback.format_exception(fault))
