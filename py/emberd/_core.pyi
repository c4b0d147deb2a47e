"""The extension module, as the engines see it. The contract is in `docs/port.md`."""

from collections.abc import Sequence
from os import PathLike
from typing import Literal, final

__all__ = [
    "Admit",
    "App",
    "Cancel",
    "Capabilities",
    "Constraint",
    "Doors",
    "Forget",
    "Launch",
    "Port",
    "PortError",
    "Reader",
    "Sampling",
    "Settings",
    "constraint",
    "graphs",
    "port",
    "rewritten",
    "start",
]

class PortError(RuntimeError):
    """A call on the port that the contract does not allow at this point."""

@final
class Sampling:
    """How one request chooses its tokens. Plain greedy requests have `None` in its place."""

    def __new__(
        cls,
        temperature: float,
        top_p: float,
        top_k: int,
        seed: int,
        *,
        min_p: float = 0.0,
        repetition_penalty: float = 1.0,
        presence_penalty: float = 0.0,
        frequency_penalty: float = 0.0,
        logit_bias: dict[int, float] | None = None,
        top_logprobs: int | None = None,
    ) -> Sampling: ...
    @property
    def temperature(self) -> float:
        """At least 0; 0 takes the highest logit."""
    @property
    def top_p(self) -> float:
        """The probability mass of the nucleus, in (0, 1]; 1 keeps everything."""
    @property
    def top_k(self) -> int:
        """How many candidates are kept; 0 keeps all."""
    @property
    def seed(self) -> int:
        """An unsigned 64-bit integer."""
    @property
    def min_p(self) -> float:
        """How likely a candidate must be beside the likeliest, in [0, 1]; 0 keeps all."""
    @property
    def repetition_penalty(self) -> float:
        """Above 0; weakens tokens of the prompt and the answer. 1 changes nothing."""
    @property
    def presence_penalty(self) -> float:
        """Taken once from the logits of tokens of the answer, in [-2, 2]."""
    @property
    def frequency_penalty(self) -> float:
        """Taken from the logits of tokens of the answer as often as they have come, in [-2, 2]."""
    @property
    def logit_bias(self) -> dict[int, float]:
        """What is added to the logits of these tokens, in [-100, 100]; a new dict on every access."""
    @property
    def top_logprobs(self) -> int | None:
        """How many of the likeliest tokens are told beside each token's own log probability; `None` asks for neither."""

@final
class Constraint:
    """What one answer may say, and how far it has come. Every call that cannot be answered raises `ValueError`."""

    def mask(self) -> bytes:
        """Which token ids may come next, a bit for each: id `i` is bit `i % 8` of byte `i // 8`.

        At least one is set; once the answer is complete, those that end it. The length is a multiple of 4.
        """
    def forced(self) -> list[int]:
        """The ids that are certain to come next, in order, up to 512; none where there is a choice and when all is said."""
    def accept(self, token: int) -> None:
        """Goes on to the next place of the answer. A token that is not allowed raises, and changes nothing."""
    def accepting(self) -> bool:
        """Whether the answer may end here."""
    @property
    def complete(self) -> bool:
        """Whether nothing but the end may come."""

def constraint(
    folder: str | PathLike[str], vocab_size: int, eos_ids: Sequence[int], syntax: str, definition: str
) -> Constraint:
    """What a door makes of a grammar, for tests and benchmarks of engines without a door.

    `folder` holds `tokenizer.json`; `syntax` is `json_schema`, `json_object`, `regex` or `lark`. Raises `RuntimeError` with the reason
    when the grammar is refused.
    """

@final
class Admit:
    """A new request."""

    def __new__(
        cls,
        id: int,
        prompt: list[int],
        max_tokens: int,
        sampling: Sampling | None = None,
        *,
        constraint: Constraint | None = None,
        speculation: int | None = None,
        salt: str = "",
        start_from: int | None = None,
        save_as: int | None = None,
    ) -> Admit: ...
    @property
    def id(self) -> int:
        """Never used twice in the life of the process."""
    @property
    def prompt(self) -> list[int]:
        """Token ids, never empty; a new list on every access."""
    @property
    def max_tokens(self) -> int:
        """At least 1; with the prompt no more than the context length."""
    @property
    def sampling(self) -> Sampling | None:
        """`None` for plain greedy decoding."""
    @property
    def constraint(self) -> Constraint | None:
        """What the answer may say, the same one on every access; `None` for anything."""
    @property
    def speculation(self) -> int | None:
        """How many tokens ahead may be guessed and checked in one pass; 0 none, `None` as many as the engine thinks best."""
    @property
    def salt(self) -> str:
        """Only what requests of the same salt left may be reused."""
    @property
    def start_from(self) -> int | None:
        """The one snapshot that may be reused; `None` allows all of the salt."""
    @property
    def save_as(self) -> int | None:
        """The name under which prompt and answer are kept from the finish on."""

@final
class Cancel:
    """Nobody reads this request any more."""

    def __new__(cls, id: int) -> Cancel: ...
    @property
    def id(self) -> int:
        """The request to forget."""

@final
class Forget:
    """Nobody will start from this snapshot any more."""

    def __new__(cls, snapshot: int) -> Forget: ...
    @property
    def snapshot(self) -> int:
        """A name that a request was told to save as."""

@final
class Capabilities:
    """What a loaded model can do."""

    def __new__(
        cls,
        context_length: int,
        max_batch: int,
        vocab_size: int,
        eos_ids: Sequence[int],
        *,
        constraints: bool = False,
    ) -> Capabilities: ...
    @property
    def context_length(self) -> int:
        """Tokens of prompt and answer together."""
    @property
    def max_batch(self) -> int:
        """Requests the engine holds at a time."""
    @property
    def vocab_size(self) -> int:
        """Token ids are below this."""
    @property
    def eos_ids(self) -> list[int]:
        """The ids that end an answer."""
    @property
    def constraints(self) -> bool:
        """Whether it holds answers to a `Constraint`."""

