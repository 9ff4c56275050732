"""Ten times of what a server can serve, with long prompts, slow readers and clients that leave; one
live server.

python -m benchmarks.flood [--seconds 300] [--other-seconds 60]

Four engines with `auto` and `--max-queue-wait-s 2`, the tiny model, one round. Prompts have 768 to
1,536 tokens, outputs 16 to 48, drawn evenly; no prefix is shared. In this order, and 1 and 2 end
when all of their requests have:

1. Capacity: CLIENTS clients in a closed loop, for --other-seconds; one that is refused comes again
   after a second. LEAVING of them leave after a random number of events, as in the flood: what they
   get is lost in both.
2. Before: half of the requests/s of 1, at random times, all of whose clients stay, for
   --other-seconds.
3. The flood: ten times the requests/s of 1, at random times, for --seconds. LEAVING of the clients
   leave; SLOW of them take 256 bytes, about one event, each second. Whoever is refused does not
   come again.
4. After: as 2, with the same lengths and times, from the end of the flood on, when its last
   requests still run.

Goodput: output tokens/s that arrived within the time of 1 or 3, of requests that were not refused
and whose client stayed; the first SETTLE_S of each do not count. Bar: in 3 at least 0.95 of 1.
Latency: of requests that were sent later than SETTLE_S after the beginning of 2 or 4; normal is a
median of TTFT and of time per token of at most 1.25 times that before. As half of the capacity is
asked for then, a backlog of B seconds of work is gone 2 B after the flood: hence the 2 s, and eight
requests per engine. Memory: proportional set sizes of all processes of the server, every 2 s.
Client and server share the cores, so their shares of processor time, and that of all others, are
printed with each part. Beside other work goodput follows what that leaves: tokens per second of the
server's own processor time tell what refusing takes.
"""

import argparse
import asyncio
import random
import time
from collections import Counter
from dataclasses import dataclass, field
from statistics import median, quantiles
from urllib.parse import urlsplit

import httpx
import uvloop

from benchmarks.client import poisson
from benchmarks.flood_client import Clients, Mix, Outcome
from benchmarks.server_watch import Watch
from benchmarks.systems import ROOT, System, commit
from flying_lab.signals import ended_by_signals
from flying_lab.tiny_models.checkpoint import make_model

NAME, ENGINES, CLIENTS, TIMES, SEED = "tiny", 4, 32, 10, 28
LEAVING, SLOW, SETTLE_S = 0.1, 0.1, 10.0
PROMPT_TOKENS, OUTPUT_TOKENS = (768, 1536), (16, 48)
IDLE_S = 120.0
FLAGS = [
    f"--data-parallel-size={ENGINES}",
    f"--served-model-name={NAME}",
    "--policy=auto",
    "--max-queue-wait-s=2",
    "--dtype=float32",
    "--enforce-eager",
    "--max-num-seqs=8",
    "--max-num-batched-tokens=512",
    "--max-model-len=2048",
    "--block-size=32",
    "--kv-cache-memory-bytes=134217728",
    "--disable-uvicorn-access-log",
]


@dataclass
class Part:
    """What was sent from `began_s` to `ended_s`."""

    name: str
    began_s: float
    ended_s: float
    sent: list[Outcome] = field(default_factory=list)
    server_s: float = 0.0
    tokens: int = 0

    def measure(self, watch: Watch) -> str:
        """Note the server's processor time, at the end of what is counted by it. Returns all
        shares.
        """
        shares, self.server_s = watch.shares(), watch.server_s
        self.tokens = sum(
            len(one.event_s) for one in self.sent if one.status == 200 and one.leave_after is None
        )
        return shares

    @property
    def tokens_per_server_s(self) -> float:
        """Tokens that clients had which stay, per second of the server's processor time."""
        return self.tokens / self.server_s

    @property
    def goodput(self) -> float:
        """Output tokens/s of clients that stayed."""
        first_s = self.began_s + min(SETTLE_S, (self.ended_s - self.began_s) / 4)
        stayed = [one for one in self.sent if one.done and one.leave_after is None]
        tokens = sum(first_s <= at_s <= self.ended_s for one in stayed for at_s in one.event_s)
        return tokens / (self.ended_s - first_s)

    @property
    def over_per_s(self) -> float:
        """Requests/s that have ended, or whose clients have left."""
        ended = [
            one.event_s[-1] if one.event_s else one.sent_s for one in self.sent if one.status == 200
        ]
        return sum(at_s <= self.ended_s for at_s in ended) / (self.ended_s - self.began_s)

    def settled(self) -> list[Outcome]:
        """Requests by which latency is measured."""
        first_s = self.began_s + min(SETTLE_S, (self.ended_s - self.began_s) / 4)
        return [
            one
            for one in self.sent
            if one.sent_s >= first_s and one.done and one.leave_after is None
        ]

    def report(self, shares: str) -> None:
        """Print what became of the requests; `shares`: of processor time."""
        statuses = Counter("no answer" if one.status == 0 else str(one.status) for one in self.sent)
        taken = [one for one in self.sent if one.status == 200]
        left = [one for one in taken if one.leave_after is not None]
        failed = sum(not one.done and one.leave_after is None for one in taken)
        print(
            f"{self.name}: {len(self.sent)} sent in {self.ended_s - self.began_s:.0f} s, answers "
            f"{dict(statuses)};"
        )
        print(
            f"  {len(left)} clients left, {sum(one.slow for one in taken)} read slowly, {failed} "
            "streams did not end"
        )
        print(f"  goodput {self.goodput:.1f} tokens/s; processor time: {shares}")
        ttft_s = [one.ttft_s for one in self.settled() if not one.slow]
        tpot_ms = [1e3 * one.tpot_s for one in self.settled() if not one.slow]
        if len(ttft_s) > 1:
            for name, values, unit in (("TTFT", ttft_s, "s"), ("time per token", tpot_ms, "ms")):
                print(
                    f"  {name} median {median(values):.3f} {unit}, P95 "
                    f"{quantiles(values, n=20)[-1]:.3f}",
                    flush=True,
                )


