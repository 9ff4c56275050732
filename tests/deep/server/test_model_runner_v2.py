"""Lanes on vLLM's V2 model runner, under Triton's interpreter: what stock vLLM answers with it.

The interpreter takes tens of milliseconds for a step, so answers are short and switches are few.
"""

from __future__ import annotations

import itertools
import json
import random
import threading
import time
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from flying_serving.config import MODES
from harness import triton_cpu
from harness.forked import ENVIRONMENT
from harness.live import COMMAND, FLAGS, Server, wait_until
from harness.losing import is_whole, kill
from harness.streams import WORST_LOGPROB, worst_difference
from tests.stock.record import V2_TOKENS
from tests.stock.requests import REQUESTS, VOCAB, StockRequest, shortened, tokens

pytestmark = [
    pytest.mark.server,
    pytest.mark.cpu_only("it runs V2 in Triton's interpreter"),
]

ENGINES = 4
DEGREES = (1, 2, 4)
JOBS = [shortened(request, V2_TOKENS) for request in REQUESTS]
APART, PAIRS, ALL = [[0], [1], [2], [3]], [[0, 1], [2, 3]], [[0, 1, 2, 3]]
SWITCHES = ((PAIRS, "weave"), (ALL, "hard"), ([[0], [1], [2, 3]], "hard"), (APART, "weave"))
BETWEEN_S = 0.5
LAYOUTS = (APART, PAIRS, ALL, [[0, 1], [2], [3]], [[0], [1], [2, 3]])
STORM = MODES * 3
STREAMS = 4
MOST_ROUNDS = 6
BACK_S = 90.0
RECORDED = json.loads(Path(__file__).parents[2].joinpath("stock", "llama-v2.json").read_text())
PROMPT = tokens(12, 60)
SEEDED = {"temperature": 1.0, "seed": 11, "max_tokens": 32, "ignore_eos": True}
PENALTIES = {"presence_penalty": 0.6, "frequency_penalty": 0.4, "repetition_penalty": 1.2}
# Triton's interpreter cannot run vLLM's kernels for grammars, nor for top-k and top-p.
SAMPLERS: dict[str, dict[str, Any]] = {
    "penalties": PENALTIES,
    "greedy": PENALTIES | {"temperature": 0.0},
    "min-p and bias": {"min_p": 0.001, "logit_bias": {"3": 4.0}, "temperature": 0.8},
    "min_tokens and stop": {"min_tokens": 20, "stop_token_ids": [*range(0, VOCAB, 8)]},
}
FORCE = "tests.stock.force_v2:ForceTokens"


@pytest.fixture(scope="module")
def server() -> Iterator[Server]:
    base = [flag for flag in FLAGS if not flag.startswith("--logits-processors=")]
    flags = (*base, f"--logits-processors={FORCE}")
    environment = ENVIRONMENT | triton_cpu.ENVIRONMENT
    with Server("llama", ENGINES, base=flags, program=COMMAND, environment=environment) as live:
        yield live


def run(server: Server, request: StockRequest, degree: int | None, **told: int) -> dict[str, Any]:
    sampling = request.sampling()
    extra = (sampling.pop("extra_args") or {}) | ({"tp_degree": degree} if degree else {}) | told
    return server.complete(request.prompt, vllm_xargs=extra, **sampling)


def compare(request: StockRequest, degree: int, choice: dict[str, Any]) -> None:
    stock = RECORDED["degrees"][str(degree)]["answers"][request.name]
    assert choice["token_ids"] == stock["tokens"], f"{request.name} at degree {degree}"
    worst = worst_difference(choice["logprobs"]["token_logprobs"], stock["logprobs"])
    assert worst <= WORST_LOGPROB, f"{request.name} at degree {degree}: logprobs differ by {worst}"


def migrations(server: Server, figure: str) -> int:
    """A figure of all engines: of the requests that have gone to another group, or their tokens."""
    return sum(engine["migrations"][figure] for engine in server.status()["engines"])


def test_the_worker_makes_the_v2_runner(server: Server) -> None:
    assert "Using V2 Model Runner" in server.log()


@pytest.mark.parametrize("degree", DEGREES)
def test_requests_at_once_get_the_answers_of_stock(server: Server, degree: int) -> None:
    with ThreadPoolExecutor(len(JOBS)) as pool:
        answers = [pool.submit(run, server, request, degree) for request in JOBS]
        for request, answer in zip(JOBS, answers, strict=True):
            compare(request, degree, answer.result())
    server.check()


def test_all_degrees_get_the_answers_of_stock_while_the_layout_changes(server: Server) -> None:
    jobs = [(request, degree) for request in JOBS[::2] for degree in DEGREES]
    with ThreadPoolExecutor(len(jobs)) as pool:
        answers = [pool.submit(run, server, request, degree) for request, degree in jobs]
        for groups, mode in SWITCHES:
            server.layout(groups, mode)
            time.sleep(BETWEEN_S)
        for (request, degree), answer in zip(jobs, answers, strict=True):
            compare(request, degree, answer.result())
    server.check()


