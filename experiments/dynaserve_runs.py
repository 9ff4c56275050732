"""What the page about DynaServe runs: workloads, servers, and the highest rate that a server
sustains.

Decided before the first run: the workloads below, 150 s of Poisson arrivals, three seeds, rates on
a grid of 4.5 %. A rate is *sustained* if 99 % of token gaps are within the target and at most 5 %
of requests have no second token when arrivals end: else a server that keeps requests waiting would
have no limit, as the target leaves the first token free.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import cache
from typing import Any, Literal, NamedTuple
from unittest.mock import patch

import numpy as np

from experiments.common import DATA
from flying_lab.sim import hardware, models
from flying_lab.sim.announced import Hint, exact
from flying_lab.sim.catalog import build
from flying_lab.sim.clock import Clock
from flying_lab.sim.cluster import Options
from flying_lab.sim.cost import LaneCost
from flying_lab.sim.fleet import feed
from flying_lab.sim.machine import Modelled
from flying_lab.sim.node import SimNode, System
from flying_lab.workload.model import Request
from flying_lab.workload.read import read_workload
from flying_serving.controller.requests import RequestState
from flying_serving.controller.splitter import Splitter

TARGET_S = 0.1
ARRIVALS_S = 150.0
WARM_S = 50.0
"""Gaps and tokens count from here to the end of arrivals."""
LEAST_KEPT, MOST_WAITING = 0.99, 0.05
GRID, STEPS = 1.045, 45
"""Rates that are tried: LOWEST of what two engines could do without any loss, and GRID times as
many each time.
"""
LOWEST = 0.3
CHUNKS = (256, 512, 1024, 2048)
"""Steps' tokens that colocated serving is tuned over, as in section 6.1."""
OPTIONS = Options(max_num_seqs=256, max_num_batched_tokens=2048)
SHAPES = {"P8192-D32": (8192, 32), "P2048-D512": (2048, 512), "P219-D1467": (219, 1467)}
LOGNORMAL = {
    "BurstGPT": ((770.0, 1.0), (104.0, 1.0)),
    "arXiv": ((6400.0, 0.5), (290.0, 0.5)),
    "Mini Reasoning": ((219.0, 0.5), (1467.0, 0.5)),
}
"""Mean and sigma of prompts and outputs; docs/lab/results/settings.md has their sources."""
WORKLOADS = ("BurstGPT", "Azure Code", "arXiv", "Mini Reasoning")
HYBRID = "hybrid"
Name = Literal["split", "disagg", "coloc", "coloc to target"]
Draw = Callable[[np.random.Generator, int], tuple[Any, Any]]


@cache
def machine() -> Modelled:
    """Qwen2.5-14B on two A100 80 GB."""
    return Modelled(models.load("qwen2.5-14b"), hardware.parse_devices("a100x2"))


def lengths(name: str) -> Draw:
    """What draws prompts and outputs of a workload, or of a shape."""
    if name in SHAPES:
        return lambda rng, count: tuple(np.full(count, tokens) for tokens in SHAPES[name])  # type: ignore[return-value]
    if name in LOGNORMAL:
        return lambda rng, count: tuple(_lognormal(rng, count, *shape) for shape in LOGNORMAL[name])  # type: ignore[return-value]
    if name == "Azure Code":
        rows = read_workload(DATA / "traces" / "azure_code.csv", 1).requests
        table = np.array([(row.prompt_tokens, row.output_tokens) for row in rows])
        return lambda rng, count: tuple(table[rng.integers(len(table), size=count)].T)  # type: ignore[return-value]
    burst, azure = lengths("BurstGPT"), lengths("Azure Code")

    def mixed(rng: np.random.Generator, count: int) -> tuple[Any, Any]:
        first = rng.random(count) < 0.5
        pairs = zip(burst(rng, count), azure(rng, count), strict=True)
        prompts, outputs = (np.where(first, *pair) for pair in pairs)
        return prompts, outputs

    return mixed


def _lognormal(rng: np.random.Generator, count: int, mean: float, sigma: float) -> Any:
    drawn = rng.lognormal(np.log(mean) - sigma**2 / 2, sigma, count)
    return np.clip(np.rint(drawn), 1, 32_000).astype(int)


def normal(sigma: float) -> Draw:
    """P219 with outputs of a normal distribution, as in table 4."""

    def draw(rng: np.random.Generator, count: int) -> tuple[Any, Any]:
        outputs = np.maximum(1, np.rint(rng.normal(1467.0, sigma, count))).astype(int)
        return np.full(count, 219), outputs

    return draw


