"""Nodes of each system behind a router, by number of nodes and by how many tenants burst
together.
"""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from experiments.common import FIRST, Numbers, Setting, system
from experiments.tenants import Tenants
from flying_lab.sim.fleet import Fleet
from flying_lab.sim.requests import SimRequest
from flying_lab.sim.routing import RouterName, make_router
from flying_lab.workload.model import MOONCAKE_BLOCK_TOKENS

MODEL = "llama-3-70b"
FIRST_S, COUNTED_S, LAST_S = 30.0, 30.0, 10.0
"""Requests arrive for so long before, while and after those that count."""
SECONDS = FIRST_S + COUNTED_S + LAST_S
REPLICAS = {1: 6, 4: 2, 16: 1, 64: 1}
"""By number of nodes, how many such runs are made with one seed; one in the other sections."""
ONCE = 64
"""So many nodes are served with the first seed only: they average over themselves, and take
longest.
"""
TOGETHER = (0.0, 0.5, 1.0)
STOCK = ("stock-dp", "stock-tp4", "stock-tp")
SYSTEMS = ("auto", *STOCK)
FEW = 4
"""Nodes of the sections beside the main one, with EXTREMES of `together`."""
EXTREMES = (0.0, 1.0)
ROUTERS: tuple[RouterName, ...] = ("cache-aware", "least-load", "round-robin")
SHARED_BLOCKS = 2
"""Blocks that all prompts of a tenant begin with, where routers are compared."""
LONG_OUTPUTS = (64, 512)
"""The paper's."""


def measure(setting: Setting) -> Numbers:
    """By nodes, share of tenants that burst together and system; with long outputs; by router."""
    counts = [count for count in REPLICAS if count != ONCE or setting == FIRST]
    return {
        "nodes": {str(count): measure_nodes(count, setting) for count in counts},
        "long": {str(share): measure_long(share, setting) for share in EXTREMES},
        "routers": {
            name: {str(share): measure_router(name, share, setting) for share in EXTREMES}
            for name in ROUTERS
        },
    }


def measure_nodes(nodes: int, setting: Setting) -> Numbers:
    """Without prompts that begin alike, by which the cache-aware router does what least load
    does.
    """
    counts, found = REPLICAS[nodes], {}
    for together in TOGETHER:
        found[str(together)] = _serve_all(
            Tenants(nodes, together, SECONDS), setting, replicas=counts
        )
    return found


def measure_long(together: float, setting: Setting) -> Numbers:
    """With the paper's outputs."""
    return _serve_all(Tenants(FEW, together, SECONDS, output_tokens=LONG_OUTPUTS), setting)


def measure_router(name: RouterName, together: float, setting: Setting) -> Numbers:
    """With prompts that begin alike, which nodes keep."""
    return _serve_all(Tenants(FEW, together, SECONDS, SHARED_BLOCKS), setting, name)


def _serve_all(
    tenants: Tenants, setting: Setting, router: RouterName = "least-load", *, replicas: int = 1
) -> Numbers:
    return {name: _serve(name, tenants, setting, router, replicas) for name in SYSTEMS}


def _serve(
    name: str, tenants: Tenants, setting: Setting, router: RouterName, replicas: int
) -> Numbers:
    """Times in s of one system's requests that count."""
    server = system(name, MODEL, setting, keep_times=False)
    if tenants.shared_blocks:
        server = replace(server, hash_id_tokens=MOONCAKE_BLOCK_TOKENS)
    ended: list[SimRequest] = []
    fleets = []
    for replica in range(replicas):
        fleets.append(fleet := Fleet(server, tenants.nodes, make_router(router)))
        fleet.run(tenants.requests(setting.seed, replica))
        ended += fleet.outcome().ended
    counted = [one for one in ended if FIRST_S <= one.arrival_s < FIRST_S + COUNTED_S]
    ttft_s = np.array([one.first_token_s - one.arrival_s for one in counted])
    e2e_s = np.array([one.end_s - one.arrival_s for one in counted])
    prefixes = np.array([fleet.prefix_tokens() for fleet in fleets]).sum(axis=0)
    return {
        "requests": len(counted),
        "not_served": sum(sum(fleet.routed) for fleet in fleets) - len(ended),
        "e2e_s": float(e2e_s.mean()),
        "p99_e2e_s": float(np.percentile(e2e_s, 99)),
        "ttft_s": float(ttft_s.mean()),
        "p99_ttft_s": float(np.percentile(ttft_s, 99)),
        "switches_per_node": sum(len(fleet.outcome().switches) for fleet in fleets)
        / len(fleets)
        / tenants.nodes,
        "most_over_mean": max(
            max(fleet.routed) * tenants.nodes / sum(fleet.routed) for fleet in fleets
        ),
        "hit_rate": float(prefixes[1] / prefixes[0]) if prefixes[0] else 0.0,
    }
