"""Two nodes of two engines behind vllm-router: how requests and prefix hits divide; a node that is
killed, or drains.

python -m benchmarks.nodes [--times 5] [--policies cache_aware power_of_two]

For each policy a deployment of its own (`flying_deploy.vllm_router`), the tiny model:

1. Balance: the same 200 streams straight to one node, and through the router; tokens are compared.
   Prefixes of 256 tokens are shared by 5 requests each. With `power_of_two` 12 new requests arrive
   per second, else 16 clients ask.
2. Kill: 12 streams of 200 tokens and bursts of 2 short requests every 0.25 s; one node gets
   SIGKILL.
3. Drain: the same, but the node is told to drain, and to take requests again as soon as it has
   none.

Nodes, router and client share the cores, so a node that starts again slows down the other.
"""

import argparse
import asyncio
import os
import statistics
import time
from collections.abc import Sequence

from benchmarks.systems import commit
from flying_lab.signals import ended_by_signals
from harness.nodes import scenarios
from harness.nodes.deployment import Counts, Deployment
from harness.nodes.load import ask_all, mixed
from harness.nodes.scenarios import Figures

POLICIES = ("cache_aware", "power_of_two", "consistent_hash", "round_robin", "random")
COUNT, PREFIXES, CLIENTS, RATE, SEED = 200, 40, 16, 12.0, 29
SETTLED_S = 3.0


def balance(deployment: Deployment, policy: str) -> str:
    """Send the same requests to one node and through the router. Returns a row."""
    bodies, nodes = mixed(COUNT, PREFIXES, SEED), deployment.nodes()
    counts = Counts(nodes[:1])
    alone = asyncio.run(ask_all(nodes[0].url, bodies, clients=CLIENTS, cache_salt="alone"))
    hits, counts = counts.hits, Counts(nodes)
    paced = policy == "power_of_two"
    clients, rate = (COUNT, RATE) if paced else (CLIENTS, None)
    asked = asyncio.run(
        ask_all(deployment.url, bodies, clients=clients, rate=rate, cache_salt="all")
    )
    failed = sum(one.problem is not None for one in (*alone, *asked))
    wrong = sum(
        one.answer.tokens != other.answer.tokens for one, other in zip(asked, alone, strict=True)
    )
    requests = " / ".join(f"{count:.0f}" for count in counts.requests)
    shares = f"{f'{counts.hits:.3f} / {hits:.3f}':>16}{counts.hits / hits:>8.2f}"
    return f"{policy:<17}{requests:>11}{counts.difference:>12.3f}{shares}{failed:>8}{wrong:>7}"


def row(what: str, found: Sequence[Figures]) -> str:
    """What became of requests in all runs; times as median / worst."""
    on_node, broken = sum(one.on_node for one in found), sum(len(one.broken) for one in found)
    refused, new = sum(len(one.refused) for one in found), sum(len(one.new) for one in found)
    times = [
        _times([one.worst_new_s for one in found]),
        _times([one.worst_gap_s for one in found]),
        _times([one.back_s for one in found if one.back_s is not None]),
        _times([one.used_s for one in found if one.used_s is not None]),
    ]
    counts = f"{len(found):>3}{f'{broken} of {on_node}':>12}{f'{refused} of {new}':>13}"
    return f"{what:<24}{counts}" + "".join(f"{each:>14}" for each in times)


def _times(seconds: Sequence[float]) -> str:
    return f"{statistics.median(seconds):.2f} / {max(seconds):.2f}" if seconds else "-"


def main() -> None:
    """Run from the command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--times", type=int, default=5, help="how often a node is killed, and drained"
    )
    parser.add_argument(
        "--policies", nargs="+", choices=POLICIES, default=["cache_aware", "power_of_two"]
    )
    args = parser.parse_args()
    balances, events = [], []
    for policy in args.policies:
        with Deployment.of_nodes(2, f"--router-policy={policy}") as deployment:
            balances.append(balance(deployment, policy))
            print(balances[-1], flush=True)
            for what, scenario in (("drained", scenarios.drained), ("killed", scenarios.killed)):
                found = []
                for number in range(args.times):
                    found.append(asyncio.run(scenario(deployment, number % 2, SEED + number)))
                    time.sleep(SETTLED_S)
                events.append(row(f"{policy}, {what}", found))
                print(events[-1], flush=True)
    print(
        f"\n{commit()}, {os.cpu_count()} processors, load {os.getloadavg()[0]:.1f}; times in s, "
        "median / worst\n"
    )
    print(
        f"{'policy':<17}{'requests':>11}{'difference':>12}"
        f"{'hits, alone':>16}{'share':>8}{'failed':>8}{'wrong':>7}"
    )
    print("\n".join(balances))
    names = ("new: TTFT", "others: gap", "back / empty", "used")
    print(
        f"\n{'policy, node':<24}{'n':>3}{'broken':>12}{'new failed':>13}"
        + "".join(f"{name:>14}" for name in names)
    )
    print("\n".join(events))


if __name__ == "__main__":
    with ended_by_signals():
        main()
