"""What a graph takes and gives beside tokens and logits, read from its own inputs and outputs; anything else is refused by name.

Two layouts of the cache are known. With *shared* buffers a pass reads its past from a buffer of fixed capacity and
writes the present into the same one (GroupQueryAttention can); with *concatenated* caches the present is a new tensor,
longer than the past by what was run. Inputs and outputs may look alike in both, so which of them a graph keeps is found
by running it, in `probe`; here is only what the names, types and shapes say. No folder and no file name is looked at.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from emberd.engine import EngineError
from emberd.kv import Layer

if TYPE_CHECKING:
    from pathlib import Path

    import onnxruntime as ort
    from numpy.typing import NDArray

EXPECTED = "input_ids, attention_mask, position_ids and past_key_values.N.key/value"
"""What a refusal says of the inputs that a graph should have."""

HINT = "import the model with `emberd models pull`, or give the path of a .gguf file"

LOGITS_TO_KEEP = ("num_logits_to_keep", "logits_to_keep")
"""Names of a scalar that says of how many of the last tokens the logits are wanted; here it is always one."""

_TYPES = {"tensor(float)": "float32", "tensor(float16)": "float16"}
_KV = "past_key_values."


class State(NamedTuple):
    """A recurrent state of a hybrid model, such as the window of a convolution: its shape is that of one sequence, without the batch."""

    past: str
    present: str
    shape: tuple[int, ...]
    dtype: str


class Inputs(NamedTuple):
    """What a graph takes beside `input_ids`."""

    layers: list[Layer]
    """Keys and values, which grow with the sequence."""
    states: list[State]
    """Recurrent states, which do not."""
    mask: bool = True
    """`attention_mask` `[batch, past + sequence]`, 1 where there is a token."""
    positions: bool = False
    """`position_ids` `[batch, sequence]`."""
    cache_position: bool = False
    """`cache_position` `[sequence]`: places in the cache, the same for the whole batch."""
    branch: bool = False
    """`use_cache_branch` `[1]`: whether there is a past, in graphs that hold a branch for each case."""
    keep: tuple[str, tuple[int, ...]] | None = None
    """The name and shape of the number of logits to keep."""

    def plain(self) -> bool:
        """Whether the shared layout needs nothing more than `input_ids` and `attention_mask` beside the cache."""
        return self.mask and not (self.states or self.positions or self.cache_position or self.branch or self.keep)

    def beside(self, past: int, count: int, pads: NDArray[np.int64], width: int = 0) -> dict[str, NDArray[np.generic]]:
        """The values of all inputs but tokens and caches, for `count` new tokens in each row.

        A row's past is `past` long, of which the first `pads[row]` places are no tokens. The mask is `width` wide, or
        just as wide as past and tokens together.
        """
        total = past + count
        values: dict[str, NDArray[np.generic]] = {}
        if self.mask:
            places = np.arange(width or total)
            values["attention_mask"] = ((places >= pads[:, None]) & (places < total)).astype(np.int64)
        if self.positions:
            values["position_ids"] = np.arange(past, total) - pads[:, None]
        if self.cache_position:
            values["cache_position"] = np.arange(past, total)
        if self.branch:
            values["use_cache_branch"] = np.full(1, past > 0)
        if self.keep is not None:
            values[self.keep[0]] = np.ones(self.keep[1], np.int64)
        return values


def read(graph: Path, session: ort.InferenceSession, config: dict[str, Any]) -> Inputs:
    """Reads a session's inputs. Raises `EngineError` with the name of the first one that nothing here can fill."""
    outputs = {each.name for each in session.get_outputs()}
    layers: list[Layer] = []
    states: list[State] = []
    given: dict[str, tuple[int, ...]] = {}
    for each in session.get_inputs():
        name, shape = each.name, each.shape
        if (rank := _PLAIN.get(name)) is not None:
            if each.type != _INTEGERS.get(name, "tensor(int64)") or (shape is not None and len(shape) not in rank):
                raise EngineError(
                    f"{graph} has the input {name} as {each.type} of shape {shape}; expected {EXPECTED}", HINT
                )
            given[name] = (1,) * len(shape)
            continue
        present = next((of for of in _presents(name) if of in outputs), None)
        if not name.startswith("past") or present is None or not shape:
            raise EngineError(f"{graph} has an input {name}; expected {EXPECTED}", HINT)
        if name.startswith(_KV):
            if len(shape) != 4 or not isinstance(shape[1], int) or not isinstance(shape[3], int):
                raise EngineError(f"{graph} does not give the heads and width of {name}, but {shape}", HINT)
            if isinstance(shape[2], int):
                raise EngineError(
                    f"{graph} has {name} of a fixed length of {shape[2]}; expected a length that varies", HINT
                )
            layers.append(Layer(name, present, shape[1], shape[3], dtype(graph, each)))
        else:
            states.append(State(name, present, _state_shape(graph, name, shape, config), dtype(graph, each)))
    if "input_ids" not in given or not layers:
        names = ", ".join(each.name for each in session.get_inputs())
        raise EngineError(f"{graph} has the inputs {names}; expected {EXPECTED}", HINT)
    keep = next((name for name in LOGITS_TO_KEEP if name in given), None)
    return Inputs(
        layers,
        states,
        mask="attention_mask" in given,
        positions="position_ids" in given,
        cache_position="cache_position" in given,
        branch="use_cache_branch" in given,
        keep=None if keep is None else (keep, given[keep]),
    )


def dtype(graph: Path, node: ort.NodeArg) -> str:
    """NumPy's name for the type of an input or output. Raises `EngineError` where it is no float."""
    known = _TYPES.get(node.type)
    if known is None:
        raise EngineError(f"{graph} has {node.name} as {node.type}; expected one of {', '.join(_TYPES)}", HINT)
    return known


_PLAIN: dict[str, tuple[int, ...]] = {
    "input_ids": (2,),
    "attention_mask": (2,),
    "position_ids": (2,),
    "cache_position": (1,),
    "use_cache_branch": (1,),
    **dict.fromkeys(LOGITS_TO_KEEP, (0, 1)),
}
"""The inputs that are no caches, and the ranks that each may have."""

_INTEGERS = {"use_cache_branch": "tensor(bool)"}
"""The types of those that are not int64."""

_CONVOLUTION = ("hidden_size", "conv_L_cache")
"""Where the config of an LFM2 model gives the shape of its convolutions' states, for graphs that do not."""


def _presents(name: str) -> tuple[str, str]:
    """The names that the output after an input `past…` may have."""
    return name.replace(_KV, "present.", 1), name.replace("past", "present", 1)


def _state_shape(graph: Path, name: str, shape: list[int | str | None], config: dict[str, Any]) -> tuple[int, ...]:
    rest = shape[1:]
    if name.startswith("past_conv") and len(rest) == len(_CONVOLUTION):
        rest = [
            size if isinstance(size, int) else config.get(key) for size, key in zip(rest, _CONVOLUTION, strict=True)
        ]
    sizes = tuple(size for size in rest if isinstance(size, int))
    if len(sizes) < len(rest) or isinstance(shape[0], int):
        raise EngineError(
            f"{graph} has the state {name} of shape {shape}; expected a batch that varies and fixed sizes", HINT
        )
    return sizes
