"""Opens an MLX model folder: finds the model's class in mlx-lm, loads its weights, and says what the model can take.

Nothing is run here but one token, to see the model's sizes, and no request is known. mlx-lm's own package imports transformers at once (4 s,
250 MB), and its loader does as well; its model classes need neither. So the package is entered without its `__init__`
(`classes`), and the loader is written here. Templates and tokenising are the core's.
"""

from __future__ import annotations

import ast
import importlib
import importlib.util
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

import mlx.core as mx
import mlx.nn as nn

from emberd import mlx_adapter, mlx_gguf
from emberd.configs import read_config
from emberd.engine import EngineError, at_least_one, eos_ids
from emberd.mlx_caches import leaves

if TYPE_CHECKING:
    from collections.abc import Callable

    from emberd._core import Settings

    Caches = list[Any]
    """What a model keeps of one sequence, or of a batch of them: one of mlx-lm's cache objects a layer."""

DEFAULT_MAX_BATCH = 16

_CONVERT = "give a folder that mlx_lm.convert made, or a hub repository of one"
_CONTEXT_KEYS = ("max_position_embeddings", "max_seq_len", "n_positions", "n_ctx")
_PLAIN_METHODS = {
    "mxfp4": {"group_size": 32, "bits": 4, "mode": "mxfp4"},
    "mxfp8": {"group_size": 32, "bits": 8, "mode": "mxfp8"},
}
"""Ways of quantizing whose tensors need no change, by the name that `quantization_config` has for them."""
_MODES = {(4, 16): "nvfp4", (4, 32): "mxfp4", (8, 32): "mxfp8"}
"""Of weights whose scales are bytes, the mode, by bits and group size."""


class Model:
    """A loaded model and the figures an engine needs to drive it."""

    def __init__(self, folder: str, settings: Settings) -> None:
        """Raises `EngineError` when the folder or the settings do not allow it."""
        path = Path(folder)
        if not path.is_dir():
            raise EngineError(
                f"there is no model folder {folder}", "give the path of a folder that mlx_lm.convert made"
            )
        file = mlx_gguf.find(path)
        config = read_config(path / "config.json", _CONVERT, required=file is None)
        weights: dict[str, mx.array] | None = None
        if file is not None:
            told, weights = mlx_gguf.read(file)
            config |= told
        self.eos_ids = eos_ids(read_config(path / "generation_config.json", _CONVERT), config, _text(config))
        self.context_length = _context(path, config, settings)
        self.max_batch = at_least_one("max_batch", settings.max_batch, DEFAULT_MAX_BATCH)
        self._network = _assemble(path, config, _weights(path) if weights is None else weights)
        if (adapter := mlx_adapter.find(path)) is not None:
            mlx_adapter.apply(self._network, adapter)
        if mx.default_device().type == mx.DeviceType.cpu:
            # Products in 16 bits are done in software there, and take 60 to 125 times as long.
            self._network.set_dtype(mx.float32)
        elif file is not None:
            self._network.set_dtype(mx.float16)  # of its scales; the norms beside them would widen all else
        mx.eval(self._network.parameters())
        self.vocab_size = self._probe(path)
        if not all(hasattr(each, "merge") for each in leaves(self.new_caches())):
            self.max_batch = 1  # a kind of cache that mlx-lm keeps for one sequence alone

    def new_caches(self) -> Caches:
        """Empty caches for one sequence."""
        if hasattr(self._network, "make_cache"):
            return cast("Caches", self._network.make_cache())
        kv_cache = cache_module().KVCache
        return [kv_cache() for _ in self._network.layers]

    def __call__(self, tokens: mx.array, caches: Caches) -> mx.array:
        """The logits `[batch, tokens, vocab]` of `tokens` `[batch, tokens]`, which the caches then hold; not computed yet."""
        return cast("mx.array", self._network(tokens, cache=caches))

    def _probe(self, path: Path) -> int:
        try:
            logits = self(mx.array([[0]]), self.new_caches())
            mx.eval(logits)
        except Exception as error:  # whatever the model's class makes of a config that does not fit its weights
            raise EngineError(f"the model in {path} cannot run: {_line(error)}", _CONVERT) from error
        return int(logits.shape[-1])


def cache_module() -> Any:
    """mlx-lm's module of caches."""
    return _module("cache")


def classes(config: dict[str, Any]) -> tuple[type[nn.Module], Any]:
    """The classes of a model and of its arguments, by the config's `model_type`. Raises `EngineError` where mlx-lm has none."""
    kind, renamed = config.get("model_type"), _renamed()
    if not isinstance(kind, str) or not kind:
        raise EngineError("config.json gives no model_type", _CONVERT)
    of_architecture = renamed.get("MODEL_ARCHITECTURE_REMAPPING", {})
    architectures = config.get("architectures") or []
    found = next((of_architecture[kind, each] for each in architectures if (kind, each) in of_architecture), None)
    name = found or renamed.get("MODEL_REMAPPING", {}).get(kind, kind)
    if not name.replace("_", "").replace("-", "").isalnum():
        raise EngineError(f"config.json gives {kind!r} as the model_type", _CONVERT)
    try:
        module = _module(name)
        return module.Model, module.ModelArgs
    except (ModuleNotFoundError, AttributeError) as error:
        if isinstance(error, ModuleNotFoundError) and error.name != f"mlx_lm.models.{name}":
            raise
        raise EngineError(
            f"the installed mlx-lm knows no model of type {kind!r}", "try a newer mlx-lm, or --engine onnx"
        ) from error


