"""The benchmark of speculation, (h): an edit, where an answer repeats most of its prompt, and ordinary chat, with speculation and without.

Both are asked of one server: ours as by default, the peer with `generation_mode: ar`, which turns speculation off for
the request.
"""

from __future__ import annotations

import difflib
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import partial

from harness import BenchError, Tools, http_server
from items import Figures, Options, Row, alternate, compare
from prefix_items import post

TEXT = (
    "Northport is a small town at the mouth of the river Lune. It was founded by fishermen who came from the islands in "
    "the west. For two hundred years the town lived from herring, and at the height of the trade more than three "
    "hundred boats lay in the harbour. The stone pier was built in 1788 and the lighthouse at its end in 1802. The lamp "
    "was lit by hand every evening until 1931, when electricity came to the town. In 2003 the pier was repaired. Today "
    "about nine thousand people live in Northport. Most of them work in the hospital, in the two schools, or in the "
    "boatyard, which builds small wooden boats for customers all over Europe. A festival is held in the first week of "
    "August every year, with music on the pier, a race of rowing boats, a market in the old fish hall. The museum of "
    "the town is in the former customs house. It shows tools, maps, paintings, and the first lamp of the lighthouse. In "
    "winter the town is quiet. In spring the boats are pulled up on the shore, and the fishermen mend their nets in the "
    "long wooden sheds behind the pier. In the evening they meet in the tavern at the market square, where a fire burns "
    "in the chimney and the oldest of them tell stories of the great storm in 1881 which took the roof of the church "
    "and threw eleven boats onto the road."
)
"""Some 300 tokens. The default model gives it back with a comma or a clause of its own in a few places."""

EDIT = f"Repeat the following text word for word.\n\n{TEXT}"

QUESTIONS = (
    "What is the capital of France, and what is it known for?",
    "Write a short story about a lighthouse keeper who finds a message in a bottle.",
    "Explain to a ten year old how plants make sugar from light.",
    "Give me five tips to sleep better.",
    "Write a python function that checks whether a number is prime, and explain it.",
    "What are the differences between cats and dogs as pets?",
    "Write an email to my landlord about a tap that leaks.",
    "Why is the sky blue?",
)

LONGEST = 128
"""Tokens of a chat answer, at most."""


def answer(address: str, model: str, text: str, mode: str | None, **fields: object) -> Figures:
    """The response to one message; `mode` is its `generation_mode`."""
    return post(address, {"model": model, "input": text, "generation_mode": mode, **fields})


def edit(address: str, model: str, mode: str | None) -> Figures:
    """The text given back, and in how many places it was changed."""
    response = answer(address, model, EDIT, mode, temperature=0, max_output_tokens=400)
    said = response["output"][0]["content"][0]["text"].split()
    matcher = difflib.SequenceMatcher(None, TEXT.split(), said, autojunk=False)
    changes = sum(kind != "equal" for kind, *_ in matcher.get_opcodes())
    return {"usage": response["usage"], "text": said, "changes": changes}


def chat(address: str, model: str, clients: int, mode: str | None) -> Figures:
    """Every question answered, by so many clients at once: tokens a second over all."""
    start = time.perf_counter()
    with ThreadPoolExecutor(clients) as pool:
        ask = partial(answer, address, model, mode=mode, temperature=0.7, seed=7, max_output_tokens=LONGEST)
        responses = list(pool.map(ask, QUESTIONS))
    tokens = sum(response["usage"]["output_tokens"] for response in responses)
    return {"rate": tokens / (time.perf_counter() - start), "tokens": tokens}


def speculation(tools: Tools, options: Options) -> Iterator[Row]:
    """(h) Speculation: decode of an edit and of ordinary chat, against the same server with `generation_mode: ar`."""
    serve = [*tools.emberd, "serve", "--model", options.model, "--engine", "onnx"]
    serve += ["--threads", str(options.threads), "--port", "0"]
    with http_server(serve) as address:
        task = partial(edit, address, options.model)
        task("ar")  # The prompt is read once; what follows starts from what is kept of it, in both modes.
        pairs = alternate(options.rounds, partial(task, None), partial(task, "ar"))
        if any(pair[0]["text"] != pair[1]["text"] for pair in pairs):
            raise BenchError("the edit reads otherwise with speculation than without")
        usage, changes = pairs[0][0]["usage"], pairs[0][0]["changes"]
        yield Row(
            "an edit: tokens of the answer, and places that were changed", str(usage["output_tokens"]), str(changes)
        )
        yield compare(
            "an edit: decode", pairs, lambda each: each["usage"]["decode_tokens_per_second"], "tok/s", least=2.0
        )
        for clients in (1, 8):
            talk = partial(chat, address, options.model, clients)
            talk("ar")
            pairs = alternate(options.rounds, partial(talk, None), partial(talk, "ar"))
            what = f"chat, {clients} client{'s' if clients > 1 else ''}"
            yield compare(what, pairs, lambda each: each["rate"], "tok/s", least=0.97)
