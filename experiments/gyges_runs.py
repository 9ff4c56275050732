"""What the page about Gyges runs: workloads, servers and what is measured of them.

Decided before the first run: Qwen2.5-32B on eight H20, 14.3 GB of activations, steps of at most
2,048 tokens, three seeds, Poisson arrivals. *Scheduler*: section 6.2.4's prompts, 1,024 tokens 60
times and 51,200 once a minute; outputs are 10.3 % of each request, as they are in the paper's trace
on average; the same at FACTORS times these rates, for 480 s, of which tokens count from 60 s on.
*Trace*: the paper's is private; prompts and outputs drawn from the first 700 requests of Mooncake's
conversations, of which 9 % exceed one device, at RATES for 400 s, until all have ended.

Added when the first results had been seen: `loongserve-serial` and `kunserve-serial`. Until policy
`gyges` was in the product, a class of the simulator alone joined and parted engines; its runs are
in the repository's history.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from functools import cache
from statistics import mean
from typing import Any

import numpy as np

from experiments.common import DATA, Numbers
from flying_lab.sim import hardware, models
from flying_lab.sim.catalog import build
from flying_lab.sim.clock import Clock
from flying_lab.sim.cluster import Options
from flying_lab.sim.fleet import feed
from flying_lab.sim.machine import Modelled
from flying_lab.sim.node import SimNode, System
from flying_lab.sim.requests import SimRequest
from flying_lab.workload.model import Request

ACTIVATIONS_BYTES = 14.3e9
OPTIONS = Options(max_num_seqs=256, max_num_batched_tokens=2048)
SCHEDULED_S, WARM_S, TRACE_S = 480.0, 60.0, 400.0
SHORT, LONG = (1024, 118), (51_200, 5879)
"""Prompt and output."""
SHORT_RPS, LONG_RPS = 1.0, 1.0 / 60.0
FACTORS = (1, 4, 8)
RATES = (0.3, 0.6, 0.9, 1.2)
"""Requests per second of the trace; the paper's figure has 0.6 among its own."""
ROUTES = ("gyges-paper", "gyges-round-robin", "gyges-least-load")
SYSTEMS = (
    "gyges-paper",
    "gyges-stopped",
    "loongserve",
    "loongserve-serial",
    "kunserve",
    "kunserve-serial",
    "seesaw",
)


@cache
def machine() -> Modelled:
    """The paper's, with H20."""
    return Modelled(
        models.load("qwen2.5-32b"), hardware.parse_devices("h20x8"), activations=ACTIVATIONS_BYTES
    )


def server(name: str) -> System:
    """One of ROUTES or SYSTEMS, engines of one device."""
    return build(name, machine(), 1, OPTIONS)


def scheduled(factor: float, seed: int) -> list[Request]:
    """Short and long requests, at `factor` times the paper's rates."""
    arrivals = []
    for kind, (rate_rps, (prompt, output)) in enumerate(((SHORT_RPS, SHORT), (LONG_RPS, LONG))):
        times_s = _arrivals(np.random.default_rng([seed, kind]), factor * rate_rps, SCHEDULED_S)
        arrivals += [(time_s, prompt, output) for time_s in times_s]
    return [Request(index, *row) for index, row in enumerate(sorted(arrivals))]


def traced(rate_rps: float, seed: int) -> list[Request]:
    """Lengths of Mooncake's conversations."""
    times_s = _arrivals(np.random.default_rng([seed, 1]), rate_rps, TRACE_S)
    rows = _conversations()
    chosen = np.random.default_rng([seed, 2]).integers(len(rows), size=len(times_s))
    return [
        Request(index, time_s, *rows[row])
        for index, (time_s, row) in enumerate(zip(times_s, chosen, strict=True))
    ]


@cache
def _conversations() -> list[tuple[int, int]]:
    path = DATA / "traces" / "mooncake_conversation.jsonl"
    rows = [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]
    return [(row["input_length"], max(1, row["output_length"])) for row in rows]


def _arrivals(rng: np.random.Generator, rate_rps: float, until_s: float) -> list[float]:
    """Requests of one seed are the same at all rates, and arrive the faster."""
    gaps_s = rng.exponential(size=int(2 * rate_rps * until_s) + 50) / rate_rps
    times_s: list[Any] = np.cumsum(gaps_s).tolist()
    return [time_s for time_s in times_s if time_s < until_s]


def serve(one: System, offered: Sequence[Request], until_s: float, *, drain: bool) -> Numbers:
    """Serve requests until arrivals end at `until_s`, or with `drain` until all are over."""
    node = SimNode(one, clock := Clock(-1.0))
    node.start()
    feed(offered, clock, node.arrive)
    while (drain or clock.now_s < until_s) and clock.step():
        pass
    for request in node.open.values():
        if request.group is not None:
            node.cluster.lanes[request.group].decoding.sync(request)
    everyone = [*node.outcome.ended, *node.open.values()]
    times_s = np.concatenate([np.asarray(request.token_s) for request in everyone])
    counted = (times_s >= WARM_S) & (times_s < until_s)
    switches = node.outcome.switches
    return {
        "tokens_per_s": float(counted.sum()) / (until_s - WARM_S),
        "joined": sum(len(one.new.groups) < len(one.old.groups) for one in switches),
        "refused": len(node.outcome.refused),
        **_latencies(node.outcome.ended),
    }


def _latencies(ended: Sequence[SimRequest]) -> dict[str, float]:
    ttft_s = [request.first_token_s - request.arrival_s for request in ended]
    gaps_s = [(r.end_s - r.first_token_s) / (r.tokens - 1) for r in ended if r.tokens > 1]
    return {"ttft_s": mean(ttft_s), "tpot_s": mean(gaps_s)}
