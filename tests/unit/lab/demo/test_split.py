"""What the demo says of its split request, and what it takes for wrong."""

from __future__ import annotations

from dataclasses import replace

import pytest

from flying_lab.demo.layouts import FLAGS
from flying_lab.demo.split import ANSWER_TOKENS, NEXT_TOKENS, PROMPT_TOKENS, Seen, body

TIMES_S = [0.01 * number for number in range(ANSWER_TOKENS)]
GOOD = Seen(first=0, second=1, next_on=0, token_s=TIMES_S, begun=1)


def test_a_split_is_told_in_one_sentence() -> None:
    slow = [*TIMES_S[:-1], TIMES_S[-2] + 0.0234]
    line = replace(GOOD, token_s=slow).line
    assert "engine 0 read its prompt of 1000 tokens" in line
    assert "engine 1 wrote the answer, at most 23 ms from word to word" in line
    assert "engine 0 was already busy with the next long prompt" in line
    assert GOOD.wrong == []


@pytest.mark.parametrize(
    ("seen", "expected"),
    [
        (replace(GOOD, token_s=TIMES_S[1:]), "47 of 48 tokens came"),
        (
            replace(GOOD, begun=0, first=None, second=None, next_on=None),
            "0 splits, 0 undone, None and None",
        ),
        (replace(GOOD, undone=1), "1 splits, 1 undone"),
        (replace(GOOD, second=0), "0 and 0"),
        (replace(GOOD, next_on=2), "the next prompt is on engine 2, not 0"),
    ],
)
def test_a_split_that_did_not_happen_as_told_is_wrong(seen: Seen, expected: str) -> None:
    (problem,) = seen.wrong
    assert expected in problem


def test_both_prompts_fit_and_have_no_first_block_in_common() -> None:
    """Else the next one would have its beginning from the prefix cache, and take no time."""
    (most,) = [int(flag.partition("=")[2]) for flag in FLAGS if flag.startswith("--max-model-len=")]
    first, following = (body("m", tokens, 8)["prompt"] for tokens in (PROMPT_TOKENS, NEXT_TOKENS))
    assert len(following) == NEXT_TOKENS < most and len(first) == PROMPT_TOKENS
    assert first[:32] != following[:32]
