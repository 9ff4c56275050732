"""One page with everything: tables, and figures as SVG inside it. It asks no server for anything."""

from __future__ import annotations

import io
import re
import shlex
import time
from collections.abc import Callable, Sequence
from html import escape
from pathlib import Path
from typing import Any

from matplotlib.figure import Figure

from flying_serving.bench.report import figures
from flying_serving.bench.report.load import MeasuredSystem, comparison
from flying_serving.bench.report.style import line, styled
from flying_serving.bench.switchlog import Groups, LoggedSwitch, at_s
from flying_serving.errors import ConfigError

REPORT = "report.html"
FORMATS = ("png", "svg", "pdf")
MOST_SWITCHES = 500
"""Rows of the table of switches; what is left out is said."""
MOST_DRIFT_S = 0.05
"""A clock that was set by more than this puts layouts visibly out of place."""

FIGURES: dict[str, tuple[Callable[[Sequence[MeasuredSystem]], Figure | None], str]] = {
    "over_time": (
        figures.over_time,
        "Load, P90 latencies and layouts over time. A layout is drawn from the moment in the server's own log at which "
        "its engines were told of it; engines in one block work as one group.",
    ),
    "bars": (figures.bars, "Time per output token of completed requests, and the most output tokens in one second."),
    "distributions": (figures.distributions, "Share of completed requests that took no longer than this."),
    "gaps_at_switches": (
        figures.gaps_at_switches,
        "How long streams waited for their next token near switches, and at all other times; gaps below 0.1 ms are "
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

_STYLE = """
body { font: 15px/1.5 system-ui, sans-serif; color: #222; background: #fff; margin: 2rem auto; max-width: 68rem;
  padding: 0 1rem }
h1 { font-size: 1.5rem; margin-bottom: 0 } h2 { font-size: 1.1rem; margin: 2rem 0 .5rem }
.facts, figcaption, .note { color: #5a5a5a; font-size: .87rem }
.scroll { overflow-x: auto }
table { border-collapse: collapse; font-size: .87rem; font-variant-numeric: tabular-nums }
th, td { padding: .3rem .6rem; text-align: right; border-bottom: 1px solid #e4e4e4; white-space: nowrap }
th { font-weight: 600; vertical-align: bottom; white-space: normal } td:first-child, th:first-child { text-align: left }
td.best { font-weight: 700 } td.text { text-align: left; white-space: normal; min-width: 16rem }
.dot { display: inline-block; width: .7em; height: .7em; border-radius: 50%; margin-right: .5em }
figure { margin: 0 0 1.5rem } figure svg { width: 100%; height: auto }
.facts { overflow-wrap: anywhere }
pre { background: #f6f6f4; padding: .6rem; white-space: pre-wrap; overflow-wrap: anywhere; font-size: .8rem }
.warning { border-left: 4px solid #D55E00; padding: .2rem .8rem; background: #fdf3ec }
"""


@styled
def svg(figure: Figure, name: str) -> str:
    """A figure as an SVG element; its ids begin with `name`, so that several fit on one page."""
    out = io.StringIO()
    figure.savefig(out, format="svg", metadata={"Date": None, "Creator": None, "Format": None, "Type": None})
    text = out.getvalue()
    text = text[text.index("<svg") :]
    text = re.sub(r"<metadata>.*?</metadata>", "", text, flags=re.DOTALL)
    text = re.sub(r'\b(id=")|(href="#)|(url\(#)', lambda found: f"{found[0]}{name}-", text)
    return text.strip()


def render(systems: Sequence[MeasuredSystem]) -> str:
    """The page of systems that replayed the same workload."""
    run = systems[0].results.run
    parts = [
        f"<h1>{escape(', '.join(one.name for one in systems))}</h1>",
        f'<p class="facts">{escape(_facts(systems))}</p>',
        *(f'<p class="warning">{escape(text)}</p>' for text in _warnings(systems)),
        "<h2>Summary</h2>",
        _summary(systems),
        '<p class="note">Latencies and tokens/s are those of completed requests. Bold: the best.</p>',
        "<h2>Figures</h2>",
    ]
    for name, (draw, caption) in FIGURES.items():
        figure = draw(systems)
        if figure is not None:
            parts.append(f"<figure>{svg(figure, name)}<figcaption>{escape(caption)}</figcaption></figure>")
    parts += [_switches(one) for one in systems if one.switches]
    started = [one for one in systems if one.started is not None]
    if started:
        parts.append("<h2>Servers</h2>")
        parts += [f"<pre>{escape(_command(one))}</pre>" for one in started]
    title = escape(f"{', '.join(one.name for one in systems)}: {run.workload}")
    head = f'<meta charset="utf-8"><meta name="viewport" content="width=device-width"><title>{title}</title>'
    body = "\n".join(parts)
    return (
        f'<!DOCTYPE html>\n<html lang="en"><head>{head}<style>{_STYLE}</style></head>\n<body>\n{body}\n</body></html>\n'
    )


def draw_all(path: Path, out: Path | None, form: str) -> list[Path]:
    """Draw every figure and the page. Returns the files that were written.

    Args:
        path: directory that `flying-serving bench` wrote, of one server or of several.
        out: directory for the files; by default that of the results.
        form: one of FORMATS.

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
        return [*_pictures(systems, directory, form), write(systems, directory)]
    except OSError as error:
        raise ConfigError(f"--out={str(directory)!r}: {error.strerror}") from None


@styled
def _pictures(systems: Sequence[MeasuredSystem], directory: Path, form: str) -> list[Path]:
    written = []
    for name, (draw, _) in FIGURES.items():
        figure = draw(systems)
        if figure is not None:
            written.append(directory / f"{name}.{form}")
            figure.savefig(written[-1])
    return written


def write(systems: Sequence[MeasuredSystem], out: Path) -> Path:
    """Write the page into a directory; its path."""
    path = out / REPORT
    path.write_text(render(systems), encoding="utf-8")
    return path


def _facts(systems: Sequence[MeasuredSystem]) -> str:
    run, summary = systems[0].results.run, systems[0].summary
    began = time.strftime("%Y-%m-%d %H:%M:%S UTC", time.gmtime(run.started_wall_s))
    several = "each the same " if len(systems) > 1 else ""
    workload = f"{run.workload} ({run.origin})" if run.origin else run.workload
    return (
        f"{run.model}, replayed from {began}: {several}{summary['num_prompts']:,} requests of the workload {workload}, "
        f"seed {run.seed}."
    )


def _warnings(systems: Sequence[MeasuredSystem]) -> list[str]:
    """What a reader has to know before believing the numbers."""
    found = []
    for one in systems:
        run, lost = one.results.run, {name: one.summary[name] for name in ("failed", "unfinished")}
        if any(lost.values()):
            counts = ", ".join(f"{count} {name}" for name, count in lost.items() if count)
            reasons = "; ".join(f"{count} x {text}" for text, count in one.summary["error_counts"].items())
            found.append(f"{one.name}: {counts} of {one.summary['num_prompts']} requests. {reasons}")
        if run.behind:
            lag_ms = run.p99_client_lag_ms
            found.append(f"{one.name}: the client fell behind by {lag_ms:.1f} ms (p99); its times measure it too.")
        if one.switches and abs(run.wall_drift_s) > MOST_DRIFT_S:
            found.append(
                f"{one.name}: the clock was set by {run.wall_drift_s:.2f} s during the replay; its layouts too."
            )
        if one.spans and one.spans[0].begin_s > 0:
            found.append(
                f"{one.name}: its log begins {one.spans[0].begin_s:.1f} s after the replay; earlier is unknown."
            )
    if len({(one.results.run.workload, one.results.run.origin, len(one.results)) for one in systems}) > 1:
        found.append("These systems did not replay the same workload.")
    return found


def _summary(systems: Sequence[MeasuredSystem]) -> str:
    """One row for each system; columns that no system has a value for are left out."""
    columns = [column for column in _COLUMNS if any(one.summary.get(column[1]) is not None for one in systems)]
    head = "".join(f"<th>{escape(heading)}</th>" for heading, _, _ in columns)
    rows = [f"<tr><th>system</th><th>completed</th>{head}<th>switches</th></tr>"]
    for place, one in enumerate(systems):
        colour = line(place)["color"]
        cells = [f'<td><span class="dot" style="background:{colour}"></span>{escape(one.name)}</td>']
        cells.append(f"<td>{one.summary['completed']:,}/{one.summary['num_prompts']:,}</td>")
        for _, key, better in columns:
            known = [other.summary[key] for other in systems if other.summary.get(key) is not None]
            value = one.summary.get(key)
            best = value is not None and len(systems) > 1 and value == (max(known) if better > 0 else min(known))
            cells.append(f'<td class="best">{_number(value)}</td>' if best else f"<td>{_number(value)}</td>")
        cells.append(f"<td>{len(one.switches) if one.log is not None else '–'}</td>")
        rows.append(f"<tr>{''.join(cells)}</tr>")
    return f'<div class="scroll"><table>{"".join(rows)}</table></div>'


def _switches(one: MeasuredSystem) -> str:
    """The server's log of the switches during the replay."""
    headings = ("at (s)", "from", "to", "requests", "cutover (ms)", "drain (ms)", "longest token gap (ms)", "reason")
    rows = ["<tr>" + "".join(f"<th>{heading}</th>" for heading in headings) + "</tr>"]
    for switch in one.switches[:MOST_SWITCHES]:
        rows.append(_row(switch, at_s(switch, one.results.run)))
    left = len(one.switches) - MOST_SWITCHES
    note = f'<p class="note">{left:,} more are in its switches.json.</p>' if left > 0 else ""
    table = f'<div class="scroll"><table>{"".join(rows)}</table></div>'
    title = f"Switches of {escape(one.name)}: {len(one.switches)}"
    return f"<details><summary>{title}</summary>{table}{note}</details>"


def _row(switch: LoggedSwitch, when_s: float) -> str:
    cells = [
        f"{when_s:.2f}",
        _groups(switch.old),
        _groups(switch.new),
        str(switch.requests_in_flight),
        *(_number(value) for value in (switch.cutover_ms, switch.drain_ms, switch.worst_token_gap_ms)),
    ]
    reason = switch.reason if switch.problem is None else f"{switch.reason}; {switch.problem}"
    return f'<tr>{"".join(f"<td>{cell}</td>" for cell in cells)}<td class="text">{escape(reason)}</td></tr>'


def _groups(groups: Groups) -> str:
    return " ".join(",".join(map(str, group)) for group in groups)


def _command(one: MeasuredSystem) -> str:
    assert one.started is not None
    return f"{shlex.join(['python', *one.started.command[1:]])}\n# {one.name}: ready after {one.started.ready_s:.1f} s"


def _number(value: Any) -> str:
    """A number with as many decimals as say something; a dash for none."""
    if value is None:
        return "–"
    return f"{value:,.0f}" if abs(value) >= 100 or float(value).is_integer() else f"{value:.2f}"