def requests(draw: Draw, rate_rps: float, seed: int) -> list[Request]:
    """Poisson arrivals; requests of one seed are the same at all rates."""
    count = int(2 * rate_rps * ARRIVALS_S) + 50
    arrivals_s = np.cumsum(np.random.default_rng([seed, 1]).exponential(size=count)) / rate_rps
    prompts, outputs = draw(np.random.default_rng([seed, 2]), count)
    rows = zip(arrivals_s.tolist(), prompts.tolist(), outputs.tolist(), strict=True)
    return [Request(index, *row) for index, row in enumerate(rows) if row[0] < ARRIVALS_S]


def server(
    name: Name,
    chunk: int = 2048,
    hint: Hint = exact,
    target_s: float = TARGET_S,
) -> System:
    """A system of a name.

    `split` and colocated serving to the target keep to `target_s`. Clients of `split` say how long
    outputs will be, as the paper's predictor does.
    """
    options = replace(OPTIONS, max_num_batched_tokens=chunk)
    if name.endswith("target") or name == "split":
        options = replace(options, tbt_slo_s=target_s)
    one = build(
        {"split": "split", "disagg": "pd-disagg"}.get(name, "round-robin"), machine(), 1, options
    )
    return replace(one, hint=hint) if name == "split" else one


class TimedPlan(NamedTuple):
    """Probes of a plan of the splitter, and the processor time that it took."""

    probes: int
    took_s: float


@contextmanager
def plans_timed() -> Iterator[list[TimedPlan]]:
    """Give a list that gets each plan which a splitter makes until the end of the context."""
    planned: list[TimedPlan] = []
    plan = vars(Splitter)["_plan"]

    def timed(mine: Splitter, request: RequestState, *asked: Any) -> int:
        began_s = time.thread_time()
        at = plan(mine, request, *asked)
        assert request.plan is not None
        planned.append(TimedPlan(request.plan.probes, time.thread_time() - began_s))
        return int(at)

    with patch.object(Splitter, "_plan", timed):
        yield planned


@dataclass(frozen=True)
class Served:
    """What a run has found until arrivals end; `node`: the server then."""

    node: SimNode
    figures: dict[str, float]

    @property
    def sustained(self) -> bool:
        """Whether the server kept up, and to the target."""
        return self.figures["attainment"] >= LEAST_KEPT and self.keeps_up

    @property
    def keeps_up(self) -> bool:
        """Whether the server kept up, however long tokens took."""
        return self.figures["waiting"] <= MOST_WAITING


def serve(one: System, offered: Sequence[Request]) -> Served:
    """Serve requests until arrivals end."""
    node = SimNode(one, clock := Clock(-1.0))
    node.start()
    feed(offered, clock, node.arrive)
    while clock.now_s < ARRIVALS_S and clock.step():
        pass
    for request in node.open.values():
        if request.group is not None:
            node.cluster.lanes[request.group].decoding.sync(request)
    everyone = [*node.outcome.ended, *node.open.values()]
    waiting = sum(one.tokens < min(2, one.output_tokens) for one in everyone)
    times = [np.asarray(one.token_s) for one in everyone]
    ends = np.concatenate([one[1:] for one in times])
    gaps = np.concatenate([np.diff(one) for one in times])[ends >= WARM_S]
    first = np.array([one.first_token_s for one in everyone])
    begun = ~np.isnan(first) & (first >= WARM_S)
    kept, span_s = float((gaps <= TARGET_S).sum()), ARRIVALS_S - WARM_S
    ttft_s = first - np.array([one.arrival_s for one in everyone])
    figures = {
        "p50_ms": float(np.percentile(gaps, 50)) * 1e3,
        "p99_ms": float(np.percentile(gaps, 99)) * 1e3,
        "attainment": kept / len(gaps),
        "goodput": (kept + int(begun.sum())) / span_s,
        "ttft_s": float(np.median(ttft_s[begun])),
        "waiting": waiting / len(everyone),
    }
    return Served(node, figures)


def grid(draw: Draw) -> list[float]:
    """Rates that are tried with a workload."""
    prompts, outputs = draw(np.random.default_rng(0), 2000)
    cost = LaneCost(machine().model, machine().kind.hardware, 1)
    context = float(np.mean(prompts) + np.mean(outputs) / 2)
    prompt_s = float(np.mean(prompts)) * cost.step_s(0, 0, ((2048, 0),)) / 2048
    token_s = cost.step_s(64, 64 * context) / 64
    best = machine().devices / (prompt_s + float(np.mean(outputs)) * token_s)
    return [float(LOWEST * best * GRID**step) for step in range(STEPS)]


def highest(
    one: System, draw: Draw, seed: int, holds: Callable[[Served], bool]
) -> tuple[float, Served]:
    """The highest rate of the grid at which a server does what it has to, and that run."""
    rates, low, high = grid(draw), 0, STEPS
    best = serve(one, requests(draw, rates[0], seed))
    while high - low > 1:
        middle = (low + high) // 2
        found = serve(one, requests(draw, rates[middle], seed))
        if holds(found):
            low, best = middle, found
        else:
            high = middle
    return rates[low], best
