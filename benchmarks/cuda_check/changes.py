"""Lines in which groups change while requests run."""

import random
import time
from concurrent.futures import ThreadPoolExecutor

from benchmarks.cuda_check.asking import LAYOUTS, PROMPTS, ask, require
from benchmarks.cuda_check.site import Site
from harness.live import Server, wait_until
from harness.losing import is_whole, kill

STORM_S = 15.0
BACK_S = 90.0
CUTOVER_MS = 0.5
MODES = ("weave", "hard", "sequential", "soft", "migrate")


def storm(site: Site) -> str:
    """Switch layouts at random under seeded requests; each answer is the one without switches."""
    server, draw = site["ours float32"], random.Random(5)
    server.layout(LAYOUTS[1])
    fields = {"temperature": 1.0, "seed": 3, "ignore_eos": True, "max_tokens": 120}
    expected = [ask(server, prompt, **fields)["token_ids"] for prompt in PROMPTS]
    ends_s = time.monotonic() + STORM_S
    wrong, answers, switches = [0], [0], 0

    def feed(which: int) -> None:
        while time.monotonic() < ends_s:
            answers[0] += 1
            wrong[0] += ask(server, PROMPTS[which], **fields)["token_ids"] != expected[which]

    with ThreadPoolExecutor(len(PROMPTS)) as pool:
        feeds = [pool.submit(feed, which) for which in range(len(PROMPTS))]
        while time.monotonic() < ends_s:
            server.layout(draw.choice(list(LAYOUTS.values())), draw.choice(MODES))
            switches += 1
            time.sleep(draw.random() * 0.2)
        for done in feeds:
            done.result()
    server.check()
    figure = f"{answers[0]} answers, {wrong[0]} wrong, {switches} switches"
    require(wrong[0] == 0, figure)
    return figure


def migrations(site: Site) -> str:
    """Migrate running requests to a wider group and back: their KV goes with them."""
    server = site["ours float32"]
    server.layout(LAYOUTS[1])
    before = _migrated(server)
    with ThreadPoolExecutor(4) as pool:
        long = {"ignore_eos": True, "max_tokens": 600, "temperature": 0.0}
        running = [pool.submit(ask, server, PROMPTS[k], **long) for k in range(4)]
        wait_until(lambda: server.requests("running") == 4, server.status)
        for degree in (4, 1, 2):
            server.layout(LAYOUTS[degree], "migrate")
            time.sleep(0.2)
        for done in running:
            done.result()
    arrived = {name: count - before[name] for name, count in _migrated(server).items()}
    costs = server.status()["migration_cost"]
    figure = ", ".join(
        [
            *(f"{name} {count}" for name, count in sorted(arrived.items())),
            *(f"{1e6 * cost['token_s']:.2f} us a token to {p}" for p, cost in costs.items()),
        ]
    )
    require(arrived["migrated"] > 0, figure)
    return figure


def _migrated(server: Server) -> dict[str, int]:
    """Return the counts of migrations over all engines."""
    counts = [engine["migrations"] for engine in server.status()["engines"]]
    return {name: sum(of[name] for of in counts) for name in counts[0]}


def cutover(site: Site) -> str:
    """Return the worst time of the switches so far beyond the step that was under way.

    The engines wait for each other in a switch, so on a CPU with fewer cores this is their turn.
    """
    times_ms = [switch["overhead_ms"] for switch in site["ours float32"].switches()]
    require(bool(times_ms), "there was no switch")
    figure = f"{max(times_ms):.2f} ms at most beyond the step, of {len(times_ms)} switches"
    require(max(times_ms) < CUTOVER_MS, figure)
    return figure


def loss(site: Site) -> str:
    """Kill an engine: the others go on, and it comes back and gives the same answer in a group."""
    server = site["ours float32"]
    server.layout(LAYOUTS[2])
    fields = {"temperature": 0.0, "vllm_xargs": {"tp_degree": 2}}
    expected = ask(server, PROMPTS[0], **fields)["token_ids"]
    began_s = time.monotonic()
    kill(server, 1)
    ask(server, PROMPTS[0], temperature=0.0)
    went_on_s = time.monotonic() - began_s
    wait_until(lambda: is_whole(server), server.log, BACK_S)
    whole_s = time.monotonic() - began_s
    server.layout(LAYOUTS[2])
    figure = f"an answer after {went_on_s:.1f} s, whole again after {whole_s:.1f}"
    again = [ask(server, PROMPTS[0], **fields)["token_ids"] for _ in range(2)]
    require(again == [expected] * 2, f"{figure}; another answer than before")
    return figure
