"""Flying Serving, table 2 and its use case of long contexts: what fits, and how fast the longest prompts are."""

from __future__ import annotations

from statistics import median

from experiments.common import MODELS, PAPER, SEED, SLOTS, Row, machine, markdown, number, run, system, table, write
from experiments.reasons import why
from flying_serving.layout.groups import Layout
from flying_serving.policy.policies import POLICIES
from flying_serving.sim.baselines import build
from flying_serving.sim.cluster import Clock
from flying_serving.sim.run import Arrivals
from flying_serving.sim.system import Options, flying
from flying_serving.workload.model import Request, Workload
from flying_serving.workload.synth import Poisson, synthesise

LLAMA = "llama-3-70b"
SWITCHES = 20
OUTPUT = 64
LENGTHS = {"llama-3-70b": 8192 - OUTPUT, "gpt-oss-120b": 131072 - OUTPUT, "nemotron-8b": 1048576 - OUTPUT}
SYSTEMS = ("auto", "static-dp", "static-tp")
TTFT, PROMPTS = "TTFT, static DP / auto", "prompt tokens/s, auto / static TP"


def main() -> list[Row]:
    """Capacities, then the longest prompts."""
    rows = []
    for name, tokens in PAPER["context_tokens"].items():
        capacity = max(system(name, LLAMA).settings.capacity.tokens.values())
        rows.append(Row(f"{name}: longest context (tokens)", tokens, capacity, name == "auto" or None))
    wider = build("auto", machine(LLAMA), 4, Options()).settings.capacity
    rows.append(Row("auto, engines of 4 devices", PAPER["context_tokens"]["auto"], max(wider.tokens.values()), True))
    rows.append(Row("switch (ms)", PAPER["switch_ms"], _cutover_ms(), False))
    rows = why("table2", LLAMA, rows)
    lines = [
        "Capacity of one group with `gpu_memory_utilization` 0.8. Cold starts (147 to 292 s in the paper) are not",
        "simulated. The switch is the median time from the order until the last engine works in the new layout, of",
        f"{SWITCHES} switches by hand under 3 requests/s. It has the rest of the step under way and a message of",
        "0.5 ms; nothing else of a switch is modelled.",
        "",
        *table(rows),
        "## Prompts of the longest context",
        "",
        "8K tokens for Llama-3-70B, 128K for GPT-OSS-120B, 1M for Nemotron-8B, the models' longest; 64 output tokens.",
        "TTFT is of such a request alone, prompt tokens per second are of several at once. A prompt that one engine of",
        "static DP does not hold is cut to what it holds, for the first number only.",
        "",
    ]
    compared = [row.of(LLAMA) for row in rows]
    for model in MODELS:
        shown, rows = _longest(model)
        compared += [row.of(model) for row in rows]
        lines += [f"### {model}", "", *shown, *table(rows)]
    write("table2", "Flying Serving, table 2: context and switching", lines)
    return compared


def _cutover_ms() -> float:
    node = flying(machine(LLAMA), 2, POLICIES["manual"], Options(slots=SLOTS, keep_times=False)).node(clock := Clock())
    Arrivals(synthesise(Poisson(duration_s=10.0 + 2 * SWITCHES, rate_rps=3.0), SEED).requests, clock, node.arrive)
    for n in range(SWITCHES):
        clock.at(10.0 + 2 * n, node.order, Layout.uniform(4, 1 if n % 2 else 4), "weave")
    while clock.step():
        pass
    return median(switch.cutover_ms or 0.0 for switch in node.outcome.switches)


def _longest(model: str) -> tuple[list[str], list[Row]]:
    length = LENGTHS[model]
    held = max(system("static-dp", model).settings.capacity.tokens.values()) - OUTPUT
    ttft = {name: _alone_s(name, model, min(length, held)) for name in SYSTEMS}
    rate = {name: _prompts_per_s(name, model, length) for name in SYSTEMS}
    paper = PAPER[model]
    rows = [
        Row(TTFT, paper["context_dp_over_flying_ttft"], ttft["static-dp"] / ttft["auto"], True),
        Row(PROMPTS, paper["context_flying_over_tp_prompts"], rate["auto"] / rate["static-tp"], True),
    ]
    shown = [[name, number(ttft[name]), "too long" if rate[name] == 0 else number(rate[name])] for name in SYSTEMS]
    headings = ["system", f"TTFT of {min(length, held):,} tokens (s)", f"tokens/s, {length:,} each"]
    return markdown(headings, shown), why("context", model, rows)


def _alone_s(name: str, model: str, length: int) -> float:
    (done,) = run(name, model, Workload("alone", SEED, (Request(0, 0.0, length, OUTPUT),))).outcome.ended
    return done.first_token_s


def _prompts_per_s(name: str, model: str, length: int) -> float:
    count = 128 if length < 10_000 else 32 if length < 200_000 else 4
    requests = tuple(Request(index, 0.0, length, OUTPUT) for index in range(count))
    ended = run(name, model, Workload("together", SEED, requests)).outcome.ended
    return sum(r.prompt_tokens for r in ended) / max((r.end_s for r in ended), default=1.0)
