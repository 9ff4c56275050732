"""Flying Serving, table 2 and its use case of long contexts: what fits, and how fast the longest
prompts are.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from pathlib import Path
from statistics import median
from typing import Any

from experiments.common import (
    MAX_NUM_SEQS,
    MODELS,
    PAPER,
    Kept,
    Numbers,
    Setting,
    machine,
    run,
    system,
    template,
)
from experiments.phases_runs import layout_name
from experiments.reasons import why
from experiments.rows import (
    Row,
    by_construction,
    markdown,
    number,
    one_layout,
    page,
    paragraph,
    row,
    table,
    write,
)
from flying_lab.cli.simulation import Simulated
from flying_lab.sim.catalog import build
from flying_lab.sim.clock import Clock
from flying_lab.sim.cluster import Options
from flying_lab.sim.fleet import feed
from flying_lab.sim.memory import Lent
from flying_lab.sim.node import SimNode
from flying_lab.sim.system import flying
from flying_lab.workload.model import Request, Workload
from flying_lab.workload.synth import Poisson, synthesise
from flying_serving.layout.groups import Layout
from flying_serving.policy.policies import POLICIES

LLAMA, NEMOTRON = "llama-3-70b", "nemotron-8b"
TITLE = "Flying Serving, table 2: context and switching"
SWITCHES = 20
OUTPUT = 64
LENGTHS = {
    "llama-3-70b": 8192 - OUTPUT,
    "gpt-oss-120b": 131072 - OUTPUT,
    "nemotron-8b": 1048576 - OUTPUT,
}
SYSTEMS = ("auto", "stock-dp", "stock-tp")
MEMORY = by_construction(
    "the memory formula with the model's and the device's numbers; no request is served"
)
LENT: dict[str, Lent] = {
    "auto, feed-forward weights lent": "mlp",
    "auto, all divided weights lent": "all",
}
"""What `sim/memory.py` says of groups that lend weights to their KV cache."""
MESSAGE = by_construction(
    "an operator orders the switch, and it is modelled as the rest of the step under way and one "
    "message"
)
ALONE = one_layout(
    "one request alone is in the widest group, so both are the cost model's steps; with another "
    "coefficient `auto` may not choose the group"
)


def measure(setting: Setting) -> Numbers:
    """Capacities, switches, then the longest prompts by model."""
    return {
        "capacity": capacities(setting),
        "switch_ms": cutover_ms(setting),
        "longest": {model: _longest(model, setting) for model in MODELS},
    }


def capacities(setting: Setting) -> dict[str, int]:
    """Tokens of the longest request, by system."""
    found = {name: _capacity(system(name, LLAMA, setting)) for name in PAPER["context_tokens"]}
    wider = build("auto", machine(LLAMA, setting), 4, Options())
    lending = {name: _lending(lent, setting) for name, lent in LENT.items()}
    return {**found, "auto, engines of 4 devices": _capacity(wider), **lending}


def _lending(lent: Lent, setting: Setting) -> int:
    """Tokens of all four engines together with weights lent."""
    where = machine(LLAMA, setting)
    engine = where.engine(2, (4,), 2)
    return (engine.blocks - 1 + where.lent_blocks(2, 4, lent)) * engine.block_tokens[4]


def _capacity(of: object) -> int:
    return max(of.settings.capacity.kv_tokens.values())  # type: ignore[attr-defined,no-any-return]


def cutover_ms(setting: Setting) -> float:
    """Median of switches of a server with some load."""
    server = flying(
        machine(LLAMA, setting),
        2,
        POLICIES["manual"],
        Options(max_num_seqs=MAX_NUM_SEQS, keep_times=False),
    )
    node = SimNode(server, clock := Clock())
    shape = Poisson(duration_s=10.0 + 2 * SWITCHES, rate_rps=3.0)
    feed(synthesise(shape, setting.seed).requests, clock, node.arrive)
    for n in range(SWITCHES):
        clock.at(10.0 + 2 * n, node.order, Layout.uniform(4, 1 if n % 2 else 4), "weave")
    while clock.step():
        pass
    return median(switch.cutover_ms or 0.0 for switch in node.outcome.switches)


def _longest(model: str, setting: Setting) -> Numbers:
    length = LENGTHS[model]
    held = _capacity(system("stock-dp", model, setting)) - OUTPUT
    alone = min(length, held)
    found: Numbers = {"alone_tokens": alone}
    for name in SYSTEMS:
        single, several = (
            _served(name, model, count, tokens, setting)
            for count, tokens in ((1, alone), (_together(length), length))
        )
        ttft_s, gap_s = _alone_s(single)
        rate = _prompts_per_s(several)
        found[name] = {"ttft_s": ttft_s, "gap_ms": gap_s * 1e3, "prompts_per_s": rate}
        if name == "auto":
            found[name]["layouts"] = {"alone": _layouts(single), "together": _layouts(several)}
    return found


def _together(length: int) -> int:
    """Return how many prompts of a length come at once."""
    return 128 if length < 10_000 else 32 if length < 200_000 else 4


def _served(name: str, model: str, count: int, length: int, setting: Setting) -> Simulated:
    """Serve prompts that come at once."""
    requests = tuple(Request(index, 0.0, length, OUTPUT) for index in range(count))
    return run(system(name, model, setting), model, Workload("longest", 0, requests))


def _alone_s(served: Simulated) -> tuple[float, float]:
    """First token, and mean time between two tokens, of a request alone."""
    (done,) = served.outcome.ended
    return done.first_token_s, (done.end_s - done.first_token_s) / (OUTPUT - 1)


def _prompts_per_s(served: Simulated) -> float:
    ended = served.outcome.ended
    return sum(r.prompt_tokens for r in ended) / max((r.end_s for r in ended), default=1.0)


def _layouts(served: Simulated) -> list[list[Any]]:
    """Return the layouts while requests were there, each with the second from which on it was."""
    devices = served.system.settings.capacity.devices
    end_s = max(one.end_s for one in served.outcome.ended)
    changes = [one for one in served.outcome.layouts if one.at_s < end_s]
    first = max(index for index, one in enumerate(changes) if one.at_s <= 0.0)
    return [
        [max(round(one.at_s, 2), 0.0), layout_name(one.layout, devices)] for one in changes[first:]
    ]


def pages(found: Kept, folder: Path) -> list[Row]:
    """Write capacities, then the longest prompts; what is compared."""
    rows = why("table2", LLAMA, _rows(found))
    lines = [
        *paragraph(
            "Capacity of one group with `gpu_memory_utilization` 0.8. Cold starts (147 to 292 s "
            "in the paper) are not",
            "simulated. The switch is the median time from the order until the last engine works "
            "in the new layout, of",
            f"{SWITCHES} switches by hand under 3 requests/s, mean of {len(found.seeds)} seeds "
            "[smallest..largest]. It",
            "has the rest of the step under way and a message of 0.5 ms; nothing else of a "
            "switch is modelled. Nothing",
            "else on this page is random.",
        ),
        *table(rows),
        "## Prompts of the longest context",
        "",
        "8K tokens for Llama-3-70B, 128K for GPT-OSS-120B, 1M for Nemotron-8B, the models' "
        "longest; 64 output tokens.",
        "TTFT and the time between two tokens are of such a request alone, prompt tokens per "
        "second are of several at",
        "once. A prompt that one engine of stock DP does not hold is cut to what it holds, but "
        "for the last.",
        "",
    ]
    compared, once = [one.of(LLAMA) for one in rows], replace(found, seeds=found.seeds[:1])
    for model in MODELS:
        rows = why("context", model, _longest_rows(model, once))
        compared += [one.of(model) for one in rows]
        lines += [f"### {model}", "", *_shown(model, found), *table(rows)]
        lines += paragraph(_beyond(found)) if model == NEMOTRON else []
    rows = why("context", "all", _common_rows(once))
    compared += [one.of("longest prompts") for one in rows]
    lines += ["### The worst of the three", "", *table(rows)]
    write(folder, "table2", page(TITLE, {"table2": found}, lines, ("simulated", "gpt_oss")))
    return compared


def _rows(found: Kept) -> list[Row]:
    once = replace(found, seeds=found.seeds[:1])
    rows = [
        row(
            f"{name}: longest context (tokens)",
            tokens,
            once,
            lambda one, n=name: one["capacity"][n],
        )  # type: ignore[misc]
        for name, tokens in PAPER["context_tokens"].items()
        if name != "auto"
    ]
    paper = PAPER["context_tokens"]["auto"]
    for name in ("auto", "auto, engines of 4 devices", *LENT):
        counts = name == "auto"
        of = f"{name}: longest context (tokens)" if counts else name
        rows.append(
            row(of, paper, once, lambda one, n=name: one["capacity"][n], True, MEMORY).counted(
                counts
            )
        )  # type: ignore[misc]
    return [
        *rows,
        row("switch (ms)", PAPER["switch_ms"], found, lambda one: one["switch_ms"], False, MESSAGE),
    ]


def _beyond(found: Kept) -> str:
    """What the paper's rate of prompts of a million tokens would need of the devices."""
    rate, where, length = (
        PAPER[NEMOTRON]["context_prompt_tokens_per_s"],
        machine(NEMOTRON, Setting()),
        LENGTHS[NEMOTRON],
    )
    model = where.model
    operations = 4 * model.layers * model.heads * model.head_dim * length * (length + 1) / 2
    peak = where.devices * where.kind.hardware.spec.peak_flops.value
    ours = number(found.seeds[0]["longest"][NEMOTRON]["stock-tp"]["prompts_per_s"])
    share = operations / length * rate / peak
    return template(
        "long_prompts", published=number(rate), ours=ours, operations=operations, share=share
    )


