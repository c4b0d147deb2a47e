"""The extension module, as the engines see it. The contract is in `docs/port.md`."""

from collections.abc import Sequence
from typing import final

class PortError(Exception):
    """A call on the port that the contract does not allow at this point."""

@final
class Sampling:
    """How one request draws its tokens. Greedy requests have `None` in its place."""

    def __new__(cls, temperature: float, top_p: float, top_k: int, seed: int) -> Sampling: ...
    @property
    def temperature(self) -> float:
        """Above 0."""
    @property
    def top_p(self) -> float:
        """The probability mass of the nucleus, in (0, 1]; 1 keeps everything."""
    @property
    def top_k(self) -> int:
        """How many candidates are kept; 0 keeps all."""
    @property
    def seed(self) -> int:
        """An unsigned 64-bit integer."""

@final
class Admit:
    """A new request."""

    def __new__(cls, id: int, prompt: list[int], max_tokens: int, sampling: Sampling | None) -> Admit: ...
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
        """`None` for greedy decoding."""

@final
class Cancel:
    """Nobody reads this request any more."""

    def __new__(cls, id: int) -> Cancel: ...
    @property
    def id(self) -> int:
        """The request to forget."""

@final
class Capabilities:
    """What a loaded model can do."""

    def __new__(cls, context_length: int, max_batch: int, vocab_size: int, eos_ids: Sequence[int]) -> Capabilities: ...
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

@final
class Settings:
    """What the user asked for; `None` leaves the choice to the engine."""

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
    def spin(self) -> bool | None:
        """Whether idle threads of a pass wait by spinning."""

@final
class Port:
    """An engine's side of the port."""

    def ready(self, capabilities: Capabilities) -> None: ...
    def wait(self) -> list[Admit | Cancel] | None: ...
    def poll(self) -> list[Admit | Cancel] | None: ...
    def push(self, steps: list[tuple[int, list[int], str | None]]) -> list[int]: ...
    def fail(self, id: int | None, message: str) -> None: ...

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
