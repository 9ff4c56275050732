"""What switching inside nodes gains behind a router, by number of nodes and by how many tenants
burst together.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from statistics import median

from experiments import nodes_runs
from experiments.common import Kept, Numbers, Setting
from experiments.nodes_runs import (
    COUNTED_S,
    EXTREMES,
    FEW,
    FIRST_S,
    LAST_S,
    LONG_OUTPUTS,
    ONCE,
    REPLICAS,
    ROUTERS,
    SECONDS,
    SHARED_BLOCKS,
    STOCK,
    SYSTEMS,
    TOGETHER,
)
from experiments.rows import Row, markdown, number, page, paragraph, write
from experiments.tenants import Tenants
from flying_lab.workload.model import MOONCAKE_BLOCK_TOKENS


def measure(setting: Setting) -> Numbers:
    """By nodes, share of tenants that burst together and system; with long outputs; by router."""
    return nodes_runs.measure(setting)


def pages(found: Kept, folder: Path) -> list[Row]:
    """Write the page; it compares nothing with the paper."""
    lines = [
        *_verdicts(found),
        *_setting(found),
        *_gains(found),
        *_times(found),
        *_long(found),
        *_routers(found),
    ]
    write(
        folder,
        "nodes",
        page(
            "Many nodes behind a router: what switching inside them gains", {"nodes": found}, lines
        ),
    )
    return []


def _of(found: Kept, nodes: int, together: float, of: Callable[[Numbers], float]) -> list[float]:
    """One number of each seed that has served so many nodes; `of` gets the numbers of all
    systems.
    """
    return [
        of(one["nodes"][str(nodes)][str(together)])
        for one in found.seeds
        if str(nodes) in one["nodes"]
    ]


def best_s(systems: Numbers) -> float:
    """The mean end-to-end latency of the best stock layout, chosen when all have been tried."""
    return min(float(systems[name]["e2e_s"]) for name in STOCK)


def over(other: str, name: str = "auto") -> Callable[[Numbers], float]:
    """Of the systems' numbers, one's mean end-to-end latency over another's, or over the best
    stock layout's.
    """
    return lambda systems: (
        systems[name]["e2e_s"] / (best_s(systems) if other == "best" else systems[other]["e2e_s"])
    )


COMPARED = {
    "stock-dp": "`stock-dp`",
    "stock-tp": "`stock-tp`",
    "best": "the best stock layout",
}
"""What `auto` is compared with, and its name."""
_HEADINGS = [
    *(f"`{name}` (s)" for name in SYSTEMS),
    *(f"`auto` / {label}" for label in COMPARED.values()),
]


def _middle(values: Sequence[float]) -> str:
    """The median, with the smallest and the largest where there are several."""
    if len(values) == 1:
        return number(values[0])
    low, middle, high = (number(value) for value in (min(values), median(values), max(values)))
    return middle if low == high else f"{middle} [{low}..{high}]"


def _each(numbers: Numbers) -> Iterator[Numbers]:
    """What each system's requests found, of all levels."""
    for value in numbers.values():
        if "e2e_s" in value:
            yield value
        else:
            yield from _each(value)


