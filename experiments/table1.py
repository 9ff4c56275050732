"""Flying Serving, table 1: urgent requests among others, Llama-3-70B, 3 to 5 requests per
second.
"""

from __future__ import annotations

from functools import cache, partial
from pathlib import Path
from statistics import mean

from experiments import servers
from experiments.common import FIRST, MAX_NUM_SEQS, PAPER, Kept, Numbers, Setting, run, template
from experiments.paper_rows import AUTO, NOTICE, Value, compared, systems_tables, systems_text
from experiments.paper_runs import key, limits, peak_tokens_per_s, systems
from experiments.reasons import why
from experiments.rows import (
    Row,
    markdown,
    number,
    one_layout,
    page,
    paragraph,
    row,
    table,
    write,
)
from experiments.servers import MAX_TOKENS
from flying_lab.sim.cluster import Options
from flying_lab.sim.node import System
from flying_lab.sim.run import simulate
from flying_lab.workload import shape
from flying_lab.workload.model import Workload
from flying_lab.workload.synth import Poisson, synthesise

MODEL = "llama-3-70b"
SHARE = 0.1
"""The paper does not say which share is urgent."""
PAPERS = 4000
"""Longest prompt of the paper's section 6.1."""
SHORTER = 1700
"""Longest prompt with which the paper's times to first token agree with each other and with
ours.
"""
RATIOS = (
    ("priority_tpot_ms", "stock-tp", False),
    ("priority_ttft_ms", "stock-tp", False),
    ("tpot_ms", "stock-dp", False),
    ("ttft_ms", "stock-dp", False),
    ("peak_tokens_per_s", "stock-dp", True),
)
"""What the paper's table is there to show: urgent requests as with stock TP, all others as with
stock DP.
"""
REQUESTS, RATE_RPS = 1500, 4.0
PRESSED = "pressed"
"""Under which the numbers of the load at which stock TP collapses are kept."""
SHARES, COLLAPSED_MS, AT_ONCE = (1.0, 1.25, 1.5), PAPER["priority"]["stock-tp"]["ttft_ms"], 2000
"""The rule of experiments/plans/paper_pages.md: rates as shares of stock TP's capacity."""
COLUMNS = {
    "priority_tpot_ms": "priority TPOT (ms)",
    "tpot_ms": "TPOT (ms)",
    "priority_ttft_ms": "priority TTFT (ms)",
    "ttft_ms": "TTFT (ms)",
    "peak_tokens_per_s": "peak tokens/s",
}
WIDE = one_layout(
    "at this load `auto` keeps wide groups for all requests, and stock TP, which decides "
    "nothing, has nearly the same "
    "numbers: no request presses, so the table shows little of priority. For urgent requests "
    "among others the policy "
    "asks for half of the engines (`controller/snapshots.py`)"
)


def measure(setting: Setting) -> Numbers:
    """By longest prompt, and for the load that presses: its rate, and systems by
    `max_num_seqs`.
    """
    given = {str(longest): _measure(longest, RATE_RPS, setting) for longest in (PAPERS, SHORTER)}
    searched = pressing()
    pressed = _measure(PAPERS, searched[-1][0], setting)
    return given | {PRESSED: pressed | {"searched": searched}}


def _measure(longest: int, rate_rps: float, setting: Setting) -> Numbers:
    found: Numbers = {"rate_rps": rate_rps, "max_tokens": MAX_TOKENS}
    for limit in limits(setting):
        found[key(limit)] = {
            one.name: measure_one(one, longest, setting.seed, rate_rps)
            | {"peak_tokens_per_s": peak_tokens_per_s(one, MODEL, setting.seed)}
            for one in systems(MODEL, setting, limit)
        }
    return found


def measure_one(
    one: System, longest: int, seed: int, rate_rps: float = RATE_RPS
) -> dict[str, float]:
    """Times of urgent and of all requests with one system."""
    summary = run(one, MODEL, load(longest, seed, rate_rps)).summary
    urgent = summary["priorities"]["-1"]
    return {
        "priority_tpot_ms": urgent["mean_tpot_ms"],
        "tpot_ms": summary["mean_tpot_ms"],
        "priority_ttft_ms": urgent["mean_ttft_ms"],
        "ttft_ms": summary["mean_ttft_ms"],
    }


def load(longest: int, seed: int, rate_rps: float) -> Workload:
    """Return the table's requests, a share of them urgent."""
    shape_of = Poisson(requests=REQUESTS, rate_rps=rate_rps, prompt_tokens=(128, longest))
    return shape.with_priority(synthesise(shape_of, seed), SHARE, -1, seed=seed)


