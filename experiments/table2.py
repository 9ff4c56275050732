"""Flying Serving, table 2 and its use case of long contexts: what fits, and how fast the longest prompts are."""

from __future__ import annotations

from experiments.common import MODELS, PAPER, SEED, Row, markdown, number, run, system, table, write
from experiments.reasons import why
from flying_serving.workload.model import Request, Workload
from flying_serving.workload.synth import Poisson, synthesise

OUTPUT = 64
LENGTHS = {"llama-3-70b": 8192 - OUTPUT, "gpt-oss-120b": 131072 - OUTPUT, "nemotron-8b": 1048576 - OUTPUT}
SYSTEMS = ("auto", "static-dp", "static-tp")
TTFT, PROMPTS = "TTFT, static DP / auto", "prompt tokens/s, auto / static TP"


def main() -> None:
    """Capacities, then the longest prompts."""
    rows = []
    for name, tokens in PAPER["context_tokens"].items():
        capacity = max(system(name, "llama-3-70b").settings.capacity.tokens.values())
        rows.append(Row(f"Llama-3-70B, {name}: longest context (tokens)", tokens, capacity, name == "auto" or None))
    switch_ms = _cutover_ms()
    rows.append(Row("Llama-3-70B: switch (ms)", PAPER["switch_ms"], switch_ms, False))
    lines = [
        "Capacity of one group with `gpu_memory_utilization` 0.8. Cold starts (147 to 292 s in the paper) are not",
        "simulated. The switch is the median time from the order until the last engine works in the new layout, less",
        "the step under way; messages are modelled with 0.5 ms each way, nothing else of a switch is.",
        "",
        *table(why("table2", "llama-3-70b", rows)),
        "## Prompts of the longest context",
        "",
        "8K tokens for Llama-3-70B, 128K for GPT-OSS-120B, 1M for Nemotron-8B, the models' longest; 64 output tokens.",
        "TTFT is of such a request alone, prompt tokens per second are of several at once. A prompt that one engine of",
        "static DP does not hold is cut to what it holds, for the first number only.",
        "",
    ]
    for model in MODELS:
        lines += [f"### {model}", "", *_longest(model)]
    write("table2", "Flying Serving, table 2: context and switching", lines)


def _cutover_ms() -> float:
    done = run("auto", "llama-3-70b", synthesise(Poisson(requests=300, rate_rps=6.0), SEED)).outcome.switches
    waits = sorted((s.overhead_ms or 0.0) + 2 * 0.5 for s in done)
    return waits[len(waits) // 2] if waits else 1.0


def _longest(model: str) -> list[str]:
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
    return [
        *markdown(["system", f"TTFT of {min(length, held):,} tokens (s)", f"tokens/s, {length:,} each"], shown),
        *table(why("context", model, rows)),
    ]


def _alone_s(name: str, model: str, length: int) -> float:
    (done,) = run(name, model, Workload("alone", SEED, (Request(0, 0.0, length, OUTPUT),))).outcome.ended
    return done.first_token_s


def _prompts_per_s(name: str, model: str, length: int) -> float:
    count = 128 if length < 10_000 else 32 if length < 200_000 else 4
    requests = tuple(Request(index, 0.0, length, OUTPUT) for index in range(count))
    ended = run(name, model, Workload("together", SEED, requests)).outcome.ended
    return sum(r.prompt_tokens for r in ended) / max((r.end_s for r in ended), default=1.0)
