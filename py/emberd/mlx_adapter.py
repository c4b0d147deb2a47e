"""Applies an adapter that mlx-lm trained to a model: low-rank additions to its linear layers, or whole tensors in place of its own.

The adapter lies in the model's folder, or in `adapters` within it, as `mlx_lm.lora` writes it: `adapters.safetensors` and
`adapter_config.json`. LoRA: https://arxiv.org/abs/2106.09685.
"""

from __future__ import annotations

from collections import defaultdict
from typing import TYPE_CHECKING, Any

import mlx.core as mx
import mlx.nn as nn
from mlx.utils import tree_flatten, tree_unflatten

from emberd.configs import read_config
from emberd.engine import EngineError

if TYPE_CHECKING:
    from pathlib import Path

FILE = "adapters.safetensors"
_FUSE = "merge it into the model with mlx_lm.fuse"


class Adapted(nn.Module):  # type: ignore[misc]
    """A linear layer and what is added to its product: `scale * (x @ a) @ b`, `a` `[in, rank]`, `b` `[rank, out]`."""

    def __init__(self, base: nn.Module, a: mx.array, b: mx.array, scale: float) -> None:
        super().__init__()
        self.base = base
        self.lora_a = a
        self.lora_b = b
        self._scale = scale

    def __call__(self, x: mx.array) -> mx.array:
        """The layer's product, adapted."""
        return self.base(x) + (self._scale * ((x @ self.lora_a) @ self.lora_b)).astype(x.dtype)


def find(folder: Path) -> Path | None:
    """The folder of the adapter that belongs to a model; `None` where it has none."""
    return next((each for each in (folder, folder / "adapters") if (each / FILE).is_file()), None)


def apply(model: nn.Module, folder: Path) -> None:
    """Applies the adapter in `folder`. Raises `EngineError` when it is of a kind that is not applied, or of another model."""
    config = read_config(folder / "adapter_config.json", _FUSE, required=True)
    kind = config.get("fine_tune_type", "lora")
    try:
        weights = mx.load(str(folder / FILE))
    except Exception as error:  # a file that is cut off, or is none
        raise EngineError(f"{folder / FILE} cannot be loaded: {error}", "train or copy the adapter anew") from error
    if kind == "full":
        _replace(model, weights, folder)
    elif kind == "lora":
        _add(model, weights, _scale(config, folder), folder)
    else:
        raise EngineError(f"the adapter in {folder} is of the kind {kind}, which is not applied", _FUSE)


def _scale(config: dict[str, Any], folder: Path) -> float:
    parameters = config.get("lora_parameters")
    scale = parameters.get("scale") if isinstance(parameters, dict) else None
    if not isinstance(scale, int | float):
        raise EngineError(f"{folder / 'adapter_config.json'} gives no lora_parameters.scale", _FUSE)
    return float(scale)


def _replace(model: nn.Module, weights: dict[str, mx.array], folder: Path) -> None:
    own = dict(tree_flatten(model.parameters()))
    for name, value in weights.items():
        if name not in own or own[name].shape != value.shape:
            raise _foreign(name, folder)
    model.load_weights(list(weights.items()), strict=False)


def _add(model: nn.Module, weights: dict[str, mx.array], scale: float, folder: Path) -> None:
    parts: dict[str, dict[str, mx.array]] = defaultdict(dict)
    for name, value in weights.items():
        layer, _, part = name.rpartition(".")
        parts[layer][part] = value
    layers = dict(model.named_modules())
    adapted: list[tuple[str, nn.Module]] = []
    for name, pair in parts.items():
        base = layers.get(name)
        if base is None or set(pair) != {"lora_a", "lora_b"}:
            raise _foreign(f"{name}.{min(pair)}", folder)
        if not isinstance(base, nn.Linear | nn.QuantizedLinear):
            raise EngineError(
                f"the adapter in {folder} changes {name}, a {type(base).__name__}, which is not applied", _FUSE
            )
        a, b = pair["lora_a"], pair["lora_b"]
        width = base.weight.shape[1] if isinstance(base, nn.Linear) else base.scales.shape[1] * base.group_size
        if (
            a.ndim != 2
            or b.ndim != 2
            or (a.shape[0], b.shape[1]) != (width, base.weight.shape[0])
            or a.shape[1] != b.shape[0]
        ):
            raise _foreign(f"{name}.lora_a", folder)
        adapted.append((name, Adapted(base, a, b, scale)))
    model.update_modules(tree_unflatten(adapted))


def _foreign(name: str, folder: Path) -> EngineError:
    return EngineError(
        f"the adapter in {folder} has {name}, which does not fit this model", "give it with the model it was trained on"
    )
