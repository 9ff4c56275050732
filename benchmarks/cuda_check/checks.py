"""What the lines of the check do, over the servers of a site."""

import random
import statistics
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from benchmarks.cuda_check.lines import Line
from benchmarks.cuda_check.site import Site
from harness.live import Server, wait_until
from harness.losing import is_whole, kill

LAYOUTS = {
    1: [[0], [1], [2], [3]],
    2: [[0, 1], [2, 3]],
    4: [[0, 1, 2, 3]],
}
PROMPTS = [[random.Random(k).randrange(3, 250) for _ in range(20 + 37 * k)] for k in range(4)]
TOKENS = 24
TOLERANCE = {"float32": 1e-3, "bfloat16": 0.25}
"""By how much logprobs of equal tokens may differ from stock's.

Logits from 16 to 32 are 0.125 apart in bfloat16, and a logprob is the difference of two.
"""
STORM_S = 15.0
BACK_S = 90.0
CUTOVER_MS = 0.5
LEAST_OF_STOCK = 0.98

KINDS: dict[str, dict[str, Any]] = {
    "seeds": {"temperature": 1.0, "seed": 11},
    "penalties": {"temperature": 0.0, "repetition_penalty": 1.3, "presence_penalty": 0.5},
    "a grammar": {"temperature": 0.0, "structured_outputs": {"regex": "[0-9]{12}"}},
}


def ask(server: Server, prompt: Sequence[int], **fields: Any) -> dict[str, Any]:
    """Return one answer of TOKENS tokens, with logprobs of the sampled ones."""
    return server.complete(prompt, **{"max_tokens": TOKENS, "logprobs": 0, **fields})


def require(true: bool, what: str) -> None:
    """Raise AssertionError with `what` unless `true`, also under `python -O`."""
    if not true:
        raise AssertionError(what)


def same_as_stock(site: Site, dtype: str, degree: int) -> str:
    """Compare tokens and logprobs of every kind of request with stock's."""
    stock, ours = site.stock(dtype), site.ours(dtype)
    ours.layout(LAYOUTS[degree])
    worst, equal, compared = 0.0, 0, 0
    for kind in KINDS.values():
        for prompt in PROMPTS:
            expected = ask(stock, prompt, **kind)
            found = ask(ours, prompt, **kind, vllm_xargs={"tp_degree": degree})
            compared += 1
            equal += found["token_ids"] == expected["token_ids"]
            worst = max(worst, _difference(found, expected))
    figure = f"{equal} of {compared} answers equal, logprobs within {worst:.1e}"
    # in 16 bits sums of parts are rounded otherwise, so an undecided token may be another
    require(worst <= TOLERANCE[dtype], figure)
    require(dtype != "float32" or equal == compared, figure)
    return figure


def _difference(found: dict[str, Any], expected: dict[str, Any]) -> float:
    """Return by how much logprobs differ, up to the first token that is another."""
    worst = 0.0
    pairs = zip(found["token_ids"], expected["token_ids"], strict=False)
    logprobs = zip(
        found["logprobs"]["token_logprobs"], expected["logprobs"]["token_logprobs"], strict=False
    )
    for (mine, theirs), (ours, stocks) in zip(pairs, logprobs, strict=False):
        if mine != theirs:
            break
        worst = max(worst, abs(ours - stocks))
    return worst


def unseeded_scored(site: Site, dtype: str) -> str:
    """Score unseeded answers of groups again, by stock as prompts: members that draw apart give
    tokens of other logprobs, or errors.
    """
    stock, ours = site.stock(dtype), site.ours(dtype)
    worst = 0.0
    for degree in (2, 4):
        ours.layout(LAYOUTS[degree])
        for prompt in PROMPTS:
            drawn = ask(ours, prompt, temperature=1.0, ignore_eos=True)
            whole = [*prompt, *drawn["token_ids"]]
            scored = ask(stock, whole, max_tokens=1, temperature=0.0, prompt_logprobs=0)
            for token, logprob, by_token in zip(
                drawn["token_ids"],
                drawn["logprobs"]["token_logprobs"],
                scored["prompt_logprobs"][len(prompt) :],
                strict=True,
            ):
                worst = max(worst, abs(logprob - by_token[str(token)]["logprob"]))
    figure = f"logprobs within {worst:.1e} when scored again alone"
    require(worst <= TOLERANCE[dtype], figure)
    return figure


