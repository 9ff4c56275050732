"""One page with everything: tables, and figures as SVG inside it. It asks no server for
anything.
"""

import io
import re
import shlex
import time
from collections.abc import Callable, Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import Any

from jinja2 import Environment, PackageLoader, StrictUndefined, Template
from matplotlib.figure import Figure

from flying_lab.bench.report import figures, gaps
from flying_lab.bench.report.load import MeasuredSystem, Started, comparison
from flying_lab.bench.report.style import line, styled
from flying_lab.bench.switchlog import Groups, at_s
from flying_serving.errors import ConfigError

REPORT = "report.html"
FORMATS = ("png", "svg", "pdf")
MOST_SWITCHES = 500
"""The most rows of the table of switches. The page gives the number of rows left out."""
MOST_DRIFT_S = 0.05
"""A clock that was set by more than this puts layouts visibly out of place."""

FIGURES: dict[str, tuple[Callable[[Sequence[MeasuredSystem]], Figure | None], str]] = {
    "over_time": (
        figures.over_time,
        "Load, P90 latencies, tokens/s and layouts over time. A layout is drawn from the moment "
        "in the server's log "
        "at which its engines were told of it; engines in one block work as one group. Latencies "
        "below 0.1 ms are drawn as 0.1 ms.",
    ),
    "bars": (
        figures.bars,
        "Time per output token of completed requests, and the most output tokens in one second.",
    ),
    "distributions": (
        figures.distributions,
        "Share of completed requests that took no longer than this.",
    ),
    "gaps_at_switches": (
        gaps.gaps_at_switches,
        "How long streams waited for their next token near switches, and at all other times; "
        "gaps below 0.1 ms are "
        "drawn as 0.1 ms.",
    ),
}

_COLUMNS: tuple[tuple[str, str, int], ...] = (  # heading, key, which is better: -1 less, 1 more
    ("TTFT mean (ms)", "mean_ttft_ms", -1),
    ("P90", "p90_ttft_ms", -1),
    ("P99", "p99_ttft_ms", -1),
    ("TPOT median (ms)", "median_tpot_ms", -1),
    ("P90", "p90_tpot_ms", -1),
    ("ITL P99 (ms)", "p99_itl_ms", -1),
    ("E2E mean (ms)", "mean_e2el_ms", -1),
    ("queue P90 (ms)", "p90_queue_time_ms", -1),
    ("output tokens/s", "output_throughput", 1),
    ("most in a second", "max_output_tokens_per_s", 1),
    ("goodput (requests/s)", "request_goodput", 1),
)


@styled
def svg(figure: Figure, name: str) -> str:
    """Return a figure as an SVG element; its ids begin with `name`, so that several fit on one
    page.
    """
    out = io.StringIO()
    figure.savefig(
        out, format="svg", metadata={"Date": None, "Creator": None, "Format": None, "Type": None}
    )
    text = out.getvalue()
    text = text[text.index("<svg") :]
    text = re.sub(r"<metadata>.*?</metadata>", "", text, flags=re.DOTALL)
    text = re.sub(r'\b(id=")|(href="#)|(url\(#)', lambda found: f"{found[0]}{name}-", text)
    return text.strip()


def render(systems: Sequence[MeasuredSystem]) -> str:
    """Return the page of systems that replayed the same workload."""
    figures = [(draw(systems), name, caption) for name, (draw, caption) in FIGURES.items()]
    columns = [
        column
        for column in _COLUMNS
        if any(one.summary.get(column[1]) is not None for one in systems)
    ]
    return _template().render(
        systems=systems,
        facts=_facts(systems),
        warnings=_warnings(systems),
        columns=columns,
        best={key: _best(systems, key, better) for _, key, better in columns},
        pictures=[
            (svg(figure, name), caption) for figure, name, caption in figures if figure is not None
        ],
        most_switches=MOST_SWITCHES,
    )


@cache
def _template() -> Template:
    """Return `page.html` as a template in which every text is escaped except figures."""
    loader = PackageLoader("flying_lab.bench", "report")
    made = Environment(loader=loader, autoescape=True, undefined=StrictUndefined, trim_blocks=True)
    made.filters |= {"number": _number, "groups": _groups}
    made.globals |= {
        "at_s": at_s,
        "colour": lambda place: line(place)["color"],
        "command": _command,
    }
    return made.get_template("page.html")


