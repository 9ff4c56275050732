"""What became of a model: the server's lanes beside stock vLLM. Pure."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from zoo.compare import MOST_TIES, TOLERANCE, Answers, Comparison, compare, says_little

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
    STOCK: "the server ends, and stock vLLM too, on this CPU: there is nothing to compare with",
    BUILD: "transformers has no class for it, or cannot build one: there is nothing to serve",
}
"""What may become of a model, and what that means."""
BAD = (WRONG, FAILED, BLIND)
"""What no model may be in the end."""
DEGREES = (1, 2)


@dataclass(frozen=True)
class Measure:
    """What is asked of a model.

    Args:
        degrees: that are compared, in a server of as many engines as the largest.
        tolerance: the largest difference of a logprob.
        most_ties: requests that may part where logprobs agree.
    """

    degrees: tuple[int, ...] = DEGREES
    tolerance: float = TOLERANCE
    most_ties: int = MOST_TIES

    def compare(self, ours: Answers, theirs: Answers) -> Comparison:
        """Compare answers by this measure."""
        return compare(ours, theirs, self.tolerance, self.most_ties)


PLAIN = Measure()
QUANTIZED = Measure((1, 2, 4), tolerance=0.5, most_ties=5)
"""A rounding error moves a quantized input to the next number, or is one of bfloat16. Stock vLLM's
own degrees are apart by that much.
"""

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
        difference: the largest of a logprob, by degree.
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
        return Row(*name, REFUSED, detail=lanes["reason"])
    if lanes["status"] == "overdue":
        return Row(*name, FAILED, detail=f"its time was over: {lanes['reason']}")
    if stock[1]["answers"] is None:
        verdict = BLIND if lanes["status"] == "served" else STOCK
        return Row(*name, verdict, tuple(lanes["sizes"]), f"stock vLLM: {stock[1]['reason']}")
    if lanes["status"] == "failed":
        return Row(*name, FAILED, detail=lanes["reason"])
    if lanes["status"] == "differs":
        return _self_check_failed(name, lanes, stock)
    return _compared(name, lanes, stock, measure)


def _self_check_failed(name: tuple[str, str], lanes: Outcome, stock: dict[int, Outcome]) -> Row:
    """A lane that differs from lane 1 is refused where stock vLLM's TP 2 differs from TP 1 too;
    else we failed.
    """
    if stock[2]["answers"] is None:
        return Row(
            *name, REFUSED, detail=f"{lanes['reason']} (stock vLLM at TP 2: {stock[2]['reason']})"
        )
    apart = compare(stock[2]["answers"], stock[1]["answers"]).wrong is not None
    return Row(
        *name, REFUSED if apart else FAILED, detail=f"{lanes['reason']}{_stock_apart(stock)}"
    )


def needs(lanes: Outcome) -> tuple[int, ...]:
    """Degrees at which stock vLLM must be asked to verdict_on this server."""
    if lanes["status"] in ("refused", "overdue"):
        return ()
    if lanes["status"] == "differs":
        return DEGREES
    return (1, *(degree for degree in sorted(map(int, lanes["answers"])) if degree > 1))


def _compared(
    name: tuple[str, str], lanes: Outcome, stock: dict[int, Outcome], measure: Measure
) -> Row:
    sizes = tuple(lanes["sizes"])
    difference: dict[int, float] = {}
    notes = [f"no groups of {measure.degrees[-1]}: {lanes['alone']}"] if lanes["alone"] else []
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
        found = measure.compare(lanes["answers"][str(degree)], theirs)
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