async def closed(clients: Clients, mix: Mix, seconds: float) -> Part:
    """The closed loop."""
    clients.sent = []
    began_s = time.monotonic()
    await clients.closed(mix, seconds, CLIENTS)
    return Part("capacity", began_s, began_s + seconds, clients.sent)


async def opened(
    clients: Clients, name: str, mix: Mix, arrivals_s: list[float], seconds: float
) -> tuple[Part, list[asyncio.Task[Outcome]]]:
    """A part in which clients do not wait for each other. Returns it at its end, and what is under
    way.
    """
    clients.sent = []
    began_s = time.monotonic()
    tasks = await clients.open(mix, arrivals_s)
    await asyncio.sleep(max(0.0, began_s + seconds - time.monotonic()))
    return Part(name, began_s, began_s + seconds, clients.sent), tasks


async def flood(system: System, options: argparse.Namespace) -> tuple[list[Part], list[float]]:
    """All parts, and the memory in MiB before the flood, largest, and after."""
    address = urlsplit(system.url)
    assert address.hostname is not None and address.port is not None
    clients = Clients(address.hostname, address.port, NAME, random.Random(SEED))
    stay, leave = Mix(PROMPT_TOKENS, OUTPUT_TOKENS), Mix(PROMPT_TOKENS, OUTPUT_TOKENS, LEAVING)
    mixed = Mix(PROMPT_TOKENS, OUTPUT_TOKENS, LEAVING, SLOW)
    watch, other_s = Watch(system.process.pid), options.other_seconds
    first_mib = watch.look()
    looking = asyncio.create_task(watch.keep_looking())
    capacity = await closed(clients, leave, other_s)
    capacity.report(capacity.measure(watch))
    rate = capacity.over_per_s
    half, ten_times = poisson(rate / 2, other_s, SEED), poisson(TIMES * rate, options.seconds, SEED)
    print(f"  {rate:.2f} requests/s; {watch.mib[-1]:.0f} MiB, {first_mib:.0f} at the start")

    clients.reseed(SEED)
    before, tasks = await opened(clients, "before", stay, half, other_s)
    await asyncio.gather(*tasks)
    before.report(before.measure(watch))
    before_mib, watch.mib = watch.look(), []
    print(f"  memory in MiB: {watch.kinds}")

    flooded, slow = await opened(clients, "flood", mixed, ten_times, options.seconds)
    largest_mib, shares = max(watch.mib), flooded.measure(watch)
    clients.reseed(SEED)
    after, tasks = await opened(clients, "after", stay, half, other_s)
    await asyncio.gather(*tasks, *slow)
    flooded.report(shares)
    after.report(after.measure(watch))
    looking.cancel()
    last_mib = watch.look()
    print(f"  memory in MiB: {watch.kinds}")
    return [capacity, before, flooded, after], [before_mib, largest_mib, last_mib]


def compare(parts: list[Part], mib: list[float]) -> None:
    """Print what is held against the bars."""
    capacity, before, flooded, after = parts
    print(
        f"goodput in the flood: {flooded.goodput / capacity.goodput:.3f} of that at capacity "
        "(bar 0.95)"
    )
    by_processor = flooded.tokens_per_server_s / capacity.tokens_per_server_s
    print(
        f"tokens per second of the server's processor time: {by_processor:.3f} of those at capacity"
    )
    print(
        f"memory (PSS): {mib[0]:.0f} MiB before, {mib[1]:.0f} at most in the flood, {mib[2]:.0f} "
        "after"
    )
    times = [
        (median(o.ttft_s for o in p.settled()), median(o.tpot_s for o in p.settled()))
        for p in (before, after)
    ]
    ttft, tpot = (then / now for now, then in zip(*times, strict=True))
    print(f"after / before, medians: TTFT {ttft:.2f}, time per token {tpot:.2f} (bar 1.25)")


def until_idle(system: System) -> None:
    """Wait until nothing waits or runs, and check the books. Raises TimeoutError, or
    httpx.HTTPStatusError.
    """
    until_s = time.monotonic() + IDLE_S
    while any((status := system.ask("status"))["requests"].values()):
        if time.monotonic() > until_s:
            raise TimeoutError(f"not idle: {status['requests']}")
        time.sleep(0.5)
    httpx.post(f"{system.url}/flying/check", json={}, timeout=60).raise_for_status()


def main() -> None:
    """Start the server and flood it."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--seconds", type=float, default=300.0, help="of the flood")
    parser.add_argument("--other-seconds", type=float, default=60.0, help="of each other part")
    options = parser.parse_args()
    system = System("flood", make_model(ROOT / ".models" / "llama", "llama"), FLAGS, ours=True)
    try:
        print(
            f"{commit()}: {time.strftime('%Y-%m-%d %H:%M')}, ready in {system.ready_s:.0f} s",
            flush=True,
        )
        parts, mib = uvloop.run(flood(system, options))
        compare(parts, mib)
        until_idle(system)
        print(f"switches: {len(system.ask('switches')['switches'])}")
    finally:
        system.stop()


if __name__ == "__main__":
    with ended_by_signals():
        main()
