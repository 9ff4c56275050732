"""The comparison of tokens between layouts."""

from __future__ import annotations

from flying_lab.demo import tokens
from flying_lab.demo.tokens import ANSWER_TOKENS, PROMPT_TOKENS

RIGHT = [list(range(number, number + ANSWER_TOKENS)) for number in range(len(PROMPT_TOKENS))]


def test_the_same_tokens_in_each_layout_are_right() -> None:
    assert tokens.wrong({"1+1": RIGHT, "2": RIGHT}) == []


def test_another_token_in_a_layout_is_wrong() -> None:
    other = [*RIGHT[:-1], [*RIGHT[-1][:-1], 999]]
    (problem,) = tokens.wrong({"1+1": RIGHT, "2": other})
    assert problem.startswith(f"layout 2, prompt of {PROMPT_TOKENS[-1]} tokens: ")


def test_a_missing_token_is_wrong_in_every_layout() -> None:
    short = [RIGHT[0][:-1], *RIGHT[1:]]
    assert len(tokens.wrong({"1+1": short, "2": short})) == 2


def test_the_sentence_names_layouts_and_tokens() -> None:
    line = tokens.line({"1+1": RIGHT, "2": RIGHT})
    assert "in the layouts 1+1, 2" in line
    assert f"all {len(PROMPT_TOKENS) * ANSWER_TOKENS} tokens" in line
