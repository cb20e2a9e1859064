"""Acceptance compares every token and every character, and names the first that differs."""

from __future__ import annotations

import pytest

from coldsnap.core.messages import Answer, Prompt
from coldsnap.errors import AcceptanceFailed
from coldsnap.ops.acceptance import check_answers

PROMPTS = (Prompt(text="one", max_tokens=3), Prompt(text="two", max_tokens=3))
ANSWERS = (Answer(token_ids=(1, 2, 3), text="abc"), Answer(token_ids=(4, 5, 6), text="def"))


def test_equal_answers_pass() -> None:
    check_answers(PROMPTS, ANSWERS, ANSWERS)


@pytest.mark.parametrize(
    ("given", "prompt", "token"),
    [
        ((Answer(token_ids=(1, 9, 3), text="abc"), ANSWERS[1]), 0, 1),
        ((ANSWERS[0], Answer(token_ids=(9, 5, 6), text="def")), 1, 0),
        ((Answer(token_ids=(1, 2, 3), text="abC"), ANSWERS[1]), 0, 3),
        ((Answer(token_ids=(1, 2), text="ab"), ANSWERS[1]), 0, 2),
        ((Answer(token_ids=(1, 2, 3, 4), text="abcd"), ANSWERS[1]), 0, 3),
        ((Answer(token_ids=(), text=""), Answer(token_ids=(), text="")), 0, 0),
    ],
    ids=["one token", "later prompt", "text alone", "shorter", "longer", "nothing"],
)
def test_the_first_difference_is_named(given: tuple[Answer, ...], prompt: int, token: int) -> None:
    with pytest.raises(AcceptanceFailed, match=rf"prompt {prompt} .* from token {token} on") as caught:
        check_answers(PROMPTS, ANSWERS, given)
    assert caught.value.facts == {
        "prompt": PROMPTS[prompt].text,
        "expected_token_ids": list(ANSWERS[prompt].token_ids),
        "given_token_ids": list(given[prompt].token_ids),
    }


def test_nothing_to_compare_is_no_pass() -> None:
    with pytest.raises(AcceptanceFailed, match="no acceptance answers"):
        check_answers((), (), ())


@pytest.mark.parametrize(("expected", "given"), [(ANSWERS[:1], ANSWERS), (ANSWERS, ANSWERS[:1])])
def test_answers_that_do_not_pair_up_are_no_pass(expected: tuple[Answer, ...], given: tuple[Answer, ...]) -> None:
    with pytest.raises(AcceptanceFailed, match="do not pair up"):
        check_answers(PROMPTS, expected, given)