def storm(site: Site) -> str:
    """Switch layouts at random under seeded requests; each answer is the one without switches."""
    server, draw = site.ours("float32"), random.Random(5)
    server.layout(LAYOUTS[1])
    fields = {"temperature": 1.0, "seed": 3, "ignore_eos": True, "max_tokens": 120}
    expected = [ask(server, prompt, **fields)["token_ids"] for prompt in PROMPTS]
    ends_s, modes = time.monotonic() + STORM_S, ("weave", "hard", "sequential", "soft", "migrate")
    wrong, answers = [0], [0]

    def feed(which: int) -> None:
        while time.monotonic() < ends_s:
            answers[0] += 1
            wrong[0] += ask(server, PROMPTS[which], **fields)["token_ids"] != expected[which]

    switches = 0
    with ThreadPoolExecutor(len(PROMPTS)) as pool:
        feeds = [pool.submit(feed, which) for which in range(len(PROMPTS))]
        while time.monotonic() < ends_s:
            server.layout(draw.choice(list(LAYOUTS.values())), draw.choice(modes))
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
    server = site.ours("float32")
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
    figure = ", ".join(f"{name} {count}" for name, count in sorted(arrived.items()))
    require(arrived["migrated"] > 0, figure)
    return figure


def _migrated(server: Server) -> dict[str, int]:
    """Return the counts of migrations over all engines."""
    counts = [engine["migrations"] for engine in server.status()["engines"]]
    return {name: sum(of[name] for of in counts) for name in counts[0]}


def loss(site: Site) -> str:
    """Kill an engine: the others go on, and it comes back."""
    server = site.ours("float32")
    server.layout(LAYOUTS[2])
    began_s = time.monotonic()
    kill(server, 1)
    ask(server, PROMPTS[0], temperature=0.0)
    went_on_s = time.monotonic() - began_s
    wait_until(lambda: is_whole(server), server.log, BACK_S)
    return f"an answer after {went_on_s:.1f} s, whole again after {time.monotonic() - began_s:.1f}"


def steady_state(site: Site, streams: int) -> str:
    """Compare the time per token of lane 1 with stock's, by turns."""
    stock, ours = site.stock("bfloat16"), site.ours("bfloat16")
    ours.layout(LAYOUTS[1])
    times: dict[str, list[float]] = {"stock": [], "ours": []}
    for _ in range(4):
        for name, server in (("stock", stock), ("ours", ours)):
            times[name].append(_token_s(server, streams))
    by_name = {name: statistics.median(of[1:]) for name, of in times.items()}
    share = by_name["stock"] / by_name["ours"]
    figure = f"{by_name['ours'] * 1e3:.2f} ms a token, {share:.2f} of stock's speed"
    require(share >= LEAST_OF_STOCK, figure)
    return figure


def _token_s(server: Server, streams: int) -> float:
    """Return the time of one token of each stream."""
    fields = {"ignore_eos": True, "max_tokens": 128, "temperature": 0.0}
    began_s = time.monotonic()
    with ThreadPoolExecutor(streams) as pool:
        asked = [pool.submit(ask, server, PROMPTS[0], **fields) for _ in range(streams)]
        for done in asked:
            done.result()
    return (time.monotonic() - began_s) / 128


def cutover(site: Site) -> str:
    """Return the worst time of all switches so far beyond the step that was under way."""
    worst = max(switch["overhead_ms"] for switch in site.ours("float32").switches())
    figure = f"{worst:.2f} ms at most beyond the step"
    require(worst < CUTOVER_MS, figure)
    return figure


def pulls(site: Site) -> str:
    """Return the time that a token's KV takes from one group to another, as measured at start."""
    costs = site.ours("float32").status()["migration_cost"]
    return "; ".join(f"to groups of {size}: {cost}" for size, cost in sorted(costs.items()))


def lines() -> list[Line[Site]]:
    """Return all lines in order: what may be wrong first, times last."""
    same = [
        Line(
            f"same as stock, degree {degree}, {dtype}",
            lambda site, d=dtype, p=degree: same_as_stock(site, d, p),  # type: ignore[misc]
            deadline_s=150,
        )
        for dtype in TOLERANCE
        for degree in LAYOUTS
    ]
    return [
        *same[:3],
        Line("unseeded answers, float32", lambda site: unseeded_scored(site, "float32")),
        Line("storm of switches", storm),
        Line("migrations with KV", migrations),
        Line("time of a pull", pulls),
        Line("cutover beyond the step", cutover, needs_gpu=True),
        Line("loss of an engine", loss, deadline_s=120),
        *same[3:],
        Line("steady state, 1 stream", lambda site: steady_state(site, 1), needs_gpu=True),
        Line("steady state, 16 streams", lambda site: steady_state(site, 16), needs_gpu=True),
    ]
