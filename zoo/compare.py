"""Do two sets of answers say the same? Pure."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from zoo.requests import TOP

TOLERANCE = 1e-4
"""Largest difference of a logprob in float32. Lanes multiply with packed parts of matrices, in
another order.
"""
MOST_TIES = 1
"""A draw in which two tokens are closer than the rounding happens once in many models, not twice in
one.
"""

Answer = dict[str, Any]
"""Of one request: "tokens", "logprobs" (of each token) and "top" (per step: [[token, logprob],
...]).
"""
Answers = dict[str, Answer]


@dataclass(frozen=True)
class Comparison:
    """Two sets of answers to the same requests.

    Args:
        tokens: tokens compared.
        difference: the largest of a logprob among them; their root mean square where tokens were
            forced.
        ties: where another token was drawn from the same distribution, in words.
        wrong: where the answers part, in words; None if they agree.
    """

    tokens: int
    difference: float
    ties: tuple[str, ...]
    wrong: str | None


def compare(ours: Answers, theirs: Answers) -> Comparison:
    """Compare answers, request by request, up to the first token that differs.

    Tokens must be equal and logprobs within TOLERANCE. Where other tokens are drawn from
    distributions that agree, as the seed's noise has put two tokens closer together than the
    rounding, the request is compared up to there.
    """
    if ours.keys() != theirs.keys():
        return Comparison(0, 0.0, (), f"answers to {sorted(ours)}, not to {sorted(theirs)}")
    tokens, difference = 0, 0.0
    ties: list[str] = []
    for name, right in theirs.items():
        left = ours[name]
        if len(left["tokens"]) != len(right["tokens"]):
            wrong = f"{name}: {len(left['tokens'])} tokens, not {len(right['tokens'])}"
            return Comparison(tokens, difference, tuple(ties), wrong)
        for step, (mine, expected) in enumerate(zip(left["tokens"], right["tokens"], strict=True)):
            differences = _apart(left["top"][step], right["top"][step])
            if mine == expected:
                differences.append(abs(left["logprobs"][step] - right["logprobs"][step]))
            apart = _largest(differences)
            what = f"{name}: token {step}" + (
                f" is {mine}, not {expected}" if mine != expected else ""
            )
            if not apart <= TOLERANCE:  # NaN too
                return Comparison(
                    tokens, apart, tuple(ties), f"{what}; logprobs differ by {apart:.1e}"
                )
            difference = max(difference, apart)
            if mine != expected:
                ties.append(f"{what}, drawn from the same logprobs")
                break
            tokens += 1
    return Comparison(
        tokens, difference, tuple(ties), "; ".join(ties) if len(ties) > MOST_TIES else None
    )


def compare_rounded(ours: Answers, theirs: Answers, bound: float) -> Comparison:
    """Compare answers whose tokens were forced, by the root mean square of the differences of their
    logprobs.

    Args:
        bound: the largest that is right.
    """
    apart = rounding(ours, theirs)
    what = None if apart <= bound else f"logprobs differ by {apart:.1e}, beyond {bound:.1e}"
    return Comparison(sum(len(answer["tokens"]) for answer in theirs.values()), apart, (), what)


def rounding(ours: Answers, theirs: Answers) -> float:
    """Return the root mean square of the differences between the logprobs of forced tokens. Other
    tokens, or a logprob that is no number, are infinitely far apart.
    """
    if {name: answer["tokens"] for name, answer in ours.items()} != {
        name: answer["tokens"] for name, answer in theirs.items()
    }:
        return math.inf
    squares = [
        (left - right) ** 2
        for name, answer in theirs.items()
        for left, right in zip(ours[name]["logprobs"], answer["logprobs"], strict=True)
    ]
    mean = sum(squares) / len(squares)
    return math.inf if math.isnan(mean) else math.sqrt(mean)


def _apart(ours: Sequence[Sequence[float]], theirs: Sequence[Sequence[float]]) -> list[float]:
    """Differences between the likeliest tokens of two distributions, by place and by token."""
    count = min(len(ours), len(theirs), TOP)  # a token drawn that is not among them is one more
    mine, expected = ([p for p, _ in _by_logprob(top)][:count] for top in (ours, theirs))
    known = {int(token): p for token, p in ours}
    pairs = [
        *zip(mine, expected, strict=True),
        *((known[int(t)], p) for t, p in theirs if int(t) in known),
    ]
    return [abs(a - b) for a, b in pairs]


def _by_logprob(top: Sequence[Sequence[float]]) -> list[tuple[float, float]]:
    return sorted(((p, token) for token, p in top), reverse=True)


def _largest(differences: Sequence[float]) -> float:
    """The largest, NaN if one of them is."""
    return next((d for d in differences if d != d), max(differences, default=0.0))


def says_little(answers: Answers) -> str | None:
    """Why these answers would not show an error: every model must say something that depends on its
    weights.
    """
    drawn = {token for answer in answers.values() for token in answer["tokens"]}
    spreads = [
        max(p for _, p in top) - min(p for _, p in top)
        for a in answers.values()
        for top in a["top"]
    ]
    if any(spread != spread for spread in spreads):
        return "its logits are not numbers"
    if len(drawn) < 10:
        return f"it draws only {len(drawn)} tokens"
    if max(spreads) < 0.05:
        return "all tokens are about as likely"
    return None
