"""What became of a model: the server's lanes beside stock vLLM. Pure."""

from __future__ import annotations

from dataclasses import dataclass, field
from itertools import combinations
from typing import Any

from zoo.compare import (
    TOLERANCE,
    Answers,
    Comparison,
    compare,
    compare_rounded,
    rounding,
    says_little,
)

OK, WRONG, FAILED, BLIND, REFUSED, STOCK, BUILD = (
    "ok",
    "wrong",
    "failed",
    "not checked",
    "refused",
    "not served by stock vLLM",
    "no checkpoint",
)
VERDICTS = {
    OK: "every lane answers what stock vLLM answers at its degree",
    WRONG: "a lane answers something else",
    FAILED: "the server ends without a reason for its user, or its time is over",
    BLIND: "its answers would not show an error, or stock vLLM, which does not serve it, has none",
    REFUSED: "the server ends at its start, in one line that says why",
    STOCK: "the server ends, and so does stock vLLM, with this checkpoint on this CPU",
    BUILD: "transformers has a class for it and cannot build it: there is nothing to serve",
}
"""What may become of a model, and what that means."""
BAD = (WRONG, FAILED, BLIND)
"""What no model may be in the end."""
DEGREES = (1, 2)
CHANCE = 2**0.5
"""How much further a lane may be from stock than two of stock's degrees are from one another.

Each difference is that of two ways to round the same products, so they are equally large. Both are
estimated, from some 60 logprobs.
"""


@dataclass(frozen=True)
class Measure:
    """What is asked of a model.

    Args:
        degrees: that are compared, in a server of as many engines as the largest.
        rounded: its products are rounded by more than float32. Then tokens are forced, and a lane
            must be as near to stock vLLM of its degree as stock's degrees are to one another.
    """

    degrees: tuple[int, ...] = DEGREES
    rounded: bool = False

    def compare(self, ours: Answers, theirs: Answers, stock: dict[int, Outcome]) -> Comparison:
        """Compare a lane's answers with stock's. `stock`: as in `verdict_on`."""
        if not self.rounded:
            return compare(ours, theirs)
        return compare_rounded(ours, theirs, max(TOLERANCE, CHANCE * stock_rounding(stock)))


def stock_rounding(stock: dict[int, Outcome]) -> float:
    """Return the largest difference between two degrees of stock vLLM; 0.0 if there are no two."""
    answers = [outcome["answers"] for outcome in stock.values() if outcome["answers"] is not None]
    return max((rounding(*pair) for pair in combinations(answers, 2)), default=0.0)


PLAIN = Measure()
QUANTIZED = Measure((1, 2, 4), rounded=True)

Outcome = dict[str, Any]
"""Of a server: "status" (served, refused, failed, overdue), "reason", "sizes", "alone" (why there
are no groups of 2) and "answers" by degree. Of stock vLLM: "answers", None if it failed, and
"reason".
"""


@dataclass(frozen=True)
class Row:
    """What became of one model.

    Args:
        architecture, variant: the model.
        verdict: one of VERDICTS.
        group_sizes: those that the server has lanes for.
        detail: why, in words.
        difference: the largest of a logprob, by degree; their root mean square where tokens were
            forced.
        quantized: the format of its weights; empty: they are float32.
    """

    architecture: str
    variant: str
    verdict: str
    group_sizes: tuple[int, ...] = ()
    detail: str = ""
    difference: dict[int, float] = field(default_factory=dict)
    quantized: str = ""


