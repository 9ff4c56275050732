"""Lines in which groups change while requests run."""

import random
import statistics
import time
from concurrent.futures import ThreadPoolExecutor

from benchmarks.cuda_check.asking import APART, LAYOUTS, PROMPTS, TOGETHER, ask, drawn, require
from benchmarks.cuda_check.site import Site
from harness.live import Server, wait_until
from harness.losing import is_whole, kill

STORM_S = 15.0
BACK_S = 90.0
CUTOVER_MS = 0.5
LONG_TOKENS = 3000
"""More than a group of two of `ours lending` holds: 64 MiB of KV on each engine are 2,730."""
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
    """Return percentiles of the times of the switches so far beyond the step that was under way.

    The first one is left out, as it loads code. The engines wait for each other in a switch, so
    one of some may take longer where the machine does something else: the bar is for 95 of 100.
    """
    return evaluate_cutover([switch["overhead_ms"] for switch in site["ours float32"].switches()])


def evaluate_cutover(times_ms: list[float]) -> str:
    """Return percentiles of all times but the first.

    Raises:
        AssertionError: if there are none, or 5 of 100 are above the bar.
    """
    require(len(times_ms) > 2, "there were no switches")
    later_ms = times_ms[1:]
    *_, most_ms = statistics.quantiles(later_ms, n=20, method="inclusive")
    figure = (
        f"median {statistics.median(later_ms):.2f} ms beyond the step, 95th percentile "
        f"{most_ms:.2f}, {max(later_ms):.2f} at most, of {len(later_ms)} switches; the first took "
        f"{times_ms[0]:.2f}"
    )
    require(most_ms < CUTOVER_MS, figure)
    return figure


def lending(site: Site) -> str:
    """Let a long request take the memory of lent weights, and have them back.

    Answers before, meanwhile and afterwards are the same: the weights are random, and no other
    server has them.
    """
    server = site["ours lending"]
    # the tokenizer has no names for most tokens of this vocabulary
    fields = {"temperature": 0.0, "ignore_eos": True, "logprobs": None}
    degree_2 = fields | {"vllm_xargs": {"tp_degree": 2}}
    server.layout(APART)
    alone = ask(server, PROMPTS[0], **fields)["token_ids"]
    server.layout(TOGETHER)
    together = ask(server, PROMPTS[0], **degree_2)["token_ids"]
    began_s = time.monotonic()
    ask(server, drawn(9, LONG_TOKENS), **degree_2)
    long_s = time.monotonic() - began_s
    stages = [_stage(server)]
    meanwhile = ask(server, PROMPTS[0], **degree_2)["token_ids"]
    server.check()
    began_s = time.monotonic()
    server.layout(APART)
    back_s = time.monotonic() - began_s
    stages.append(_stage(server))
    alone_again = ask(server, PROMPTS[0], **fields)["token_ids"]
    server.layout(TOGETHER)
    again = ask(server, PROMPTS[0], **degree_2)["token_ids"]
    server.check()
    equal = (alone_again == alone) + (meanwhile == together) + (again == together)
    figure = (
        f"{equal} of 3 answers equal; a request of {LONG_TOKENS} tokens after {long_s:.2f} s, "
        f"weights were {stages[0]}, and {stages[1]} after {back_s:.2f} s"
    )
    require(equal == 3 and stages == ["lent", "whole"], figure)
    return figure


def _stage(server: Server) -> str:
    """Return where the weights of the widest group are."""
    (stage,) = server.status()["weights"].values()
    return str(stage)


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
