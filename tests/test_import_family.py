"""The import of every member of the Llama family and of every type of tensor, on tiny models written here.

The reference is an independent forward pass in numpy over what the `gguf` package reads. That the default model keeps its
distribution is in `test_fidelity.py`.
"""

from __future__ import annotations

import os
import subprocess
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import gguf
import numpy as np
import onnx
import pytest

sys.path.append(str(Path(__file__).parent / "reference"))

from folder import Folder
from kl import distance
from llama import Llama

from emberd import _core, loop
from support.family import CONTEXT, FAMILY, VOCABULARY, write
from support.process import command, environment, eventually, run

if TYPE_CHECKING:
    from numpy.typing import NDArray

Q = gguf.GGMLQuantizationType

IDS = np.random.default_rng(5).integers(0, VOCABULARY, 48).tolist()

FLOATS = [Q.F32, Q.F16, Q.BF16]
FOUR_BITS = [Q.Q4_0, Q.Q4_1, Q.Q4_K, Q.Q3_K, Q.Q2_K]
"""Types that are kept on four-bit kernels, whose activations are floats."""
EIGHT_BITS = [Q.Q5_0, Q.Q5_1, Q.Q8_0, Q.Q5_K, Q.Q6_K, Q.IQ4_NL, Q.IQ4_XS]
"""Types that are kept on eight-bit kernels, whose activations are rounded to eight bits."""


WAYS = pytest.mark.parametrize("way", [Folder, Folder.served], ids=["onnxruntime", "emberd"])
"""The operators that a folder is computed with."""


def pulled(path: Path) -> Path:
    """The folder that `emberd models pull` makes of a file."""
    done = run("models", "pull", path, home=path.parent / "home")
    assert done.returncode == 0, done.stderr
    return Path(done.stdout.strip().removeprefix(f"{path} is ready in "))


def refused(path: Path) -> str:
    """What `emberd models pull` says when it refuses a file; nothing of it is left."""
    home = path.parent / "home"
    done = run("models", "pull", path, home=home)
    assert done.returncode != 0, done.stdout
    assert "hint: " in done.stderr
    assert "panicked" not in done.stderr
    assert not list((home / "models").glob("*/model.onnx*"))
    return done.stderr


def nearest(found: NDArray[np.float32], wanted: NDArray[np.float32]) -> float:
    """The largest difference of a logit, in parts of the logits' spread."""
    return float(np.abs(found - wanted).max() / wanted.std())


@WAYS
@pytest.mark.parametrize("name", FAMILY)
def test_each_member_computes_what_its_file_says(way: Callable[..., Folder], name: str, tmp_path: Path) -> None:
    path = write(tmp_path / "tiny.gguf", FAMILY[name])
    folder = pulled(path)
    wanted = Llama(path).logits(IDS)
    assert nearest(way(folder, capacity=CONTEXT).logits(IDS), wanted) < 1e-3
    # In pieces of a prompt, too, the last of them longer than any window.
    pieces = [5, 30, 13]
    assert nearest(way(folder, capacity=CONTEXT).logits(IDS, pieces), wanted[np.cumsum(pieces) - 1]) < 1e-3


@pytest.mark.parametrize("name", FAMILY)
def test_what_sets_a_member_apart_changes_what_is_computed(name: str, tmp_path: Path) -> None:
    # Without this, a reference that overlooked the same thing as the import would prove nothing.
    member = FAMILY[name]
    path = write(tmp_path / "tiny.gguf", member)
    whole, changed = Llama(path), Llama(path)
    if member.architecture == "qwen2":
        changed.weights = {each: 0 * made if each.endswith(".bias") else made for each, made in whole.weights.items()}
    elif member.architecture == "qwen3":
        changed.weights = {each: made for each, made in whole.weights.items() if "attn_q_norm" not in each}
    elif member.window is not None:
        changed.window += 1
    elif member.factors or member.linear:
        changed.frequencies = member.theta ** -(np.arange(0, member.head_dim, 2) / member.head_dim)
    else:
        changed.pairs = not changed.pairs
    assert nearest(changed.logits(IDS), whole.logits(IDS)) > 0.02