def migrate_meanwhile(server: Server, answers: list[Future[dict[str, Any]]]) -> None:
    """Have requests go from layout to layout until all have their answers."""
    for groups in itertools.cycle((PAIRS, ALL, APART)):
        if all(answer.done() for answer in answers):
            return
        server.layout(groups, "migrate")
        time.sleep(BETWEEN_S)


def test_requests_that_migrate_get_the_answers_of_stock(server: Server) -> None:
    before, tokens_before = migrations(server, "migrated"), migrations(server, "migrated_tokens")
    for _ in range(MOST_ROUNDS):
        with ThreadPoolExecutor(len(JOBS)) as pool:
            answers = [pool.submit(run, server, request, None) for request in JOBS]
            migrate_meanwhile(server, answers)
        for request, answer in zip(JOBS, answers, strict=True):
            compare(request, 1, answer.result())
        if migrations(server, "migrated") - before >= len(JOBS):
            break
    else:
        raise AssertionError(f"streams end before they have moved: {server.status()['engines']}")
    assert migrations(server, "migrated_tokens") > tokens_before
    server.check()


def feed(server: Server, stop: threading.Event, number: int) -> int:
    """Have one seeded request after the other answered, until told to stop; return how many."""
    for done in itertools.count():
        if stop.is_set():
            break
        request = JOBS[(number + done) % len(JOBS)]
        compare(request, 1, run(server, request, None))
    return done


def test_a_storm_of_switches_changes_no_answer(server: Server) -> None:
    draw = random.Random(7)
    stop = threading.Event()
    with ThreadPoolExecutor(STREAMS) as pool:
        streams = [pool.submit(feed, server, stop, number) for number in range(STREAMS)]
        try:
            groups = ALL
            for mode in STORM:
                groups = draw.choice([other for other in LAYOUTS if other != groups])
                server.layout(groups, mode)
                time.sleep(draw.random() * BETWEEN_S)
        finally:
            stop.set()
        answered = sum(stream.result() for stream in streams)
    assert answered > STREAMS
    server.check()


def test_requests_that_two_engines_share_get_the_answers_of_stock(server: Server) -> None:
    server.layout(APART)
    before = migrations(server, "migrated")
    jobs = [(request, len(request.prompt) + 4) for request in JOBS[2:5]]
    with ThreadPoolExecutor(len(jobs)) as pool:
        answers = [pool.submit(run, server, job, None, split_at=split) for job, split in jobs]
        for (request, _), answer in zip(jobs, answers, strict=True):
            compare(request, 1, answer.result())
    assert migrations(server, "migrated") > before
    server.check()


def test_the_state_of_a_sampler_follows_from_the_tokens_of_a_request(server: Server) -> None:
    """Penalties and limits go on behind a migration as in a request that stays."""

    def answer(name: str, xargs: dict[str, int]) -> dict[str, Any]:
        return server.complete(PROMPT, vllm_xargs=xargs, **SEEDED | SAMPLERS[name])

    server.layout(APART)
    stayed = [answer(name, {"tp_degree": 1}) for name in SAMPLERS]
    before = migrations(server, "migrated")
    with ThreadPoolExecutor(len(SAMPLERS)) as pool:
        answers = [pool.submit(answer, name, {}) for name in SAMPLERS]
        migrate_meanwhile(server, answers)
    assert migrations(server, "migrated") > before
    for name, alone, answered in zip(SAMPLERS, stayed, answers, strict=True):
        choice = answered.result()
        assert choice["token_ids"] == alone["token_ids"], name
        assert choice["finish_reason"] == alone["finish_reason"], name
        values = [each["logprobs"]["token_logprobs"] for each in (choice, alone)]
        assert worst_difference(*values) <= WORST_LOGPROB, name


@pytest.mark.parametrize("degree", DEGREES[1:])
def test_members_of_a_group_draw_the_same_tokens(server: Server, degree: int) -> None:
    """Each member computes with the tokens that it has drawn: of other tokens than the leader's
    the next logprobs would be others.
    """
    request = StockRequest("drawn", tokens(11, 40), 8, seed=None)
    first, second = run(server, request, degree), run(server, request, degree)
    assert first["token_ids"] != second["token_ids"]

    for choice in (first, second):
        scored = run(server, replace(request, forced=tuple(choice["token_ids"])), 1)
        values = [each["logprobs"]["token_logprobs"] for each in (choice, scored)]
        assert worst_difference(*values) <= WORST_LOGPROB


def test_a_group_gets_the_answers_of_stock_through_a_loss(server: Server) -> None:
    server.layout(PAIRS)
    with ThreadPoolExecutor(len(JOBS)) as pool:
        answers = [pool.submit(run, server, request, 2) for request in JOBS]
        wait_until(lambda: server.requests("running") == len(JOBS), server.status)
        kill(server, 1)
        for request, answer in zip(JOBS, answers, strict=True):
            compare(request, 2, answer.result())

    wait_until(lambda: is_whole(server), server.log, BACK_S)
    with ThreadPoolExecutor(len(JOBS)) as pool:
        answers = [pool.submit(run, server, request, 2) for request in JOBS]
        for request, answer in zip(JOBS, answers, strict=True):
            compare(request, 2, answer.result())
    server.check()