def _best(systems: Sequence[MeasuredSystem], key: str, better: int) -> float | None:
    """Return the best value that a system has, None if there is nothing to compare."""
    known = [one.summary[key] for one in systems if one.summary.get(key) is not None]
    return None if len(systems) == 1 else max(known, key=lambda value: better * value)


def draw_all(path: Path, out: Path | None, form: str) -> list[Path]:
    """Draw every figure and the page of results, into their directory or into `out`. Returns the
    files.

    Raises:
        ConfigError: if the format is unknown or files cannot be written.
        BenchError: if there are no results.
    """
    if form not in FORMATS:
        raise ConfigError(f"--format={form!r}: one of {', '.join(FORMATS)}")
    systems = comparison(path)
    directory = out or path
    try:
        directory.mkdir(parents=True, exist_ok=True)
        paths = {name: directory / f"{name}.{form}" for name in FIGURES}
        return [*pictures(systems, paths), write(systems, directory)]
    except OSError as error:
        raise ConfigError(f"--out={str(directory)!r}: {error.strerror}") from None


@styled
def pictures(systems: Sequence[MeasuredSystem], paths: Mapping[str, Path]) -> list[Path]:
    """Draw figures, each named as in FIGURES, into their files. Returns the files that were
    written.
    """
    written = []
    for name, path in paths.items():
        figure = FIGURES[name][0](systems)
        if figure is not None:
            figure.savefig(path)
            written.append(path)
    return written


def write(systems: Sequence[MeasuredSystem], out: Path) -> Path:
    """Write the page into a directory. Returns its path."""
    path = out / REPORT
    path.write_text(render(systems), encoding="utf-8")
    return path


def _facts(systems: Sequence[MeasuredSystem]) -> str:
    run, summary = systems[0].results.run, systems[0].summary
    began = time.strftime("replayed from %Y-%m-%d %H:%M:%S UTC", time.gmtime(run.started_wall_s))
    several = "each the same " if len(systems) > 1 else ""
    workload = f"{run.workload} ({run.origin})" if run.origin else run.workload
    return (
        f"{run.model}, {began if run.started_wall_s else 'simulated'}: "
        f"{several}{summary['num_prompts']:,} requests of "
        f"the workload {workload}, seed {run.seed}."
    )


def _warnings(systems: Sequence[MeasuredSystem]) -> list[str]:
    """Return the warnings that a reader needs before believing the numbers."""
    found = []
    for one in systems:
        run, lost = one.results.run, {name: one.summary[name] for name in ("failed", "unfinished")}
        if any(lost.values()):
            counts = ", ".join(f"{count} {name}" for name, count in lost.items() if count)
            reasons = "; ".join(
                f"{count} x {text}" for text, count in one.summary["error_counts"].items()
            )
            found.append(
                f"{one.name}: {counts} of {one.summary['num_prompts']} requests. {reasons}"
            )
        if run.behind:
            lag_ms = run.p99_client_lag_ms
            found.append(
                f"{one.name}: the client fell behind by {lag_ms:.1f} ms (p99); its times measure "
                "it too."
            )
        if one.switches and abs(run.wall_drift_s) > MOST_DRIFT_S:
            found.append(
                f"{one.name}: the clock was set by {run.wall_drift_s:.2f} s during the replay; "
                "its layouts too."
            )
        if one.spans and one.spans[0].begin_s > 0:
            found.append(
                f"{one.name}: its log begins {one.spans[0].begin_s:.1f} s after the replay; "
                "earlier is unknown."
            )
    if (
        len(
            {
                (one.results.run.workload, one.results.run.origin, len(one.results))
                for one in systems
            }
        )
        > 1
    ):
        found.append("These systems did not replay the same workload.")
    return found


def _groups(groups: Groups) -> str:
    return " ".join(",".join(map(str, group)) for group in groups)


def _command(started: Started) -> str:
    return shlex.join(["python", *started.command[1:]])


def _number(value: Any) -> str:
    """Return a number with its significant decimals; a dash for none."""
    if value is None:
        return "–"
    return f"{value:,.0f}" if abs(value) >= 100 or float(value).is_integer() else f"{value:.2f}"
