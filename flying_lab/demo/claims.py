"""The claims that docs/benchmarks.md makes of the demo, and its aim, with their bounds. Pure.

The bounds were fixed before the first run: experiments/plans/demo.md. That run missed the aim, so
it is shown and not claimed.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

from flying_lab.demo.phases import AUTO, FIXED, WORDS, PhaseFigures

LEAST_SWITCHES = 1
MOST_OF_THE_WAY = 0.5
"""The largest part of the way from the better fixed layout to the other, in mean E2E."""


@dataclass(frozen=True)
class Observed:
    """The figures of each phase, and the number of switches of `auto`."""

    phases: Sequence[PhaseFigures]
    switches: int


@dataclass(frozen=True)
class Claim:
    """A claim in the words of docs/benchmarks.md, and a function that yields how it was missed."""

    words: str
    missed: Callable[[Observed], Iterator[str]]


def way(phase: PhaseFigures) -> float:
    """Return how far `auto` is from the better fixed layout: 0 there, 1 at the other.

    Negative if it is ahead of both.
    """
    best_ms, other_ms = phase.mean_ms(phase.best), phase.mean_ms(phase.other)
    return (phase.mean_ms(AUTO) - best_ms) / max(other_ms - best_ms, 1e-9)


def _unchanged(observed: Observed) -> Iterator[str]:
    if observed.switches < LEAST_SWITCHES:
        yield f"{observed.switches} switches, not {LEAST_SWITCHES} or more"


def _never_better(observed: Observed) -> Iterator[str]:
    better = {phase.best for phase in observed.phases}
    for name in FIXED:
        if name not in better:
            yield f"{WORDS[name]} are the better layout in no phase"


def _too_far(observed: Observed) -> Iterator[str]:
    for phase in observed.phases:
        if way(phase) > MOST_OF_THE_WAY:
            means = ", ".join(
                f"{WORDS[name]} {phase.mean_ms(name):.0f} ms" for name in (*FIXED, AUTO)
            )
            yield f"{phase.name}: {means}"


CLAIMS = (
    Claim("`auto` changes the layout at least once", _unchanged),
    Claim("each fixed layout is the better one in some phase", _never_better),
)
AIM = Claim(
    "in each phase the mean latency of `auto` is nearer to the better fixed layout than to the "
    "other",
    _too_far,
)


def problems(observed: Observed, claims: Sequence[Claim] = CLAIMS) -> list[str]:
    """Return how claims were missed; none if all hold."""
    return [f"claim {claim.words!r}: {miss}" for claim in claims for miss in claim.missed(observed)]


def aim_line(observed: Observed) -> str:
    """Return whether the aim was reached, and where it was missed."""
    missed = list(AIM.missed(observed))
    return f"the aim, {AIM.words}: {'missed in ' + '; '.join(missed) if missed else 'reached'}"
