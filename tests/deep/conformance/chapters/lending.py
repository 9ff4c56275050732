"""A group lends its weights to requests that no group holds otherwise: all answers are stock's,
before, meanwhile and afterwards.

An engine holds 256 tokens, and a group of four 1,024. With lent weights it holds all tokens that
the model may have.
"""

from __future__ import annotations

import contextlib
import random
import threading
from concurrent.futures import Future, ThreadPoolExecutor

import httpx

from flying_serving.config import MODES
from harness.live import BLOCK_BYTES, wait_until
from tests.deep.conformance.live import Asked, Job, Live

BLOCKS, BLOCK_TOKENS = 9, 32
"""With vLLM's null block."""
FLAGS = (f"--kv-cache-memory-bytes={BLOCKS * BLOCK_BYTES}", "--lend-weights")
ROUNDS = 2
STORM_ORDERS = 40
LEAVES_S = (0.05, 1.0)
"""The shortest and the longest time after which a client leaves."""
MANY_TOKENS = 80


def named(live: Live, name: str) -> Job:
    """Return the job of this name."""
    (job,) = [job for job in live.case.jobs if job.name == name]
    return job


def long(live: Live) -> Job:
    """Return the job that needs lent weights."""
    return named(live, "forced-long")


def stage(live: Live) -> str:
    """Return where the weights of the widest group are."""
    (found,) = live.status()["weights"].values()
    return str(found)


def every_stage(live: Live) -> None:
    """At each degree, with all weights, without those that are lent, and when they are back."""
    *narrower, widest = live.degrees
    engine_tokens = (BLOCKS - 1) * BLOCK_TOKENS
    for degree in live.degrees:
        assert live.capacity_tokens(degree) == engine_tokens * degree
    assert live.status()["lent_capacity_tokens"] >= 2048
    for _ in range(ROUNDS):
        live.layout(live.groups(widest))
        assert stage(live) == "whole"
        live.answer_all(Asked(job, like=widest) for job in live.case.jobs)
        assert stage(live) == "lent"
        live.check()
        live.ask(Asked(long(live), like=widest))
        for degree in narrower[::-1]:
            live.layout(live.groups(degree))
            assert stage(live) == "whole"
            live.answer_all(Asked(job, like=degree) for job in live.jobs())
        live.check()


def a_switch_waits_for_requests_that_need_the_room(live: Live) -> None:
    """Others go on meanwhile, and no further long one begins; then weights come back, and engines
    are told.
    """
    widest, short = live.degrees[-1], named(live, "block")
    live.layout(live.groups(widest))
    with ThreadPoolExecutor() as pool:
        lent = pool.submit(live.ask, Asked(long(live), like=widest))
        wait_until(lambda: stage(live) == "lent" or lent.done())
        switch = pool.submit(live.layout, live.apart)
        others = [pool.submit(live.ask, Asked(short, like=widest)) for _ in range(2)]
        lent.result()
        record = switch.result()
        for answer in others:
            answer.exception()  # it may have begun after the switch
    assert record["waited_for_idle_ms"] > 0
    assert stage(live) == "whole"
    live.ask(Asked(short, 1))
    live.check()


def a_request_of_lower_degree_calls_weights_back(live: Live) -> None:
    """It waits for them, without a change of the layout."""
    widest = live.degrees[-1]
    live.layout(live.groups(widest))
    live.ask(Asked(long(live), like=widest))
    assert stage(live) == "lent"
    live.ask(Asked(named(live, "chunks"), 2))
    live.ask(Asked(named(live, "block"), 1))
    assert stage(live) == "whole"
    live.ask(Asked(long(live), like=widest))
    live.check()


def narrower_groups_hold_what_they_ever_did(live: Live) -> None:
    answer = live.post([1] * 600, 10, 2)
    assert answer.status_code == 400
    assert "its KV cache holds 512 tokens" in answer.text


def weights_go_and_return_under_a_storm(live: Live) -> None:
    """Long and short requests, clients that leave, and layouts that change at any moment."""
    draw, answers, widest = random.Random(27), list[Future[None]](), live.degrees[-1]
    left = threading.Event()

    def leave(after_s: float) -> None:
        """A client does not wait for its answer."""
        prompt = list(long(live).prompt)
        body = {"model": live.model, "prompt": prompt, "max_tokens": 40, "ignore_eos": True}
        try:
            httpx.post(f"{live.url}/v1/completions", json=body, timeout=after_s)
        except httpx.TimeoutException:
            left.set()

    live.layout(live.apart)
    with ThreadPoolExecutor(STORM_ORDERS) as pool:
        for number in range(STORM_ORDERS):
            if number % 4 == 0:
                answers.append(pool.submit(live.ask, Asked(long(live), like=widest)))
            if number % 5 == 0:
                pool.submit(leave, draw.uniform(*LEAVES_S))
            for _ in range(draw.randrange(3)):
                answers.append(pool.submit(live.ask, Asked(named(live, "block"))))
            degree = draw.choice(live.degrees)
            order = {"groups": live.groups(degree), "mode": draw.choice(MODES)}
            # an order whose client leaves while it waits is dropped
            with contextlib.suppress(httpx.TimeoutException):
                live.http.post("/flying/layout", json=order, timeout=draw.choice([0.2, 5.0]))
            live.check()
        live.layout(live.groups(widest))
        for answer in answers:
            answer.result()
    assert left.is_set()
    live.layout(live.apart)
    live.until_idle()
    assert stage(live) == "whole"
    live.check()


def kv_goes_from_arena_to_arena(live: Live) -> None:
    """Before weights were lent, and afterwards."""
    shared = [job for job in live.jobs() if len(job.prompt) > BLOCK_TOKENS]
    for _ in range(ROUNDS):
        live.layout(live.apart)
        before = live.migrations()
        for job in shared:
            live.ask(Asked(job, None, len(job.prompt) + 4))
        assert live.migrations() == before + len(shared)
        live.check()
        live.layout(live.groups(live.degrees[-1]))
        live.ask(Asked(long(live), like=live.degrees[-1]))


def weights_return_while_requests_run(live: Live) -> None:
    """The order waits for the long request, which needs the room; the others go on."""
    widest = live.degrees[-1]
    live.layout(live.groups(widest))
    others = [named(live, name).lengthened(MANY_TOKENS) for name in ("short", "block")]
    with live.asking([Asked(job, widest) for job in (long(live), *others)]) as all_answered:
        wait_until(lambda: stage(live) == "lent" or all_answered(), live.log)
        live.layout(live.apart)
        assert stage(live) == "whole"
    live.check()
