"""Every lane answers what stock vLLM answers at that degree: tokens and logprobs, after other
episodes.
"""

from __future__ import annotations

import itertools
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import pytest

from harness.live import Server
from harness.streams import WORST_LOGPROB, worst_difference
from tests.stock.answers import stock_answers
from tests.stock.requests import FORCED, REQUESTS, SAMPLED, StockRequest

pytestmark = pytest.mark.server

SHAPES = ("llama", "qwen2", "qwen3", "mixtral", "llama-mqa")
TWO_DEVICES = pytest.mark.cpu_only("an engine of two devices needs two GPUs")
ASYNC = "--async-scheduling"
CASES = [
    *((shape, 4, 1) for shape in SHAPES),
    ("llama", 4, 1, ASYNC),
    pytest.param(("llama", 2, 2), marks=TWO_DEVICES),
    pytest.param(("mixtral", 2, 2), marks=TWO_DEVICES),
    pytest.param(("gpt-oss", 2, 2), marks=TWO_DEVICES),
    pytest.param(("llama", 2, 2, ASYNC), marks=TWO_DEVICES),
]
"""Shape, engines, devices of each, and more flags."""
SWITCHES = {
    2: (([[0, 1]], "weave"), ([[0], [1]], "hard"), ([[0, 1]], "hard"), ([[0], [1]], "weave")),
    4: (
        ([[0, 1], [2, 3]], "weave"),
        ([[0, 1, 2, 3]], "hard"),
        ([[0], [1], [2, 3]], "hard"),
        ([[0], [1], [2], [3]], "weave"),
    ),
}
BETWEEN_S = 0.2
"""From one switch to the next: without it little else would be done."""
MOST_ROUNDS = 10
"""On a fast machine few streams last until a switch comes."""


class Compared(Server):
    """A live server, what stock vLLM answers with the same model, and the degrees to compare.

    `flags`: more flags of the server. `preamble`: Python code that runs before it.
    """

    def __init__(
        self, shape: str, engines: int, devices: int, *flags: str, preamble: str = ""
    ) -> None:
        if devices > 1:
            flags = (*flags, f"--tensor-parallel-size={devices}")
        super().__init__(shape, engines, *flags, preamble=preamble)
        self.stock = stock_answers(shape)
        self.degrees = tuple(
            degree for degree in (1, 2, 4) if devices <= degree <= devices * engines
        )
        self.engines = engines
        self.is_async = ASYNC in flags


@pytest.fixture(scope="module", params=CASES, ids=lambda case: "-".join(map(str, case)))
def server(request: pytest.FixtureRequest) -> Iterator[Compared]:
    with Compared(*request.param) as live:
        yield live


def run(
    server: Compared, request: StockRequest, degree: int | None, **told: int
) -> tuple[list[int], list[float]]:
    sampling = request.sampling()
    extra = (sampling.pop("extra_args") or {}) | ({"tp_degree": degree} if degree else {}) | told
    choice = server.complete(request.prompt, vllm_xargs=extra, **sampling)
    return choice["token_ids"], choice["logprobs"]["token_logprobs"]


def compare(
    server: Compared, request: StockRequest, degree: int, answer: tuple[list[int], list[float]]
) -> None:
    stock = server.stock[str(degree)]["answers"][request.name]
    tokens, logprobs = answer
    assert tokens == stock["tokens"], f"{request.name} at degree {degree}"
    worst = worst_difference(logprobs, stock["logprobs"])
    assert worst <= WORST_LOGPROB, f"{request.name} at degree {degree}: logprobs differ by {worst}"


def test_groups_plan_ahead_if_the_flag_says_so(server: Compared) -> None:
    assert ("a step is planned while one is computed" in server.log()) is server.is_async


def test_each_degree_alone_and_after_the_others(server: Compared) -> None:
    """One request after the other, the widest groups first; then those of a degree together, the
    narrowest first.
    """
    for degree in server.degrees[::-1]:
        for request in REQUESTS:
            compare(server, request, degree, run(server, request, degree))
    with ThreadPoolExecutor(len(REQUESTS)) as pool:
        for degree in server.degrees:
            answers = [pool.submit(run, server, request, degree) for request in REQUESTS]
            for request, answer in zip(REQUESTS, answers, strict=True):
                compare(server, request, degree, answer.result())
    server.check()


def compare_all_degrees_at_once(server: Compared) -> None:
    """Compare requests of all degrees that run while the layout changes."""
    jobs = [(request, degree) for request in (*SAMPLED, *FORCED) for degree in server.degrees]
    with ThreadPoolExecutor(len(jobs)) as pool:
        answers = [pool.submit(run, server, request, degree) for request, degree in jobs]
        for groups, mode in SWITCHES[server.engines]:
            server.layout(groups, mode)
        for (request, degree), answer in zip(jobs, answers, strict=True):
            compare(server, request, degree, answer.result())
    server.check()


def test_all_degrees_at_once_while_the_layout_changes(server: Compared) -> None:
    compare_all_degrees_at_once(server)


def test_requests_that_migrate_with_their_kv(server: Compared) -> None:
    """Streams go on in other groups where they were, over and over, and nobody could tell from what
    they say.
    """
    jobs = (*SAMPLED, *FORCED)
    layouts = itertools.cycle([groups for groups, _ in SWITCHES[server.engines]])
    before = migrations(server)
    for _ in range(MOST_ROUNDS):
        with ThreadPoolExecutor(len(jobs)) as pool:
            answers = [pool.submit(run, server, request, None) for request in jobs]
            while not all(answer.done() for answer in answers):
                server.layout(next(layouts), "migrate")
                time.sleep(BETWEEN_S)
        for request, answer in zip(jobs, answers, strict=True):
            compare(server, request, server.degrees[0], answer.result())
        after = migrations(server)
        if after["migrated"] - before["migrated"] >= len(jobs):
            break
    else:
        raise AssertionError(f"{before} {after}: streams end before they have moved")
    assert after["migrated_tokens"] > before["migrated_tokens"]
    server.check()


def test_requests_that_two_engines_share(server: Compared) -> None:
    """At once, each split inside its prompt, at its end and in its output."""
    server.layout([[engine] for engine in range(server.engines)])
    before = migrations(server)
    jobs = [
        (request, split)
        for request in (*SAMPLED, *FORCED)
        for split in (
            len(request.prompt) // 2,
            len(request.prompt),
            len(request.prompt) + request.max_tokens // 2,
        )
    ]
    with ThreadPoolExecutor(len(jobs)) as pool:
        answers = [
            pool.submit(run, server, request, None, split_at=split) for request, split in jobs
        ]
        for (request, _), answer in zip(jobs, answers, strict=True):
            compare(server, request, server.degrees[0], answer.result())
    assert migrations(server)["migrated"] > before["migrated"]
    server.check()


def migrations(server: Server) -> dict[str, int]:
    """How many requests have gone to another group, with their KV or without, on all engines."""
    engines = server.status()["engines"]
    return {
        key: sum(engine["migrations"][key] for engine in engines)
        for key in engines[0]["migrations"]
    }
