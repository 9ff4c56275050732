"""Observations of three servers with the same load: by phase, in a table and in plain sentences.
Pure.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from rich.box import SIMPLE
from rich.table import Table

from flying_lab.bench.switchlog import SwitchLog
from flying_lab.results.metrics import Summary
from flying_lab.results.results import Results
from flying_serving.cli.render import degrees_text

FIXED = ("static-dp", "static-tp")
AUTO = "auto"
WORDS = {"static-dp": "engines apart", "static-tp": "engines together", AUTO: AUTO}
ALL = "all"
_MEAN = "mean_e2el_ms"


@dataclass(frozen=True)
class Seen:
    """A phase: its requests, and by server the mean seconds from sending a request to its last
    token.
    """

    name: str
    requests: int
    mean_s: Mapping[str, float]

    @property
    def best(self) -> str:
        """The fixed layout with the lower mean."""
        return min(FIXED, key=self.mean_s.__getitem__)

    @property
    def other(self) -> str:
        """The fixed layout with the higher mean."""
        return next(name for name in FIXED if name != self.best)

    @property
    def more(self) -> float:
        """How much longer `auto` took than the better fixed layout, as a share; negative if it took
        less.
        """
        return self.mean_s[AUTO] / self.mean_s[self.best] - 1


def phases_of(summaries: Mapping[str, Summary]) -> list[Seen]:
    """Return the phases in their order, and all requests at the end. Every request has
    completed.
    """
    parts = {name: {**summary["phases"], ALL: summary} for name, summary in summaries.items()}
    return [
        Seen(
            phase,
            one["num_prompts"],
            {name: part[phase][_MEAN] / 1e3 for name, part in parts.items()},
        )
        for phase, one in parts[AUTO].items()
    ]


def table(phases: Sequence[Seen]) -> Table:
    """Return a table with one row for each phase."""
    title = "\nmean seconds from sending a request to its last token"
    made = Table(title=title, title_justify="left", title_style="", box=SIMPLE)
    made.add_column("phase", no_wrap=True)
    for heading in ("requests", *(WORDS[name] for name in FIXED), AUTO, "auto vs. best"):
        made.add_column(heading, justify="right")
    for one in phases:
        means = (f"{one.mean_s[name]:.2f}" for name in (*FIXED, AUTO))
        made.add_row(one.name, str(one.requests), *means, f"{one.more:+.0%}")
    return made


def strengths(phases: Sequence[Seen]) -> Iterator[str]:
    """Yield which fixed layout was better in each phase, and by how much."""
    for one in phases:
        if one.name != ALL:
            share = one.mean_s[one.other] / one.mean_s[one.best]
            yield (
                f"{one.name}: {WORDS[one.best]} are best; {WORDS[one.other]} take "
                f"{share:.1f} times as long"
            )


def decisions(results: Results, log: SwitchLog) -> Iterator[str]:
    """Yield when `auto` changed the layout and why, a line for each switch."""
    yield f"\nwhat auto did, from {degrees_text(_first(log))}:"
    if not log.switches:
        yield "  nothing"
    for one in log.switches:
        at_s = one.time_s - results.run.started_wall_s
        flying = f"{one.requests_in_flight} in flight"
        yield (
            f"  {at_s:.1f} s, {phase_at(results, at_s)}: to {degrees_text(one.new)} by "
            f"{one.mode}, {flying}"
        )
        yield f"    because of {one.reason}"


def phase_at(results: Results, time_s: float) -> str:
    """Return the phase of the last request that was due by then; before all of them a request tests
    the server.
    """
    named = zip(results.floats("arrival_s"), results.texts("phase"), strict=True)
    due = [phase for arrival_s, phase in named if arrival_s <= time_s]
    return str(due[-1]) if due else "test request"


def conclusion(phases: Sequence[Seen], log: SwitchLog) -> str:
    """Return the findings for a newcomer, in plain words."""
    joined = sum(_widest(one.new) > _widest(one.old) for one in log.switches)
    apart = sum(_widest(one.new) < _widest(one.old) for one in log.switches)
    *single, whole = phases
    where = {name: [one.name for one in single if one.best == name] for name in FIXED}
    better = (
        f"{WORDS[name]} were faster in {quoted(found)}" for name, found in where.items() if found
    )
    against = "more" if whole.more >= 0 else "less"
    verdict = (
        f"{whole.mean_s[AUTO]:.2f} s on average, {abs(whole.more):.0%} {against} than "
        "with the better fixed layout"
    )
    return (
        f"\nIn plain words: {', '.join(better)}. With auto the server joined its engines "
        f"{times(joined)} and parted "
        f"them {times(apart)} by itself while requests streamed, and every request got all its "
        "tokens. A request then "
        f"took {verdict} ({WORDS[whole.best]}, {whole.mean_s[whole.best]:.2f} s)."
    )


def quoted(names: Sequence[str]) -> str:
    """Return quoted names as a phrase of a sentence."""
    *first, last = (f"'{name}'" for name in names)
    return " and ".join(filter(None, [", ".join(first), last]))


def times(count: int) -> str:
    """Return a count in words: never, once, twice, 3 times."""
    return {0: "never", 1: "once", 2: "twice"}.get(count, f"{count} times")


def _first(log: SwitchLog) -> Sequence[Sequence[int]]:
    """Return the layout at the start."""
    return log.switches[0].old if log.switches else log.layout


def _widest(groups: Sequence[Sequence[int]]) -> int:
    return max(map(len, groups))