@WAYS
@pytest.mark.parametrize("kind", [*FLOATS, *FOUR_BITS], ids=lambda kind: kind.name)
def test_floats_and_four_bits_are_exact_to_a_small_part_of_a_step(
    way: Callable[..., Folder], kind: gguf.GGMLQuantizationType, tmp_path: Path
) -> None:
    path = write(tmp_path / "tiny.gguf", FAMILY["llama-3"], kind)
    wanted, folder = Llama(path).logits(IDS), pulled(path)
    found = way(folder, capacity=CONTEXT).logits(IDS)
    bound = 0.01 if kind in (Q.Q4_1, Q.Q4_K, Q.Q2_K) else 1e-3
    assert nearest(found, wanted) < bound
    assert distance(wanted, found).kl < 1e-5


@WAYS
@pytest.mark.parametrize("kind", EIGHT_BITS, ids=lambda kind: kind.name)
def test_eight_bits_are_near(way: Callable[..., Folder], kind: gguf.GGMLQuantizationType, tmp_path: Path) -> None:
    path = write(tmp_path / "tiny.gguf", FAMILY["llama-3"], kind)
    wanted, folder = Llama(path).logits(IDS), pulled(path)
    found = distance(wanted, way(folder, capacity=CONTEXT).logits(IDS))
    assert found.kl < 1e-3, found


@WAYS
@pytest.mark.parametrize("name", ["qwen2", "qwen3", "llama"])
def test_a_mixture_of_types_in_one_layer_is_near(way: Callable[..., Folder], name: str, tmp_path: Path) -> None:
    # As llama.cpp mixes them in files of the kind Q4_K_M, and worse.
    kinds = {"attn_v.weight": Q.Q6_K, "ffn_down.weight": Q.Q5_K, "token_embd.weight": Q.Q6_K}
    kinds |= {"attn_q.weight": Q.Q4_K, "attn_k.weight": Q.Q3_K, "ffn_gate.weight": Q.Q4_0, "ffn_up.weight": Q.F16}
    path = write(tmp_path / "tiny.gguf", FAMILY[name], kinds)
    wanted, folder = Llama(path).logits(IDS), pulled(path)
    assert distance(wanted, way(folder, capacity=CONTEXT).logits(IDS)).kl < 1e-3
    pieces = [20, 28]
    found = way(folder, capacity=CONTEXT).logits(IDS, pieces)
    assert distance(wanted[np.cumsum(pieces) - 1], found).kl < 1e-3


@WAYS
@pytest.mark.parametrize("kind", [Q.Q4_1, Q.Q4_K, Q.Q5_K, Q.Q2_K, Q.Q3_K, Q.F16], ids=lambda kind: kind.name)
def test_an_embedding_that_is_the_head_as_well_serves_both(
    way: Callable[..., Folder], kind: gguf.GGMLQuantizationType, tmp_path: Path
) -> None:
    path = write(tmp_path / "tiny.gguf", FAMILY["qwen3"], {"token_embd.weight": kind})
    wanted, folder = Llama(path).logits(IDS), pulled(path)
    assert distance(wanted, way(folder, capacity=CONTEXT).logits(IDS)).kl < 1e-3


@pytest.mark.parametrize("name", ["qwen2", "qwen3", "mistral"])
def test_the_engine_runs_each_member(name: str, tmp_path: Path) -> None:
    path = write(tmp_path / "tiny.gguf", FAMILY[name], Q.Q4_K)
    folder = pulled(path)
    wanted = Folder(folder, capacity=CONTEXT).greedy(IDS, {257}, 16)
    doors, port = _core.port()
    launch = SimpleNamespace(engine="onnx", folder=str(folder), settings=_core.Settings(prefill_chunk=16), port=port)
    thread = threading.Thread(target=loop.run, args=(launch,))
    thread.start()
    try:
        reader = eventually(lambda: submitted(doors), "the engine is ready")
        ids: list[int] = []
        while (news := reader.read()) is not None:
            ids += news[0]
    finally:
        doors.close()
        thread.join()
    assert ids == wanted


def submitted(doors: _core.Doors) -> _core.Reader | None:
    """A request, once the engine is ready."""
    try:
        return doors.submit(IDS, 16)
    except RuntimeError as error:
        assert "still loading" in str(error), error
        return None


