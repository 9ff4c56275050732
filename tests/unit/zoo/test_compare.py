"""The zoo's comparison: what differs is wrong, and nothing else is."""

import copy
import math
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.unit.zoo.made_answers import answers
from zoo.compare import TOLERANCE, Answers, compare, compare_rounded, rounding, says_little
from zoo.requests import TOP


def test_equal_answers_agree() -> None:
    found = compare(answers(), answers())
    assert found.wrong is None
    assert found.difference == 0.0
    assert found.ties == ()
    assert found.tokens == 24


def test_differences_within_the_tolerance_are_reported_not_wrong() -> None:
    found = compare(answers(TOLERANCE / 2), answers())
    assert found.wrong is None
    assert found.difference == pytest.approx(TOLERANCE / 2)


@given(
    place=st.sampled_from(["one", "two"]), step=st.integers(0, 11), by=st.floats(2 * TOLERANCE, 1.0)
)
def test_one_logprob_off_is_wrong(place: str, step: int, by: float) -> None:
    ours = answers()
    ours[place]["logprobs"][step] += by
    found = compare(ours, answers())
    assert found.wrong is not None
    assert f"{place}: token {step}" in found.wrong


@pytest.mark.parametrize("change", [float("nan"), float("inf"), -float("inf")])
def test_a_logprob_that_is_no_number_is_wrong(change: float) -> None:
    ours = answers()
    ours["two"]["top"][3][1][1] = change
    assert compare(ours, answers()).wrong is not None


def test_another_token_of_another_distribution_is_wrong() -> None:
    ours = answers()
    ours["one"]["tokens"][4] = 400
    ours["one"]["top"][4] = [[400, -0.5], [4, -1.0], [401, -3.0]]
    found = compare(ours, answers())
    assert found.wrong is not None
    assert "one: token 4 is 400, not 4" in found.wrong


def drawn_otherwise(*requests: str) -> Answers:
    ours = answers()
    for name in requests:
        ours[name]["tokens"][4:] = [400] * 8
        ours[name]["logprobs"][4:] = [-2.0] * 8
    return ours


def test_one_tie_ends_the_comparison_of_its_request() -> None:
    found = compare(drawn_otherwise("one"), answers())
    assert found.wrong is None
    assert len(found.ties) == 1
    assert found.tokens == 4 + 12


def test_two_tied_tokens_in_one_answer_are_wrong() -> None:
    assert compare(drawn_otherwise("one", "two"), answers()).wrong is not None


@pytest.mark.parametrize(
    "change", [{"requests": ("one",)}, {"requests": ("one", "three")}, {"tokens": 11}], ids=str
)
def test_other_requests_and_fewer_tokens_are_wrong(change: dict[str, Any]) -> None:
    assert compare(answers(**change), answers()).wrong is not None


def test_constant_answers_are_noticed() -> None:
    same = answers()
    for answer in same.values():
        answer["tokens"] = [7] * 12
    flat = copy.deepcopy(answers())
    for answer in flat.values():
        answer["top"] = [[[1, -6.2], [2, -6.2]]] * 12
    broken = answers(float("nan"))
    assert says_little(answers()) is None
    assert [says_little(one) is None for one in (same, flat, broken)] == [False] * 3


def test_tokens_that_are_drawn_from_outside_the_likeliest_are_a_tie() -> None:
    """They are of other places in the two distributions."""

    def drawn(token: int, logprob: float) -> dict[str, Any]:
        likeliest = [[place, -1.0 - place] for place in range(TOP)]
        top = [*likeliest, [token, logprob]]
        return {"a": {"tokens": [token], "logprobs": [logprob], "top": [top]}}

    comparison = compare(drawn(7, -9.0), drawn(8, -12.0))
    assert comparison.wrong is None
    assert len(comparison.ties) == 1


def test_rounding_is_the_root_mean_square_of_all_logprobs() -> None:
    ours = answers()
    ours["one"]["logprobs"][3] += 0.24
    ours["two"]["logprobs"][5] -= 0.24
    assert rounding(ours, answers()) == pytest.approx(0.24 / 12**0.5)
    assert compare_rounded(ours, answers(), 0.07).wrong is None
    assert "beyond" in str(compare_rounded(ours, answers(), 0.06).wrong)


def test_other_forced_tokens_or_no_numbers_are_infinitely_far() -> None:
    other, no_number = answers(), answers()
    other["one"]["tokens"][2] = 400
    no_number["two"]["logprobs"][0] = math.nan
    assert rounding(other, answers()) == math.inf
    assert rounding(no_number, answers()) == math.inf
    assert compare_rounded(no_number, answers(), 9.0).wrong is not None
