"""A draft model beside the large one: answers are the same with and without it, and come in fewer steps where it guesses right."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

import tiny_mlx
from cases import Case, prompt
from emberd import loop
from emberd.mlx_draft import AHEAD
from fakeport import Admit, Cancel, FakePort, Launch, Sampling, Settings
from test_controls import CONTROLS

FOREVER = 1000


def case_of(folder: Path) -> Case:
    return Case("mlx", "mlx", lambda folder, _: folder, long=230, folder=folder)


@pytest.fixture(scope="module")
def plain(tmp_path_factory: pytest.TempPathFactory) -> Case:
    """The model without a draft."""
    return case_of(tiny_mlx.build(tmp_path_factory.mktemp("plain"), eos=[]))


@pytest.fixture(scope="module", params=["right", "wrong"])
def drafted(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Case:
    """The model with a draft that always guesses right, being the same, or nearly never, being another."""
    folder = tiny_mlx.build(tmp_path_factory.mktemp("drafted"), eos=[])
    tiny_mlx.build(folder / "draft", seed=0 if request.param == "right" else 5, eos=[])
    return replace(case_of(folder), name=request.param)


def ids(port: FakePort, id: int) -> list[int]:
    """How many tokens each push brought."""
    return [len(step[1]) for steps in port.pushes for step in steps if step[0] == id]


def test_answers_are_those_without_a_draft(plain: Case, drafted: Case) -> None:
    for seed, sampling in enumerate((None, *CONTROLS.values())):
        if sampling is not None:
            bias = {token % 320: value for token, value in sampling.logit_bias.items()}
            sampling = replace(sampling, logit_bias=bias, top_logprobs=3 if seed % 2 else None)
        order = Admit(1, prompt(seed, 3 + 5 * seed), 30, sampling)
        ports = [case.run(FakePort().at(0, order)) for case in (plain, drafted)]
        assert ports[0].answers == ports[1].answers
        assert ports[0].finishes == ports[1].finishes == {1: "length"}
        told = [[one for one, _ in port.logprobs.get(1, [])] for port in ports]
        assert told[0] == pytest.approx(told[1], abs=1e-4)


def test_right_guesses_come_together(drafted: Case) -> None:
    port = drafted.run(FakePort().at(0, Admit(1, prompt(1, 20), 41)))
    if drafted.name == "right":
        assert ids(port, 1) == [1] + [AHEAD + 1] * 10
    else:
        assert sum(ids(port, 1)) == 41 and ids(port, 1).count(1) > 20


@pytest.mark.parametrize(("most", "expected"), [(0, [1] * 13), (1, [1] + [2] * 6), (7, [1, 8, 4])])
def test_no_more_is_guessed_than_the_request_allows(most: int, expected: list[int], drafted: Case) -> None:
    port = drafted.run(FakePort().at(0, Admit(1, prompt(1, 20), 13, speculation=most)))
    assert drafted.name == "wrong" or ids(port, 1) == expected
    assert max(ids(port, 1)) <= most + 1


def test_an_eos_id_ends_an_answer_among_guesses(plain: Case, drafted: Case, tmp_path: Path) -> None:
    whole = plain.single(prompt(3, 12), 30)
    for place in range(1, 9):
        folder = tiny_mlx.build(tmp_path / str(place), eos=[whole[place]])
        (folder / "draft").symlink_to(drafted.folder / "draft")
        port = case_of(folder).run(FakePort().at(0, Admit(1, prompt(3, 12), 30)))
        assert port.answers[1] == whole[: whole.index(whole[place]) + 1]
        assert port.finishes == {1: "stop"}


def test_others_join_and_leave_an_answer_that_is_guessed(plain: Case, drafted: Case) -> None:
    port = FakePort().at(0, Admit(1, prompt(1, 9), 120)).at(5, Admit(2, prompt(2, 200), 4))
    port.at(9, Admit(3, prompt(3, 5), 60)).at(14, Cancel(3)).at(18, Admit(4, prompt(4, 8), 6, Sampling(seed=4)))
    drafted.run(port)
    assert port.reason is None and port.failures == {}
    assert port.answers[1] == plain.single(prompt(1, 9), 120)
    assert port.answers[2] == plain.single(prompt(2, 200), 4)
    assert port.answers[4] == plain.single(prompt(4, 8), 6, Sampling(seed=4))
    assert max(ids(port, 1)) > 1 or drafted.name == "wrong"


def test_what_is_kept_of_a_guessed_answer_is_what_was_said(plain: Case, drafted: Case) -> None:
    first = prompt(3, 70)
    turn = first + plain.single(first, 30) + prompt(13, 8)
    port = FakePort().at(0, Admit(1, first, 30, save_as=5)).at(FOREVER, Admit(2, turn, 30, start_from=5))
    drafted.run(port)
    assert port.cached == {2: 99}
    assert port.answers[2] == plain.single(turn, 30)


def test_a_long_prompt_is_read_by_the_draft_in_chunks(plain: Case, drafted: Case) -> None:
    port = drafted.run(FakePort().at(0, Admit(1, prompt(1, 200), 20)), prefill_chunk=40)
    assert ids(port, 1)[:5] == [1] * 5, "it does not guess before it has read all"
    assert port.answers[1] == plain.single(prompt(1, 200), 20)


@pytest.mark.parametrize(
    ("config", "draft", "said"),
    [
        (tiny_mlx.LLAMA, tiny_mlx.MAMBA, "a model with recurrent layers or sliding windows can take back no guess"),
        (tiny_mlx.SLIDING, tiny_mlx.LLAMA, "a model with recurrent layers or sliding windows can take back no guess"),
        (
            tiny_mlx.LLAMA,
            tiny_mlx.OTHERS["qwen2"] | {"vocab_size": 100},
            "has a vocabulary of 100, and its model one of 320",
        ),
    ],
)
def test_a_draft_that_cannot_guess_for_the_model_is_refused(
    config: dict[str, object], draft: dict[str, object], said: str, tmp_path: Path
) -> None:
    tiny_mlx.build(tiny_mlx.build(tmp_path / "model", config) / "draft", draft)
    port = FakePort()
    loop.run(Launch("mlx", str(tmp_path / "model"), Settings(), port))
    assert port.reason is not None and "hint: remove" in port.reason
    assert said in port.reason
