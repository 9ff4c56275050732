"""Flying Serving, table 1: urgent requests among others, Llama-3-70B, 3 to 5 requests per second."""

from __future__ import annotations

from collections.abc import Mapping

from experiments.common import PAPER, SEED, Row, markdown, number, peak_tokens_per_s, run, table, write
from experiments.reasons import why
from flying_serving.workload import mixes
from flying_serving.workload.synth import Poisson, synthesise

MODEL = "llama-3-70b"
SHARE = 0.1
"""The paper does not say which share is urgent."""


SHORT = (128, 1700)
"""Prompts with which the paper's times to first token agree with each other and with ours."""
RATIOS = (
    ("priority_tpot_ms", "static-tp", False),
    ("priority_ttft_ms", "static-tp", False),
    ("tpot_ms", "static-dp", False),
    ("ttft_ms", "static-dp", False),
    ("peak_tokens_per_s", "static-dp", True),
)
"""What the paper's table is there to show: urgent requests as with static TP, all others as with static DP."""
SYSTEMS = ("static-tp", "static-dp", "auto", "fork")


def main() -> list[Row]:
    """The table, with the paper's lengths and with shorter prompts."""
    lines = [
        f"{SHARE:.0%} of 1,500 requests are urgent, a share that the paper does not state; Poisson, 4 requests/s.",
        "Means; peak as in figure 9.",
        "",
    ]
    compared = []
    for title, prompts in (("Prompts as in section 6.1", (128, 4000)), ("Shorter prompts", SHORT)):
        rows, shown = _table(prompts)
        rows = why("table1", f"{prompts[1]}", rows)
        compared += [row.of(f"priority, prompts up to {prompts[1]:,}") for row in rows]
        headings = ["system", "priority TPOT (ms)", "TPOT (ms)", "priority TTFT (ms)", "TTFT (ms)", "peak tokens/s"]
        lines += [f"## {title}: {prompts[0]} to {prompts[1]:,} tokens", ""]
        lines += [*markdown(headings, shown), *table(rows)]
    write("table1", "Flying Serving, table 1: priority", lines)
    return compared


def _table(prompt_tokens: tuple[int, int]) -> tuple[list[Row], list[list[str]]]:
    plain = synthesise(Poisson(requests=1500, rate_rps=4.0, prompt_tokens=prompt_tokens), SEED)
    workload = mixes.with_priority(plain, SHARE, -1, seed=SEED)
    found: dict[str, dict[str, float]] = {}
    for name in SYSTEMS:
        summary = run(name, MODEL, workload).summary
        urgent = summary["priorities"]["-1"]
        found[name] = {
            "priority_tpot_ms": urgent["mean_tpot_ms"],
            "tpot_ms": summary["mean_tpot_ms"],
            "priority_ttft_ms": urgent["mean_ttft_ms"],
            "ttft_ms": summary["mean_ttft_ms"],
            "peak_tokens_per_s": peak_tokens_per_s(name, MODEL),
        }
    paper = PAPER["priority"]
    rows = [
        Row(f"auto / {other}: {key.replace('_', ' ')}", _ratio(paper, key, other), _ratio(found, key, other), higher)
        for key, other, higher in RATIOS
    ]
    rows += [
        Row(f"{name}: {key.replace('_', ' ')}", value, found[name][key])
        for name, values in paper.items()
        for key, value in values.items()
    ]
    return rows, [[name, *(number(value) for value in values.values())] for name, values in found.items()]


def _ratio(systems: Mapping[str, Mapping[str, float]], key: str, other: str) -> float:
    return systems["auto"][key] / systems[other][key]