@WAYS
@pytest.mark.parametrize("kind", [Q.Q4_1, Q.Q5_K, Q.Q2_K], ids=lambda kind: kind.name)
def test_minimums_of_long_rows_are_as_exact(
    way: Callable[..., Folder], kind: gguf.GGMLQuantizationType, tmp_path: Path
) -> None:
    # In the head as well, whose input has a dimension more.
    path = write(tmp_path / "tiny.gguf", FAMILY["llama-3"]._replace(width=2304, inner=2304), kind)
    wanted, folder = Llama(path).logits(IDS[:12]), pulled(path)
    found = distance(wanted, way(folder, capacity=CONTEXT).logits(IDS[:12]))
    assert found.kl < (1e-5 if kind in FOUR_BITS else 1e-3), found
    found = distance(wanted[[4, 11]], way(folder, capacity=CONTEXT).logits(IDS[:12], [5, 7]))
    assert found.kl < (1e-5 if kind in FOUR_BITS else 1e-3), found


def constants(folder: Path) -> dict[str, NDArray[Any]]:
    """The constants of an imported graph."""
    model = onnx.load(str(folder / "model.onnx"))
    return {each.name: onnx.numpy_helper.to_array(each) for each in model.graph.initializer}


@pytest.mark.parametrize("kind", [*FOUR_BITS, *EIGHT_BITS], ids=lambda kind: kind.name)
def test_codes_scales_and_minimums_are_the_files_own_bit_for_bit(
    kind: gguf.GGMLQuantizationType, tmp_path: Path
) -> None:
    path = write(tmp_path / "tiny.gguf", FAMILY["llama-3"], kind)
    held = constants(pulled(path))
    wanted = Llama(path).weights["token_embd.weight"]
    scales = held["embedding/scales"]
    codes = held["embedding/codes"].astype(np.float32).reshape(*scales.shape, -1)
    found = scales[..., None] * (codes - 128)
    if "embedding/minimums" in held:
        found += held["embedding/minimums"][..., None]
    assert found.dtype == np.float32
    assert np.array_equal(found.reshape(wanted.shape), wanted)
    # A matrix on a kernel: what is left of the minimums goes into the digits, everything else is as it was.
    wanted = Llama(path).weights["blk.0.ffn_down.weight"]
    columns = wanted.shape[1]
    scales, codes = held["layer.0/feed_forward/scales"], held["layer.0/feed_forward/codes"]
    zeros = held.get("layer.0/feed_forward/zeros", np.full(scales.shape, 128, np.uint8))
    if kind in FOUR_BITS:
        codes, zeros = (np.stack([each & 15, each >> 4], -1).reshape(*each.shape[:-1], -1) for each in (codes, zeros))
    block = codes.shape[-1]
    plain = columns // block
    made = scales[..., None] * (codes.astype(np.float64) - zeros[:, : scales.shape[1], None])
    found, digits = made[:, :plain], made[:, plain:]
    if digits.size:
        digits = digits.reshape(len(made), 8 // (4 if kind in FOUR_BITS else 8), -1)[..., :plain].sum(1)
        found = found + digits[..., None]
        # Held to a 225th of the largest rest of a row (a 255th with eight bits).
        assert np.abs(found.reshape(wanted.shape) - wanted).max() <= np.abs(digits).max() / 220
    else:
        assert np.array_equal(found.reshape(wanted.shape), wanted)


@pytest.mark.skipif(sys.platform == "win32", reason="there is no wait4")
def test_memory_does_not_grow_with_the_file(tmp_path: Path) -> None:
    def peak(path: Path) -> int:
        """The most memory that an import had, in bytes."""
        done = subprocess.Popen(
            [*command(), "models", "pull", str(path)], env=environment(tmp_path / "home"), stdout=subprocess.DEVNULL
        )
        _, status, usage = os.wait4(done.pid, 0)
        done.returncode = os.waitstatus_to_exitcode(status)
        assert done.returncode == 0
        return usage.ru_maxrss * (1 if sys.platform == "darwin" else 1024)

    small = write(tmp_path / "small.gguf", FAMILY["llama"], Q.Q8_0)
    large = write(tmp_path / "large.gguf", FAMILY["llama"]._replace(inner=1 << 16), Q.Q8_0)
    tensor = (1 << 16) * 256 * 34 // 32
    assert large.stat().st_size > 6 * tensor
    assert peak(large) - peak(small) < 2 * tensor


def test_all_weights_lie_outside_the_graph(tmp_path: Path) -> None:
    # The graph's own format ends at 2 GB; a file beside it does not.
    folder = pulled(write(tmp_path / "tiny.gguf", FAMILY["qwen3"], Q.Q4_K))
    model = onnx.load(str(folder / "model.onnx"), load_external_data=False)
    inside = [len(each.raw_data) for each in model.graph.initializer if not each.external_data]
    assert max(inside) <= 24
    assert (folder / "model.onnx").stat().st_size < 100_000


@pytest.mark.parametrize("name", ["gemma3", "mistral3", "qwen2moe", "qwen3moe", "phi3"])
def test_other_architectures_are_refused_by_name(name: str, tmp_path: Path) -> None:
    path = write(tmp_path / "tiny.gguf", FAMILY["llama"]._replace(architecture=name))
    assert f"the architecture {name} cannot be imported" in refused(path)


def test_other_types_are_refused_by_name(tmp_path: Path) -> None:
    whole = write(tmp_path / "whole.gguf", FAMILY["llama"], Q.IQ4_NL).read_bytes()
    name = b"blk.0.attn_k.weight"
    # The entry: name, number of dimensions, dimensions, type.
    at = whole.index(name) + len(name) + 4 + 2 * 8
    for kind in (Q.IQ2_XXS, Q.IQ3_S, Q.TQ1_0, Q.MXFP4, Q.I8):
        path = tmp_path / f"{kind.name}.gguf"
        path.write_bytes(whole[:at] + int(kind).to_bytes(4, "little") + whole[at + 4 :])
        assert f"tensor blk.0.attn_k.weight is stored as {kind.name}" in refused(path)


@pytest.mark.parametrize("kind", [Q.Q4_K, Q.Q5_1, Q.Q6_K], ids=lambda kind: kind.name)
def test_a_file_that_is_cut_short_or_altered_is_refused(kind: gguf.GGMLQuantizationType, tmp_path: Path) -> None:
    whole = write(tmp_path / "whole.gguf", FAMILY["qwen2"], kind).read_bytes()
    path = tmp_path / "cut.gguf"
    for cut in (len(whole) // 3, len(whole) - 1_000):
        path.write_bytes(whole[:cut])
        assert "truncated" in refused(path)
    # A scale that is not a number.
    reader = gguf.GGUFReader(str(tmp_path / "whole.gguf"))
    tensor = next(each for each in reader.tensors if each.name == "blk.1.ffn_up.weight")
    at = tensor.data_offset + (208 if kind == Q.Q6_K else 0)
    path.write_bytes(whole[:at] + np.float16("nan").tobytes() + whole[at + 2 :])
    assert "blk.1.ffn_up.weight holds values that are not finite" in refused(path)


def test_a_missing_bias_or_norm_is_named(tmp_path: Path) -> None:
    for name, missing in (("qwen2", "blk.1.attn_k.bias"), ("qwen3", "blk.0.attn_q_norm.weight")):
        whole = write(tmp_path / "whole.gguf", FAMILY[name]).read_bytes()
        path = tmp_path / f"{name}.gguf"
        other = "x" * len(missing)
        path.write_bytes(whole.replace(missing.encode(), other.encode()))
        said = refused(path)
        assert missing in said or other in said


@pytest.mark.parametrize("name", ["qwen2", "llama"])
def test_rotary_scaling_that_is_not_known_is_refused_by_name(name: str, tmp_path: Path) -> None:
    path = write(tmp_path / "tiny.gguf", FAMILY[name]._replace(linear=2.0))
    path.write_bytes(path.read_bytes().replace(b"\x06\0\0\0\0\0\0\0linear", b"\x06\0\0\0\0\0\0\0yarn-x"))
    assert "rotary scaling of type yarn-x" in refused(path)


def test_a_window_is_refused_where_only_some_layers_have_it(tmp_path: Path) -> None:
    path = write(tmp_path / "tiny.gguf", FAMILY["qwen2"]._replace(window=7))
    assert "a sliding window" in refused(path)
    pulled(write(tmp_path / "wide.gguf", FAMILY["qwen2"]._replace(window=CONTEXT)))
