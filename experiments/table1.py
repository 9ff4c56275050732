"""Flying Serving, table 1: urgent requests among others, Llama-3-70B, 3 to 5 requests per
second.
"""

from __future__ import annotations

from pathlib import Path

from experiments.common import PAPER, Kept, Numbers, Setting, peak_tokens_per_s, run, system
from experiments.reasons import why
from experiments.rows import Row, markdown, one_layout, page, row, spread, table, write
from flying_lab.workload import shape
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
    ("priority_tpot_ms", "static-tp", False),
    ("priority_ttft_ms", "static-tp", False),
    ("tpot_ms", "static-dp", False),
    ("ttft_ms", "static-dp", False),
    ("peak_tokens_per_s", "static-dp", True),
)
"""What the paper's table is there to show: urgent requests as with static TP, all others as with
static DP.
"""
SYSTEMS = ("static-tp", "static-dp", "auto", "fork")
WIDE = one_layout(
    "at this load `auto` keeps wide groups for all requests, and static TP, which decides "
    "nothing, has nearly the same "
    "numbers: no request presses, so the table shows little of priority. For urgent requests "
    "among others the policy "
    "asks for half of the engines (`controller/snapshots.py`)"
)


def measure(setting: Setting) -> Numbers:
    """By longest prompt and system."""
    return {str(longest): _measure(longest, setting) for longest in (PAPERS, SHORTER)}


def _measure(longest: int, setting: Setting) -> Numbers:
    return {
        name: measure_one(name, longest, setting)
        | {"peak_tokens_per_s": peak_tokens_per_s(name, MODEL, setting)}
        for name in SYSTEMS
    }


def measure_one(name: str, longest: int, setting: Setting) -> dict[str, float]:
    """Times of urgent and of all requests with one system."""
    plain = synthesise(
        Poisson(requests=1500, rate_rps=4.0, prompt_tokens=(128, longest)), setting.seed
    )
    workload = shape.with_priority(plain, SHARE, -1, seed=setting.seed)
    summary = run(system(name, MODEL, setting), MODEL, workload).summary
    urgent = summary["priorities"]["-1"]
    return {
        "priority_tpot_ms": urgent["mean_tpot_ms"],
        "tpot_ms": summary["mean_tpot_ms"],
        "priority_ttft_ms": urgent["mean_ttft_ms"],
        "ttft_ms": summary["mean_ttft_ms"],
    }


def pages(found: Kept, folder: Path) -> list[Row]:
    """Write the table, with the paper's lengths and with shorter prompts; what it compares."""
    lines = [
        f"{SHARE:.0%} of 1,500 requests are urgent, a share that the paper does not state; "
        "Poisson, 4 requests/s.",
        f"Means of {len(found.seeds)} seeds [smallest..largest]; peak as in figure 9. The first "
        "table counts in",
        "[against_paper.md](against_paper.md), but for the peak, which is figure 9's.",
        "",
    ]
    compared = []
    for title, longest in (("Prompts as in section 6.1", PAPERS), ("Shorter prompts", SHORTER)):
        rows = why("table1", str(longest), _rows(str(longest), found))
        compared += [one.of("priority") for one in rows if longest == PAPERS]
        headings = [
            "system",
            "priority TPOT (ms)",
            "TPOT (ms)",
            "priority TTFT (ms)",
            "TTFT (ms)",
            "peak tokens/s",
        ]
        lines += [
            f"## {title}: 128 to {longest:,} tokens",
            "",
            *markdown(headings, _systems(str(longest), found)),
        ]
        lines += table(rows)
    write(folder, "table1", page("Flying Serving, table 1: priority", {"table1": found}, lines))
    return compared


def _systems(longest: str, found: Kept) -> list[list[str]]:
    keys = found.seeds[0][longest]["auto"]
    return [
        [name, *(spread([one[longest][name][key] for one in found.seeds]) for key in keys)]
        for name in SYSTEMS
    ]


def _rows(longest: str, found: Kept) -> list[Row]:
    paper = PAPER["priority"]
    rows = [
        row(
            f"auto / {other}: {key.replace('_', ' ')}",
            paper["auto"][key] / paper[other][key],
            found,
            lambda one, key=key, other=other: one[longest]["auto"][key] / one[longest][other][key],  # type: ignore[misc]
            higher,
            WIDE if key != "peak_tokens_per_s" else None,
        ).counted(key != "peak_tokens_per_s")
        for key, other, higher in RATIOS
    ]
    return rows + [
        row(
            f"{name}: {key.replace('_', ' ')}",
            value,
            found,
            lambda one, n=name, k=key: one[longest][n][k],
        )  # type: ignore[misc]
        for name, values in paper.items()
        for key, value in values.items()
    ]