def _ratio(model: str, key: str, top: str, bottom: str) -> Callable[[Numbers], float]:
    return lambda one: one["longest"][model][top][key] / one["longest"][model][bottom][key]


def _longest_rows(model: str, found: Kept) -> list[Row]:
    paper = PAPER[model]
    ttft, prompts = (
        _ratio(model, "ttft_s", "stock-dp", "auto"),
        _ratio(model, "prompts_per_s", "auto", "stock-tp"),
    )
    return [
        row(
            "TTFT, stock DP / auto", paper["context_dp_over_flying_ttft"], found, ttft, True, ALONE
        ),
        row(
            "prompt tokens/s, auto / stock TP",
            paper["context_flying_over_tp_prompts"],
            found,
            prompts,
            True,
        ),
    ]


def _common_rows(found: Kept) -> list[Row]:
    """What the paper says of all models in one number: the worst of them."""
    paper = PAPER["context"]

    def worst(of: Callable[[Iterable[float]], float], *which: str) -> Callable[[Numbers], float]:
        return lambda one: of(_ratio(model, *which)(one) for model in MODELS)

    beside_tp, beside_dp = ("auto", "stock-tp"), ("stock-dp", "auto")
    ttft, gap = worst(max, "ttft_s", *beside_tp), worst(max, "gap_ms", *beside_tp)
    range_of = tuple(paper["dp_over_flying_gap"])
    return [
        row("TTFT, auto / stock TP", paper["flying_over_tp_ttft"], found, ttft, False, ALONE),
        row(
            "time between tokens, auto / stock TP",
            paper["flying_over_tp_gap"],
            found,
            gap,
            False,
            ALONE,
        ),
        row(
            "time between tokens, stock DP / auto",
            range_of,
            found,
            worst(min, "gap_ms", *beside_dp),
            True,
            ALONE,
        ),
    ]


def _shown(model: str, found: Kept) -> list[str]:
    one = found.seeds[0]["longest"][model]
    rows = []
    for name in SYSTEMS:
        rate = one[name]["prompts_per_s"]
        cells = [
            number(one[name]["ttft_s"]),
            number(one[name]["gap_ms"]),
            "too long" if rate == 0 else number(rate),
        ]
        rows.append([name, *cells])
    alone = f"{one['alone_tokens']:,} tokens"
    headings = [
        f"TTFT of {alone} (s)",
        "time between its tokens (ms)",
        f"tokens/s, {LENGTHS[model]:,} each",
    ]
    return [*markdown(["system", *headings], rows), *paragraph(_layouts_text(one["auto"]))]


def _layouts_text(auto: Numbers) -> str:
    alone, together = (_named(auto["layouts"][key]) for key in ("alone", "together"))
    return f"*Layouts of `auto`*, from each second on. One request: {alone}. Several: {together}."


def _named(layouts: Sequence[tuple[float, str]]) -> str:
    return ", ".join(f"{at_s:g} s {name}" for at_s, name in layouts)