@final
class Settings:
    """What the user asked for; `None` leaves the choice to the engine."""

    def __new__(
        cls,
        *,
        threads: int | None = None,
        max_batch: int | None = None,
        context_length: int | None = None,
        prefill_chunk: int | None = None,
        cache_bytes: int | None = None,
        kv_bytes: int | None = None,
        spin: bool | None = None,
        activations: Literal["int16", "float", "int8"] | None = None,
        kernels: Literal["emberd", "onnxruntime"] | None = None,
    ) -> Settings:
        """Raises `ValueError` for activations or kernels that are neither."""
    @property
    def threads(self) -> int | None:
        """Threads for one forward pass."""
    @property
    def max_batch(self) -> int | None:
        """Requests that run together."""
    @property
    def context_length(self) -> int | None:
        """An upper bound on the model's own context length, in tokens."""
    @property
    def prefill_chunk(self) -> int | None:
        """Prompt tokens taken between two steps of the answers that run."""
    @property
    def cache_bytes(self) -> int | None:
        """Bytes for what is kept of prompts and answers for later ones; 0 keeps nothing."""
    @property
    def kv_bytes(self) -> int | None:
        """Bytes for the keys and values of the requests that run."""
    @property
    def spin(self) -> bool | None:
        """Whether idle threads of a pass wait by spinning: for ever or never."""
    @property
    def activations(self) -> Literal["int16", "float", "int8"] | None:
        """What activations are where they meet quantized weights."""
    @property
    def kernels(self) -> Literal["emberd", "onnxruntime"] | None:
        """Whose operators an imported model is computed with: with those of onnxruntime alone `int16` is `float`."""

@final
class Port:
    """An engine's side of the port."""

    def ready(self, capabilities: Capabilities) -> None: ...
    def wait(self) -> list[Admit | Cancel | Forget] | None: ...
    def poll(self) -> list[Admit | Cancel | Forget] | None: ...
    def push(
        self,
        steps: list[
            tuple[int, list[int], str | None]
            | tuple[int, list[int], str | None, list[tuple[float, list[tuple[int, float]]]] | None]
            | tuple[int, int]
        ],
    ) -> list[int]: ...
    def fail(self, id: int | None, message: str) -> None: ...
    def close(self) -> None:
        """Lets go of the port. Without a `fail` before, and while the other side has it open, this fails the engine."""

@final
class Launch:
    """One model to load, and the port it answers on."""

    @property
    def engine(self) -> str:
        """The engine's name, as in `emberd.loop.ENGINES`."""
    @property
    def folder(self) -> str:
        """The model folder's path."""
    @property
    def settings(self) -> Settings: ...
    @property
    def port(self) -> Port: ...

@final
class App:
    """A running `emberd`: its doors live on threads of Rust."""

    def next_launch(self) -> Launch | None:
        """The next engine to load; sleeps, with the interpreter free, until there is one. `None` when the process ends."""
    def finish(self) -> int:
        """Waits until everything in Rust has ended; returns the exit code."""

def start(args: Sequence[str], python: str | PathLike[str] | None = None, mlx: bool = False) -> App:
    """Parses the arguments (without the program's name) and starts what they say; `python` can run pip.

    `mlx` says whether MLX is the best engine on this machine.
    """

def graphs(dtype: str) -> list[str]:
    """Where the graph of a model may be within its folder, the best place first, for weights in this form.

    A name that is none is the default, and only the default may be any `model.onnx`.
    """

def rewritten(model: bytes, own: bool, activations: Literal["int16", "float", "int8"]) -> bytes | None:
    """An imported graph with emberd's own operators (`own`) and with these activations.

    `None` where nothing of it is to be changed, or where another program wrote it. `int16` needs emberd's operators, and is
    `float` without them, and for matrices or processors that they have no products for. `float` is 8 bits for codes of 8 bits:
    the runtime has no other product for them.
    """

@final
class Reader:
    """The reader's end of one request."""

    @property
    def id(self) -> int:
        """The request's number."""
    def read(self) -> tuple[list[int], str | None] | None:
        """New ids, and the finish if it is over; sleeps until there is something; `None` after the end.

        Raises `RuntimeError` with the reason when the request failed.
        """
    def logprobs(self) -> list[tuple[float, list[tuple[int, float]]]]:
        """The log probabilities of what `read` gave since the last call: one entry for each token, or none at all."""
    def leave(self) -> None:
        """Leaves: the request is cancelled."""

@final
class Doors:
    """The doors' side of a port, for tests of engines and loops without a door."""

    def submit(
        self,
        prompt: Sequence[int],
        max_tokens: int,
        sampling: Sampling | None = None,
        *,
        constraint: Constraint | None = None,
        speculation: int | None = None,
        salt: str = "",
        start_from: int | None = None,
        save_as: int | None = None,
    ) -> Reader:
        """Queues a request. Raises `RuntimeError` with the reason when it is refused.

        Its constraint is a copy of the one given, as that is now.
        """
    def forget(self, snapshot: int) -> None:
        """Gives up a snapshot."""
    def load(self) -> tuple[int, int]:
        """Requests that wait, and requests in the engine."""
    def close(self) -> None:
        """Closes the port."""

def port(queue: int = 256) -> tuple[Doors, Port]:
    """A port with both its sides."""