@cache
def pressing() -> list[tuple[float, float]]:
    """Return the rates that were tried until stock TP alone collapses, each with its mean TTFT in
    ms: the last one is the rate of the load that presses.
    """
    alone = servers.stock("stock-tp", MODEL, FIRST, Options(max_num_seqs=MAX_NUM_SEQS))
    capacity_rps = _capacity_rps(alone)
    tried = []
    for share in SHARES:
        rate_rps = round(share * capacity_rps, 2)
        ttft_ms = measure_one(alone, PAPERS, FIRST.seed, rate_rps)["ttft_ms"]
        tried.append((rate_rps, ttft_ms))
        if ttft_ms >= COLLAPSED_MS:
            break
    return tried


def _capacity_rps(alone: System) -> float:
    """Requests per second while the second and third fifth of many end that come together."""
    together = synthesise(Poisson(requests=AT_ONCE, rate_rps=1e5), FIRST.seed)
    ends = sorted(one.end_s for one in simulate(alone, together.requests).ended)
    return (3 * AT_ONCE // 5 - AT_ONCE // 5) / (ends[3 * AT_ONCE // 5] - ends[AT_ONCE // 5])


def pages(found: Kept, folder: Path) -> list[Row]:
    """Write the table, with the paper's lengths and with shorter prompts; what it compares."""
    lines = [
        f"{SHARE:.0%} of 1,500 requests are urgent, a share that the paper does not state; "
        "Poisson, 4 requests/s.",
        f"Means of {len(found.seeds)} seeds [smallest..largest]; peak as in figure 9. The first "
        "table counts in",
        "[against_paper.md](against_paper.md), but for the peak, which is figure 9's.",
        "",
        *systems_text(),
    ]
    rows_of_all = []
    for title, longest in (("Prompts as in section 6.1", PAPERS), ("Shorter prompts", SHORTER)):
        rows = why("table1", str(longest), _rows(str(longest), found))
        rows_of_all += [one.of("priority") for one in rows if longest == PAPERS]
        heading = f"{title}: 128 to {longest:,} tokens"
        lines += [f"## {heading}", "", *_systems(heading, str(longest), found), *table(rows)]
    lines += _pressed(found)
    title = "Flying Serving, table 1: priority"
    write(folder, "table1", page(title, {"table1": found}, lines, (NOTICE,)))
    return rows_of_all


def _systems(heading: str, part: str, found: Kept) -> list[str]:
    return systems_tables(heading, [one[part] for one in found.seeds], COLUMNS)


def _pressed(found: Kept) -> list[str]:
    """The load at which stock TP collapses, beside the paper's table."""
    part = found.seeds[0][PRESSED]
    tried = "; ".join(f"{rate:g} requests/s {number(ms)} ms" for rate, ms in part["searched"])
    collapsed = part["searched"][-1][1] >= COLLAPSED_MS
    verdict = "At the last of them it collapses" if collapsed else "It never collapses"
    text = template(
        "table1_pressed", rate=f"{part['rate_rps']:g}", tried=tried, verdict=verdict,
        capacity=f"{part['searched'][0][0]:g}", **_beside_dp(found),
    )  # fmt: skip
    heading = f"A load that presses: {part['rate_rps']:g} requests/s"
    published_rows = [
        [f"{name}, the paper at 3 to 5", *(number(values[figure]) for figure in COLUMNS)]
        for name, values in PAPER["priority"].items()
    ]
    return [
        f"## {heading}",
        "",
        *paragraph(text),
        *markdown(["system", *COLUMNS.values()], published_rows),
        *_systems(heading, PRESSED, found),
    ]


def _beside_dp(found: Kept) -> dict[str, str]:
    """Means of `auto` over those of stock DP at the load that presses."""
    return {
        figure: number(
            mean(
                _ratio(PRESSED, figure, "stock-dp")(one, AUTO, key(MAX_NUM_SEQS))
                for one in found.seeds
            )
        )
        for figure in ("tpot_ms", "ttft_ms")
    }


def _rows(longest: str, found: Kept) -> list[Row]:
    paper = PAPER["priority"]
    rows = []
    for figure, other, higher in RATIOS:
        name = f"auto / {other}: {figure.replace('_', ' ')}"
        published = paper["auto"][figure] / paper[other][figure]
        known = WIDE if figure != "peak_tokens_per_s" else None
        of = partial(row, name, published, found, higher=higher, known=known)
        one = compared(of, found, _ratio(longest, figure, other))
        rows.append(one.counted(figure != "peak_tokens_per_s"))
    for system, values in paper.items():
        for figure, published in values.items():
            of = partial(row, f"{system}: {figure.replace('_', ' ')}", published, found)
            rows.append(compared(of, found, _figure(longest, system, figure)))
    return rows


def _ratio(longest: str, figure: str, other: str) -> Value:
    def value(one: Numbers, ours: str, limit: str) -> float:
        there = one[longest][limit]
        return float(there[ours][figure] / there[other][figure])

    return value


def _figure(longest: str, system: str, figure: str) -> Value:
    def value(one: Numbers, ours: str, limit: str) -> float:
        return float(one[longest][limit][ours if system == AUTO else system][figure])

    return value