def verdict_on(
    name: tuple[str, str], lanes: Outcome, stock: dict[int, Outcome], measure: Measure = PLAIN
) -> Row:
    """The verdict.

    Args:
        name: architecture and variant.
        lanes: what became of the server.
        stock: what became of stock vLLM by degree, as far as `needs` asked for it.
        measure: what was asked.
    """
    if lanes["status"] == "refused":
        return Row(*name, REFUSED, detail=f"{lanes['reason']}{_stock_refuses(stock)}")
    if lanes["status"] == "overdue":
        return Row(*name, FAILED, detail=f"its time was over: {lanes['reason']}")
    if stock[1]["answers"] is None:
        verdict = BLIND if lanes["status"] == "served" else STOCK
        return Row(*name, verdict, tuple(lanes["sizes"]), f"stock vLLM: {stock[1]['reason']}")
    if lanes["status"] == "failed":
        return Row(*name, FAILED, detail=lanes["reason"])
    if lanes["status"] == "differs":
        return _self_check_failed(name, lanes, stock, measure)
    return _compared(name, lanes, stock, measure)


def _stock_refuses(stock: dict[int, Outcome]) -> str:
    """What stock vLLM says of a model that is refused, if it was asked and has no answers."""
    if 1 not in stock or stock[1]["answers"] is not None:
        return ""
    return f" (stock vLLM on this CPU: {stock[1]['reason']})"


def _self_check_failed(
    name: tuple[str, str], lanes: Outcome, stock: dict[int, Outcome], measure: Measure
) -> Row:
    """A lane that differs from lane 1 is refused where stock vLLM's TP 2 differs from TP 1 too, by
    more than rounding; else we failed.
    """
    if stock[2]["answers"] is None:
        return Row(
            *name, REFUSED, detail=f"{lanes['reason']} (stock vLLM at TP 2: {stock[2]['reason']})"
        )
    is_equal = compare(stock[2]["answers"], stock[1]["answers"]).wrong is None
    apart = not (measure.rounded or is_equal)
    return Row(
        *name, REFUSED if apart else FAILED, detail=f"{lanes['reason']}{_stock_apart(stock)}"
    )


def needs(lanes: Outcome, measure: Measure = PLAIN) -> tuple[int, ...]:
    """Degrees at which stock vLLM must be asked to verdict_on this server."""
    if lanes["status"] == "refused":
        return (1,) if measure.rounded else ()
    if lanes["status"] == "overdue":
        return ()
    if lanes["status"] == "differs":
        return DEGREES
    return (1, *(degree for degree in sorted(map(int, lanes["answers"])) if degree > 1))


def _compared(
    name: tuple[str, str], lanes: Outcome, stock: dict[int, Outcome], measure: Measure
) -> Row:
    sizes = tuple(lanes["sizes"])
    difference: dict[int, float] = {}
    notes = [f"stock's degrees: {stock_rounding(stock):.1e}"] if measure.rounded else []
    notes += [f"no groups of {measure.degrees[-1]}: {lanes['alone']}"] if lanes["alone"] else []
    for degree in sorted(map(int, lanes["answers"])):
        theirs = stock[degree]["answers"]
        if theirs is None:  # one device says the same, but for the order of additions
            notes.append(
                f"lane {degree} compared with TP 1; stock vLLM at TP {degree}: "
                f"{stock[degree]['reason']}"
            )
            theirs = stock[1]["answers"]
        blind = says_little(theirs)
        if blind is not None:
            return Row(*name, BLIND, sizes, f"degree {degree}: {blind}")
        found = measure.compare(lanes["answers"][str(degree)], theirs, stock)
        if found.wrong is not None:
            return Row(*name, WRONG, sizes, f"degree {degree}: {found.wrong}{_stock_apart(stock)}")
        difference[degree] = found.difference
        notes += [f"degree {degree}: {tie}" for tie in found.ties]
    return Row(*name, OK, sizes, "; ".join(notes), difference)


def _stock_apart(stock: dict[int, Outcome]) -> str:
    """How far stock vLLM's own degrees are apart, where that says more."""
    if any(stock.get(degree, {}).get("answers") is None for degree in DEGREES):
        return ""
    found: Comparison = compare(stock[2]["answers"], stock[1]["answers"])
    apart = found.wrong or f"the same within {found.difference:.1e}"
    return f" (stock vLLM at TP 2, beside TP 1: {apart})"