def _setting(found: Kept) -> list[str]:
    tenants = Tenants(1, 0.0, SECONDS)
    most = found.seeds[0]["nodes"][str(ONCE)][str(TOGETHER[0])]["auto"]["requests"]
    runs = ", ".join(str(count) for count in REPLICAS.values())
    not_served = sum(one["not_served"] for seed in found.seeds for one in _each(seed))
    return [
        "## Setting",
        "",
        *paragraph(
            "A node is eight H200 with Llama-3-70B, engines of two devices, and the production "
            "controller; fixed",
            "layouts are stock vLLM's. The router sends a request to the node with the fewest in "
            "flight; vllm-router's",
            "`cache_aware` does the same with these prompts, of which no two begin alike.",
        ),
        *paragraph(
            f"Clients are {tenants.per_node} tenants for each node. A tenant is quiet for "
            f"{tenants.low_s} s, has a",
            f"burst of {tenants.burst_s} s, and so on: {tenants.low_rps} requests/s for each "
            "node while all are quiet",
            f"and {tenants.burst_rps:g} while all have a burst, the middle of the Flying Serving "
            "paper's ranges,",
            "Poisson; prompts of 128 to 4,000 tokens, outputs of 16 to 128. *Together* is the "
            "share of the tenants",
            "whose bursts are at the same time; each other tenant has them at a time of its own. "
            "On average the load",
            "of a node is the same for every number of nodes and every share.",
        ),
        *paragraph(
            f"Requests that arrive in the {COUNTED_S:g} s from second {FIRST_S:g} on count, one "
            "period; others come",
            f"before and for {LAST_S:g} s after. With each seed this is done {runs} times for",
            f"{', '.join(map(str, REPLICAS))} nodes ({most:,.0f} requests of {ONCE} nodes). "
            "Medians of",
            f"{len(found.seeds)} seeds [smallest..largest], each ratio that of one seed; {ONCE} "
            "nodes have one seed.",
            f"{not_served or 'No'} requests were refused.",
        ),
        *paragraph(
            "Numbers of nodes, shares, seeds, prompts and rates were decided before this page "
            "was first made. Before,",
            "other models, devices and rates were tried with one seed, for the time that a run "
            "takes. These tries are",
            "why outputs and phases are short (a burst has to be longer than a request, and 64 "
            "nodes have to be served",
            "in minutes; what longer outputs do is below), why `stock-tp4` is there (it was "
            "ahead of the other two),",
            "and why the first period does not count (a start from idle servers into full load "
            "had).",
        ),
    ]


def _gains(found: Kept) -> list[str]:
    rows = []
    for share in TOGETHER:
        for nodes in REPLICAS:
            times = [
                _middle(_of(found, nodes, share, lambda one, n=name: one[n]["e2e_s"]))
                for name in SYSTEMS
            ]  # type: ignore[misc]
            ratios = [_middle(_of(found, nodes, share, over(other))) for other in COMPARED]
            rows.append([f"{share:g}", str(nodes), *times, *ratios])
    return [
        "## Mean end-to-end latency",
        "",
        *markdown(["together", "nodes", *_HEADINGS], rows),
    ]


def _verdicts(found: Kept) -> list[str]:
    """What the table says, from its numbers."""
    few, many = min(REPLICAS), max(REPLICAS)
    sentences = []
    for other, label in COMPARED.items():
        parts = []
        for share in reversed(EXTREMES):
            one, most = (median(_of(found, nodes, share, over(other))) for nodes in (few, many))
            parts.append(f"{one:.2f} with one node and {most:.2f} with {many} if {_who(share)}")
        sentences += paragraph(f"- over {label}: {'; '.join(parts)}")[:-1]
    tails = [_of(found, nodes, EXTREMES[-1], _tail) for nodes in (few, many)]
    return [
        *paragraph(
            "All of this is simulated; no two machines were measured. `auto`'s mean end-to-end "
            "latency, below 1 where",
            "switching inside nodes gains:",
        ),
        *sentences,
        "",
        *paragraph(
            f"If all burst together, its P99 time to first token is {median(tails[0]):.2f} times "
            "that of `stock-dp`",
            f"with one node and {median(tails[1]):.2f} times with {many}.",
        ),
        *paragraph(
            "The best stock layout is one of three, known when all have been tried with the "
            "same requests. It is",
            f"{_winners(found)}. Each system's latency over the best stock layout's, in its "
            "worst row:",
            f"{_worst(found)}.",
        ),
    ]


def _tail(systems: Numbers) -> float:
    """`auto`'s P99 time to first token over that of `stock-dp`."""
    return float(systems["auto"]["p99_ttft_s"] / systems["stock-dp"]["p99_ttft_s"])


def _who(together: float) -> str:
    return "all burst together" if together else "each bursts at its own time"


