"""Answers under a constraint: what they may say, alone and in a batch, whatever draws them."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import jsonschema
import numpy as np
import pytest
from numpy.typing import NDArray

import tiny
import words
from cases import CASES, Case, prompt
from emberd import _core
from fakeport import Admit, Cancel, FakePort, Sampling

if not hasattr(_core, "constraint"):
    pytest.skip("the extension module is not built", allow_module_level=True)

from emberd.constrain import Held
from emberd.sampling import Room, highest
from plain import adjusted, kept

SCHEMA = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 5},
        "on": {"type": "boolean"},
        "size": {"type": "integer", "minimum": -20, "maximum": 300},
        "tags": {"type": "array", "items": {"enum": ["red", "blue"]}, "maxItems": 3},
    },
    "required": ["name", "on", "size", "tags"],
    "additionalProperties": False,
}
LONG = "names are a thing of the past"
CONTROLS = [
    None,
    Sampling(1.0, seed=1),
    Sampling(2.0, top_p=0.7, seed=2),
    Sampling(1.5, top_k=5, seed=3),
    Sampling(1.0, min_p=0.2, seed=4),
    Sampling(1.0, top_k=300, seed=5),
    Sampling(1.0, seed=6, repetition_penalty=1.3, presence_penalty=0.5, frequency_penalty=0.5),
    Sampling(0.0, seed=7, logit_bias={words.FIRST_BYTE + ord("b"): 30.0, tiny.EOS: 100.0}),
    Sampling(1.0, seed=8, top_logprobs=3),
]


@pytest.fixture(scope="module", params=CASES[1:], ids=lambda case: case.name)
def held(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Case:
    """Each engine with a model, on a tiny one with an eos and a tokenizer."""
    case = request.param
    folder = words.build(tmp_path_factory.mktemp("held"))
    return replace(case, folder=case.build(folder, [tiny.EOS]))


@pytest.fixture
def compiled(held: Case) -> Callable[[str, object], Any]:
    """What a door makes of a grammar for this model."""

    def compile(syntax: str, definition: object) -> Any:
        text = definition if isinstance(definition, str) else json.dumps(definition)
        return _core.constraint(str(held.folder), tiny.VOCAB, [tiny.EOS], syntax, text)

    return compile


def test_every_answer_validates_whatever_draws_it(held: Case, compiled: Callable[[str, object], Any]) -> None:
    for seed in range(6):
        for at, sampling in enumerate(CONTROLS):
            asked = None if sampling is None else replace(sampling, seed=seed * 100 + at)
            port = held.run(FakePort().at(0, Admit(1, prompt(seed, 9), 120, asked, compiled("json_schema", SCHEMA))))
            assert port.finishes == {1: "stop"}, (seed, sampling)
            assert port.answers[1][-1] == tiny.EOS
            jsonschema.validate(json.loads(words.text(port.answers[1])), SCHEMA)


@pytest.mark.parametrize("syntax", ["regex", "lark"])
def test_a_text_is_of_its_grammar(syntax: str, held: Case, compiled: Callable[[str, object], Any]) -> None:
    definition = {
        "regex": "[a-c]{2,6}(-[0-9]{1,9})?!",
        "lark": 'start: /[a-c]{2,6}/ ("-" NUMBER)? "!"\nNUMBER: /[0-9]{1,9}/',
    }[syntax]
    for seed in range(5):
        port = held.run(
            FakePort().at(0, Admit(1, prompt(seed, 5), 100, Sampling(1.0, seed=seed), compiled(syntax, definition)))
        )
        assert re.fullmatch(r"[a-c]{2,6}(-[0-9]{1,9})?!", words.text(port.answers[1]))
        assert port.finishes == {1: "stop"}


def test_rows_of_a_batch_say_what_they_say_alone(held: Case, compiled: Callable[[str, object], Any]) -> None:
    def requests() -> list[Admit]:
        made = []
        for at, sampling in enumerate(CONTROLS, 1):
            constraint = compiled("json_schema", SCHEMA) if at % 3 != 1 else None
            made.append(Admit(at, prompt(at, 7 * at), 60, sampling, constraint))
        made.append(Admit(50, prompt(50, 6), 60, None, compiled("regex", f"(a|b){LONG}[0-9]")))
        return made

    alone = {each.id: held.run(FakePort().at(0, each)) for each in requests()}
    port = FakePort()
    for step, each in enumerate(requests()):
        port.at(3 * step, each)
    held.run(port, max_batch=5)
    for id, single in alone.items():
        assert port.answers[id] == single.answers[id], id
        assert port.finishes[id] == single.finishes[id], id
        own = [[logprob for logprob, _ in each.logprobs.get(id, [])] for each in (port, single)]
        assert own[0] == pytest.approx(own[1], rel=1e-3), id  # caches of half precision, sums in another order


def test_one_that_is_cancelled_leaves_the_others_as_they_are(
    held: Case, compiled: Callable[[str, object], Any]
) -> None:
    def two() -> tuple[Admit, Admit]:
        first = Admit(1, prompt(1, 9), 120, Sampling(1.0, seed=1), compiled("json_schema", SCHEMA))
        return first, Admit(2, prompt(2, 9), 120, Sampling(1.0, seed=2), compiled("json_schema", SCHEMA))

    alone = held.run(FakePort().at(0, two()[1]))
    port = held.run(FakePort().at(0, *two()).at(6, Cancel(1)))
    assert 1 not in port.finishes
    assert port.answers[2] == alone.answers[2]


def test_what_is_certain_takes_one_pass(held: Case, compiled: Callable[[str, object], Any]) -> None:
    port = held.run(FakePort().at(0, Admit(1, prompt(1, 5), 100, None, compiled("regex", f"(a|b){LONG}[0-9]!"))))
    assert re.fullmatch(f"[ab]{LONG}[0-9]!", words.text(port.answers[1]))
    assert port.finishes == {1: "stop"}
    longest = max(len(tokens) for push in port.pushes for _, tokens, *_ in push)
    assert longest > 10
    assert sum(bool(push) for push in port.pushes) < 8


def test_what_is_certain_comes_token_by_token_where_each_is_told(
    held: Case, compiled: Callable[[str, object], Any]
) -> None:
    def ask(top: int | None) -> FakePort:
        asked = Sampling(0.0, top_logprobs=top)
        return held.run(FakePort().at(0, Admit(1, prompt(1, 5), 100, asked, compiled("regex", f"(a|b){LONG}[0-9]!"))))

    told, plain = ask(2), ask(None)
    assert told.answers == plain.answers
    assert len(told.logprobs[1]) == len(told.answers[1])
    assert any(logprob < -1.0 for logprob, _ in told.logprobs[1])  # the model's own, not those of what is left


@pytest.mark.parametrize("limit", [1, 2, 3, 7, 20])
def test_the_limit_holds_within_what_is_certain(limit: int, held: Case, compiled: Callable[[str, object], Any]) -> None:
    whole = held.run(FakePort().at(0, Admit(1, prompt(1, 5), 100, None, compiled("regex", f"(a|b){LONG}[0-9]!"))))
    port = held.run(FakePort().at(0, Admit(1, prompt(1, 5), limit, None, compiled("regex", f"(a|b){LONG}[0-9]!"))))
    assert port.answers[1] == whole.answers[1][:limit]
    assert port.finishes == {1: "length"}


def test_the_penalties_know_what_was_certain(held: Case, compiled: Callable[[str, object], Any]) -> None:
    # Of two letters the one that has not come is due, however little the model likes it.
    for letter, other in ("ab", "ba"):
        asked = Sampling(0.0, presence_penalty=2.0, frequency_penalty=2.0, repetition_penalty=5.0)
        asked = replace(asked, logit_bias={words.FIRST_BYTE + ord(letter): 20.0, words.FIRST_BYTE + ord(other): 20.0})
        constraint = compiled("regex", f"x{letter * 30}[ab]")
        port = held.run(FakePort().at(0, Admit(1, prompt(3, 5), 60, asked, constraint)))
        assert words.text(port.answers[1])[-1] == other


def test_the_next_turn_starts_from_an_answer_with_certain_tokens(
    held: Case, compiled: Callable[[str, object], Any]
) -> None:
    first = prompt(1, 70)

    def ask() -> Admit:
        return Admit(1, first, 120, None, compiled("regex", f"(a|b){LONG}{LONG}{LONG}[0-9]!"))

    answer = held.run(FakePort().at(0, ask())).answers[1]
    following = [*first, *answer, *prompt(9, 5)]
    port = held.run(FakePort().at(0, ask()).at(60, Admit(2, following, 20, Sampling(1.0, seed=4))))
    # Recurrent states of an ONNX graph are not kept.
    assert port.cached.get(2, 0) >= 128 or (held.engine, held.name[-7:]) == ("onnx", "-hybrid")
    assert port.answers[2] == held.single(following, 20, Sampling(1.0, seed=4))


class Broken:
    """A constraint that cannot go on after some tokens."""

    complete = False

    def __init__(self, after: int) -> None:
        self.left = after

    def forced(self) -> list[int]:
        return []

    def mask(self) -> bytes:
        if self.left == 0:
            raise ValueError("the grammar cannot go on: too complex")
        return b"\xff" * 40

    def accept(self, token: int) -> None:
        self.left -= 1


@pytest.mark.parametrize("after", [0, 3])
def test_a_constraint_that_cannot_go_on_fails_its_own_request(after: int, held: Case) -> None:
    asked = Sampling(0.0, logit_bias={tiny.EOS: -100.0})
    alone = held.single(prompt(2, 5), 12, asked)
    port = held.run(
        FakePort().at(0, Admit(1, prompt(1, 5), 12, asked, Broken(after)), Admit(2, prompt(2, 5), 12, asked))
    )
    assert "too complex" in port.failures[1]
    assert len(port.answers[1]) == after
    assert port.answers[2] == alone


def test_a_grammar_is_refused_with_the_reason(compiled: Callable[[str, object], Any]) -> None:
    for syntax, definition, reason in [
        ("json_schema", "{", "not JSON"),
        ("json_schema", {"not": {}}, "not"),
        ("regex", "(", "unclosed group"),
        ("lark", "start: nowhere", "nowhere"),
        ("xml", "", "xml"),
    ]:
        with pytest.raises(RuntimeError, match=reason):
            compiled(syntax, definition)


def test_a_constraint_refuses_what_is_not_allowed_and_stays_where_it_is(compiled: Callable[[str, object], Any]) -> None:
    constraint = compiled("regex", "(a|b)c")
    with pytest.raises(ValueError, match="not allowed"):
        constraint.accept(words.FIRST_BYTE + ord("c"))
    for letter in "ac":
        constraint.accept(words.FIRST_BYTE + ord(letter))
    assert constraint.complete and constraint.accepting() and constraint.forced() == []
    [end] = np.flatnonzero(np.unpackbits(np.frombuffer(constraint.mask(), np.uint8), bitorder="little"))
    assert end == tiny.EOS
    with pytest.raises(ValueError, match="not allowed"):
        constraint.accept(words.FIRST_BYTE)
    constraint.accept(tiny.EOS)


def reference(row: NDArray[np.float32], allowed: NDArray[np.bool_], sampling: Sampling) -> NDArray[np.float64]:
    """The probability of every token: the filters over what is allowed, nothing saved."""
    masked = np.where(allowed, row, -np.inf)
    ids = np.array([id for id in kept(masked, sampling) if allowed[id]])
    weights = np.exp((masked[ids] - masked[ids[0]]).astype(np.float64) / max(sampling.temperature, 1e-6))
    result = np.zeros(len(row))
    result[ids] = weights / weights.sum()
    return result


@pytest.mark.parametrize("count", [1, 3, 200, 2000, 4999])
@pytest.mark.parametrize("sampling", [each for each in CONTROLS if each is not None])
def test_the_share_of_each_draw_is_that_of_the_whole_row(count: int, sampling: Sampling) -> None:
    rng = np.random.Generator(np.random.PCG64(count))
    row = adjusted((rng.standard_normal(5000) * 3).astype(np.float32), replace(sampling, logit_bias={}), [1], [2])
    allowed = np.zeros(5000, np.bool_)
    allowed[rng.permutation(5000)[:count]] = True
    mask = np.packbits(np.pad(allowed, (0, -5000 % 32)), bitorder="little").tobytes()
    held = Held(SimpleNamespace(forced=list, accept=None, mask=lambda: mask))
    room, (values, ids) = Room(5000), highest(row)
    drawn = np.array([held.draw(values, ids, row, sampling, u, room) for u in (np.arange(4000) + 0.5) / 4000])
    share = np.bincount(drawn, minlength=5000) / 4000
    expected = reference(row, allowed, sampling)
    if sampling.temperature == 0:
        expected = (np.arange(5000) == np.argmax(np.where(allowed, row, -np.inf))).astype(float)
    assert allowed[drawn].all()
    # Each token's interval of the 4,000 is of its length to within one at either end.
    assert np.abs(share - expected).max() <= 2 / 4000


def test_a_constraint_crosses_the_port_as_the_requests_own_and_only_to_an_engine_that_keeps_it(
    compiled: Callable[[str, object], Any],
) -> None:
    constraint = compiled("regex", "ab|cd")
    for keeps in (False, True):
        doors, port = _core.port()
        port.ready(_core.Capabilities(64, 2, tiny.VOCAB, [tiny.EOS], constraints=keeps))
        if not keeps:
            with pytest.raises(RuntimeError, match="cannot hold an answer to a grammar"):
                doors.submit([8], 4, constraint=constraint)
            assert doors.load() == (0, 0)
            continue
        readers = [doors.submit([8], 4, constraint=constraint) for _ in range(2)]
        first, second = port.wait()
        first.constraint.accept(words.FIRST_BYTE + ord("a"))
        assert first.constraint.forced() == [words.FIRST_BYTE + ord("b")]  # the same one on every access
        second.constraint.accept(words.FIRST_BYTE + ord("c"))
        constraint.accept(words.FIRST_BYTE + ord("c"))
        del readers
        doors.close()
