"""The loop: what is said, and to whom, when an engine cannot be had or does not keep its side."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from cases import Case, prompt
from emberd import loop
from fakeport import Admit, FakePort, Launch, Settings


def launch(engine: str, folder: Path, port: FakePort) -> FakePort:
    loop.run(Launch(engine, str(folder), Settings(), port))
    return port


def test_an_unknown_engine_is_named_with_those_that_exist(tmp_path: Path) -> None:
    port = launch("gguf", tmp_path, FakePort())
    assert port.reason == "there is no engine named 'gguf'; hint: use one of echo, mlx, onnx"


@pytest.mark.parametrize("package", ["onnxruntime", "numpy"])
def test_a_missing_package_names_the_extra_to_install(
    package: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for module in [name for name in sys.modules if name.partition(".")[0] == "emberd" and name != "emberd._core"]:
        monkeypatch.delitem(sys.modules, module)
    monkeypatch.setitem(sys.modules, package, None)
    port = launch("onnx", tmp_path, FakePort())
    assert port.reason is not None
    first, *rest = port.reason.splitlines()
    assert first == f"the onnx engine needs {package}, which cannot be imported; hint: pip install 'emberd[onnx]'"
    assert any("Traceback" in line for line in rest)


def test_a_missing_module_that_no_extra_installs_is_reported_as_it_is() -> None:
    fault = ImportError("No module named 'colours'", name="colours")
    assert loop.describe("onnx", fault).startswith("the onnx engine failed: ImportError: No module named 'colours'\n")


def test_importing_the_loop_imports_no_engine() -> None:
    import subprocess

    code = "import sys, emberd.loop; print([m for m in ('numpy', 'onnxruntime', 'emberd.onnx') if m in sys.modules])"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=60)
    assert done.stdout.strip() == "[]"


def test_an_engine_that_breaks_the_contract_fails_with_the_ports_words(
    onnx_case: Case, monkeypatch: pytest.MonkeyPatch
) -> None:
    from emberd.echo import EchoEngine

    monkeypatch.setattr(EchoEngine, "step", lambda self: [(77, [1], None)])
    port = FakePort().at(0, Admit(1, prompt(1, 3), 3))
    launch("echo", onnx_case.folder, port)
    assert port.reason is not None
    assert port.reason.startswith("the echo engine failed: PortError: push for 77, which is not in the engine\n")


def test_an_interrupt_is_reported_and_raised_again(onnx_case: Case, monkeypatch: pytest.MonkeyPatch) -> None:
    from emberd.echo import EchoEngine

    def interrupted(self: EchoEngine) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(EchoEngine, "step", interrupted)
    port = FakePort().at(0, Admit(1, prompt(1, 3), 3))
    with pytest.raises(KeyboardInterrupt):
        launch("echo", onnx_case.folder, port)
    assert port.reason is not None
    assert port.reason.startswith("the echo engine failed: KeyboardInterrupt\n")