def _module(name: str) -> Any:
    """A module of `mlx_lm.models`, without what `mlx_lm` itself imports."""
    if "mlx_lm" not in sys.modules:
        spec = importlib.util.find_spec("mlx_lm")
        if spec is None:
            raise ModuleNotFoundError("No module named 'mlx_lm'", name="mlx_lm")
        sys.modules["mlx_lm"] = importlib.util.module_from_spec(spec)
    return importlib.import_module(f"mlx_lm.models.{name}")


def _renamed() -> dict[str, dict[Any, str]]:
    """mlx-lm's own tables of model types that share another's class, read from its source: to import them costs as `__init__` does."""
    package = importlib.util.find_spec("mlx_lm")
    origin = Path(package.origin).with_name("utils.py") if package and package.origin else None
    tables: dict[str, dict[Any, str]] = {}
    if origin is None or not origin.is_file():
        return tables
    text = origin.read_text(encoding="utf-8")
    for name in ("MODEL_REMAPPING", "MODEL_ARCHITECTURE_REMAPPING"):
        _, found, rest = text.partition(f"\n{name} = {{")
        body, ends, _ = rest.partition("\n}")
        if found and ends:
            tables[name] = ast.literal_eval("{" + body + "\n}")
    return tables


def _assemble(path: Path, config: dict[str, Any], weights: dict[str, mx.array]) -> nn.Module:
    """The model with its weights, those that are quantized as they are; not computed yet."""
    if config.get("model_file"):
        raise EngineError(f"{path} brings its own code ({config['model_file']}), which is not run", _CONVERT)
    model_class, arguments = classes(config)
    quantization = _quantization(path, config)
    try:
        model = model_class(arguments.from_dict(config))
        if hasattr(model, "sanitize"):
            weights = model.sanitize(weights)
        if quantization is not None:
            nn.quantize(
                model,
                group_size=quantization["group_size"],
                bits=quantization["bits"],
                mode=quantization.get("mode", "affine"),
                class_predicate=_predicate(quantization, weights),
            )
        model.eval()
        model.load_weights(list(weights.items()), strict=True)
    except Exception as error:  # each model's class has its own way to refuse a config or a tensor
        raise EngineError(f"{path} cannot be loaded as {config['model_type']}: {_line(error)}", _CONVERT) from error
    return model


def _weights(path: Path) -> dict[str, mx.array]:
    weights: dict[str, mx.array] = {}
    files = sorted(path.glob("model*.safetensors"))
    if not files:
        raise EngineError(f"{path} holds no model.safetensors", _CONVERT)
    for file in files:
        try:
            weights.update(mx.load(str(file)))
        except Exception as error:  # a file that is cut off, or is none
            raise EngineError(
                f"{file} cannot be loaded: {_line(error)}", "if it is damaged, fetch the model anew"
            ) from error
    return weights


def _quantization(path: Path, config: dict[str, Any]) -> dict[str, Any] | None:
    """How the weights are quantized, as mlx-lm writes it; `None` where they are not."""
    if config.get("quantization"):
        return cast("dict[str, Any]", config["quantization"])
    foreign = config.get("quantization_config") or _text(config).get("quantization_config")
    if not foreign:
        return None
    method = foreign.get("quant_method")
    if method not in _PLAIN_METHODS:
        raise EngineError(f"the weights in {path} are quantized by {method}, which is not read", _CONVERT)
    return _PLAIN_METHODS[method]


def _predicate(
    quantization: dict[str, Any], weights: dict[str, mx.array]
) -> Callable[[str, nn.Module], bool | dict[str, Any]]:
    """Says of each layer whether its weights are quantized, and how."""

    def quantized(path: str, module: nn.Module) -> bool | dict[str, Any]:
        if path in quantization:
            return cast("bool | dict[str, Any]", quantization[path])
        scales = weights.get(f"{path}.scales")
        if scales is None or not hasattr(module, "to_quantized"):
            return False
        width = module.weight.shape[-1]
        bits, group = weights[f"{path}.weight"].shape[-1] * 32 // width, width // scales.shape[-1]
        mode = "affine" if scales.dtype != mx.uint8 else _MODES.get((bits, group), "affine")
        return {"bits": bits, "group_size": group, "mode": mode}

    return quantized


def _context(path: Path, config: dict[str, Any], settings: Settings) -> int:
    values = [each.get(key) for each in (config, _text(config)) for key in _CONTEXT_KEYS]
    own = next((each for each in values if isinstance(each, int) and each > 0), None)
    if own is None and settings.context_length is None:  # a recurrent model has no bound of its own
        raise EngineError(
            f"{path / 'config.json'} gives no max_position_embeddings", "say how long a context may be: --context 8192"
        )
    asked = at_least_one("context_length", settings.context_length, own or 0)
    context = asked if own is None else min(own, asked)
    if context < 2:
        raise EngineError("context_length is 1", "a prompt and its answer need at least 2 tokens")
    return context


def _text(config: dict[str, Any]) -> dict[str, Any]:
    """The part of a config that is about text, in models that know images too."""
    part = config.get("text_config")
    return part if isinstance(part, dict) else {}


def _line(error: BaseException) -> str:
    text = " ".join(str(error).split())
    return text[:500] or type(error).__name__
