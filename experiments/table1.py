"""Flying Serving, table 1: urgent requests among others, Llama-3-70B, 3 to 5 requests per second."""

from __future__ import annotations

import numpy as np

from experiments.common import PAPER, SEED, Row, markdown, number, peak_tokens_per_s, run, table, write
from experiments.reasons import why
from flying_serving.workload import mixes
from flying_serving.workload.synth import Poisson, synthesise

MODEL = "llama-3-70b"
SHARE = 0.1
"""The paper does not say which share is urgent."""


def main() -> list[Row]:
    """The table."""
    plain = synthesise(Poisson(requests=1500, rate_rps=4.0), SEED)
    workload = mixes.with_priority(plain, SHARE, -1, seed=SEED)
    rows: list[Row] = []
    others = []
    for name in ("static-tp", "static-dp", "auto", "fork"):
        summary = run(name, MODEL, workload).summary
        urgent = summary["priorities"]["-1"]
        found = {
            "priority_tpot_ms": urgent["mean_tpot_ms"],
            "tpot_ms": summary["mean_tpot_ms"],
            "priority_ttft_ms": urgent["mean_ttft_ms"],
            "ttft_ms": summary["mean_ttft_ms"],
            "peak_tokens_per_s": peak_tokens_per_s(name, MODEL),
        }
        if name in PAPER["priority"]:
            better = {key: (key == "peak_tokens_per_s") if name == "auto" else None for key in found}
            rows += [
                Row(f"{name}: {key.replace('_', ' ')}", PAPER["priority"][name][key], value, better[key])
                for key, value in found.items()
            ]
        others.append([name, *(number(float(np.round(value, 2))) for value in found.values())])
    headings = ["system", "priority TPOT (ms)", "TPOT (ms)", "priority TTFT (ms)", "TTFT (ms)", "peak tokens/s"]
    lines = [
        f"{SHARE:.0%} of 1,500 requests are urgent, a share that the paper does not state; Poisson, 4 requests/s,",
        "lengths as in section 6.1. Means; peak as in figure 9.",
        "",
        *markdown(headings, others),
        *table(rows := why("table1", MODEL, rows)),
    ]
    write("table1", "Flying Serving, table 1: priority", lines)
    return rows
