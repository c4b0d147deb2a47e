"""Prompts that begin like earlier ones, over every engine that batches: who may start from what, and that it changes no answer."""

from __future__ import annotations

from cases import Case, prompt
from fakeport import Admit, Cancel, FakePort, Forget, Sampling

FOREVER = 1000
"""Pushes between requests that follow one another: the port hands the next one over when the engine is idle."""


def follow(case: Case, *requests: Admit, **settings: int) -> FakePort:
    """Requests, each after the answer to the one before."""
    port = FakePort()
    for at, request in enumerate(requests):
        port.at(at * FOREVER, request)
    case.run(port, **settings)
    assert port.reason is None and port.failures == {}
    return port


def cold(case: Case, tokens: list[int], limit: int, sampling: Sampling | None = None) -> list[int]:
    """The answer of an engine that keeps nothing."""
    port = case.run(FakePort().at(0, Admit(1, tokens, limit, sampling)), cache_bytes=0)
    assert port.cached == {}
    return port.answers[1]


def test_the_same_prompt_again_is_read_from_its_last_token_on(batching_case: Case) -> None:
    tokens = prompt(1, 150)
    port = follow(batching_case, Admit(1, tokens, 20), Admit(2, tokens, 20))
    assert port.cached == {2: 150 - batching_case.read_again}
    assert port.answers[2] == port.answers[1] == cold(batching_case, tokens, 20)


def test_the_next_turn_starts_after_the_last_answer(batching_case: Case) -> None:
    first = prompt(3, 70)
    second = first + cold(batching_case, first, 30) + prompt(13, 8)
    third = second + cold(batching_case, second, 30) + prompt(23, 8)
    port = follow(batching_case, Admit(1, first, 30), Admit(2, second, 30), Admit(3, third, 30))
    # The last token of an answer has not been through the model.
    assert port.cached == {2: 70 + 29, 3: 108 + 29}
    assert port.answers[3] == cold(batching_case, third, 30)


def test_without_a_budget_nothing_is_kept(batching_case: Case) -> None:
    tokens = prompt(1, 150)
    port = follow(batching_case, Admit(1, tokens, 20), Admit(2, tokens, 20), cache_bytes=0)
    assert port.cached == {}
    assert port.answers[2] == port.answers[1]


def test_two_salts_share_nothing(batching_case: Case) -> None:
    tokens = prompt(1, 150)
    port = follow(
        batching_case,
        Admit(1, tokens, 5),
        Admit(2, tokens, 5, salt="a"),
        Admit(3, tokens, 5, salt="a"),
        Admit(4, tokens, 5),
    )
    again = 150 - batching_case.read_again
    assert port.cached == {3: again, 4: again}


def test_a_request_starts_from_the_snapshot_it_names_and_no_other(batching_case: Case) -> None:
    first = prompt(3, 70)
    second = first + cold(batching_case, first, 30) + prompt(13, 8)
    port = follow(
        batching_case,
        Admit(1, first, 30, save_as=5),
        Admit(2, second, 30, start_from=5, save_as=6),
        Admit(3, second, 30, start_from=5),
        Admit(4, second, 30, start_from=99),
        Admit(5, second, 30, start_from=5, salt="a"),
    )
    assert port.cached == {2: 99, 3: 99}, "and not what the second request left"
    assert all(port.answers[id] == cold(batching_case, second, 30) for id in (2, 3, 4, 5))


def test_an_answer_of_one_token_makes_its_snapshot(batching_case: Case) -> None:
    tokens = prompt(4, 30)
    port = follow(batching_case, Admit(1, tokens, 1, save_as=5), Admit(2, [*tokens, 9, 9], 3, start_from=5))
    assert port.cached == {2: 30}
    assert port.answers[2] == cold(batching_case, [*tokens, 9, 9], 3)


def test_a_cancelled_request_makes_no_snapshot_of_its_name(batching_case: Case) -> None:
    tokens = prompt(4, 30)
    port = FakePort().at(0, Admit(1, tokens, 100, save_as=5)).at(9, Cancel(1))
    port.at(FOREVER, Admit(2, [*tokens, 9, 9], 3, start_from=5))
    batching_case.run(port)
    assert port.cached == {}


def test_a_forgotten_snapshot_serves_no_request_that_names_it(batching_case: Case) -> None:
    tokens = prompt(4, 30)
    port = FakePort().at(0, Admit(1, tokens, 9, save_as=5)).at(FOREVER, Forget(5), Forget(6))
    port.at(FOREVER, Admit(2, [*tokens, 9, 9], 3, start_from=5)).at(2 * FOREVER, Admit(3, tokens, 3))
    batching_case.run(port)
    assert port.cached == {3: 30 - batching_case.read_again}


def test_a_seed_draws_the_same_answer_from_a_prompt_that_is_kept(batching_case: Case) -> None:
    tokens, hot = prompt(5, 100), Sampling(temperature=1.3, top_p=0.95, seed=11)
    port = follow(batching_case, Admit(1, tokens, 20), Admit(2, tokens, 20, hot))
    assert port.cached == {2: 100 - batching_case.read_again}
    assert port.answers[2] == cold(batching_case, tokens, 20, hot)


def test_a_prompt_that_is_cancelled_while_it_is_read_leaves_what_was_read(batching_case: Case) -> None:
    tokens = prompt(8, 200)
    port = FakePort().at(0, Admit(1, tokens, 5)).leave(1, 1).at(FOREVER, Admit(2, tokens, 20))
    batching_case.run(port)
    assert port.cached == {2: 128}
    assert port.answers[2] == cold(batching_case, tokens, 20)