def _winners(found: Kept) -> str:
    """Which stock layout is how often the best, by share of tenants that burst together."""
    said = []
    for share in TOGETHER:
        runs = [counts[str(share)] for one in found.seeds for counts in one["nodes"].values()]
        best = [
            next(name for name in STOCK if systems[name]["e2e_s"] == best_s(systems))
            for systems in runs
        ]
        parts = [f"`{name}` in {best.count(name)}" for name in STOCK if name in best]
        said.append(f"{' and '.join(parts)} of {len(runs)} runs with {share:g} together")
    return "; ".join(said)


def _worst(found: Kept) -> str:
    """How far each system is from the best stock layout, in the row in which it is farthest."""
    said = []
    for name in SYSTEMS:
        ratios = [
            median(_of(found, n, share, over("best", name))) for n in REPLICAS for share in TOGETHER
        ]
        said.append(f"`{name}` {max(ratios):.2f}")
    return ", ".join(said)


def _times(found: Kept) -> list[str]:
    rows = []
    for together in TOGETHER:
        for nodes in REPLICAS:
            cells = [
                _middle(_of(found, nodes, together, lambda one, n=name, k=key: one[n][k]))  # type: ignore[misc]
                for key in ("ttft_s", "p99_ttft_s")
                for name in SYSTEMS
            ]
            switches = _middle(
                _of(found, nodes, together, lambda one: one["auto"]["switches_per_node"])
            )
            rows.append([f"{together:g}", str(nodes), *cells, switches])
    means = [f"`{name}`" for name in SYSTEMS]
    return [
        "## Time to first token",
        "",
        "Mean in the first four columns, P99 in the next four, in s; switches of `auto` per node "
        "and run.",
        "",
        *markdown(
            ["together", "nodes", *means, *(f"P99 {name}" for name in means), "switches"], rows
        ),
    ]


def _long(found: Kept) -> list[str]:
    rows = []
    for share in EXTREMES:
        runs = [one["long"][str(share)] for one in found.seeds]
        times = [_middle([run[name]["e2e_s"] for run in runs]) for name in SYSTEMS]
        ratios = [_middle([over(other)(run) for run in runs]) for other in COMPARED]
        rows.append([f"{share:g}", *times, *ratios])
    return [
        "## With the paper's outputs",
        "",
        *paragraph(
            f"Mean end-to-end latency with {FEW} nodes and outputs of {LONG_OUTPUTS[0]} to "
            f"{LONG_OUTPUTS[1]} tokens:",
            "requests take longer than a burst.",
        ),
        *markdown(["together", *_HEADINGS], rows),
    ]


def _routers(found: Kept) -> list[str]:
    rows = []
    for share in EXTREMES:
        for name in SYSTEMS:
            for router in ROUTERS:
                runs = [one["routers"][router][str(share)][name] for one in found.seeds]
                keys = ("e2e_s", "ttft_s", "p99_ttft_s", "hit_rate", "most_over_mean")
                cells = [_middle([run[key] for run in runs]) for key in keys]
                rows.append([f"{share:g}", f"`{name}`", router, *cells])
    tokens = f"{SHARED_BLOCKS * MOONCAKE_BLOCK_TOKENS:,}"
    return [
        "## Routers, with prompts that begin alike",
        "",
        *paragraph(
            f"{FEW} nodes. All prompts of a tenant begin with the same {tokens} tokens, and each "
            "group of engines",
            "keeps the prompts that it has computed while it has memory for them, so that work "
            "is less than above. A",
            "node has memory for the beginnings of all tenants' prompts, so that every router "
            "finds most of them. E2E",
            "and TTFT are means. *Hits* is the share of all prompt tokens that was found there; "
            "*most* is how many",
            "requests the node got that got the most, over the mean.",
        ),
        *markdown(
            ["together", "system", "router", "E2E (s)", "TTFT (s)", "P99 TTFT (s)", "hits", "most"],
            rows,
        ),
    ]
