"""Streams that go on while engines are lost: each has a seed, and is compared with the same request
undisturbed.
"""

from __future__ import annotations

import asyncio
import random
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import count, pairwise
from typing import Any

import httpx

from harness.live import Server
from harness.storm_load import Job
from harness.streams import WORST_LOGPROB, RequestFailed, Stream, stream, worst_difference

JOBS = 16
TIMEOUT_S = 60.0
BEGUN = 3
"""Streams at least that have a token when an engine is lost."""


@dataclass
class Asked:
    """One request of the load and what has come of it: why it was failed, or what of its answer is
    wrong.
    """

    name: str
    job: Job
    answer: Stream = field(default_factory=Stream)
    failed: str | None = None
    wrong: str | None = None
    is_over: bool = False

    @property
    def is_bad(self) -> bool:
        """Whether it was failed or answered wrongly."""
        return self.failed is not None or self.wrong is not None

    def worst_gap_s(self, from_s: float, until_s: float) -> float:
        """The longest wait for a token, of waits that were not over before `from_s` and had begun
        by `until_s`.
        """
        arrivals = self.answer.arrivals_s
        return max(
            (b - a for a, b in pairwise(arrivals) if b >= from_s and a <= until_s), default=0.0
        )

    def streams_at(self, at_s: float) -> bool:
        """Whether it had a token by then, and got another later."""
        arrivals = self.answer.arrivals_s
        return bool(arrivals) and arrivals[0] < at_s < arrivals[-1]


def make_jobs(jobs: int = JOBS, seed: int = 28) -> list[Job]:
    """Requests of 5 to 500 prompt tokens and 40 to 120 output tokens."""
    draw = random.Random(seed)
    lengths = [round(5 * 100 ** draw.random()) for _ in range(jobs)]
    prompts = [tuple(draw.randrange(3, 500) for _ in range(length)) for length in lengths]
    return [
        Job(f"job {i}", prompt, draw.randint(40, 120), seed=100 + i)
        for i, prompt in enumerate(prompts)
    ]


class ChaosLoad:
    """Clients that stream one random job after another, between `start` and `stop`."""

    def __init__(self, server: Server, jobs: Sequence[Job], seed: int = 0) -> None:
        self._model = server.model
        self._jobs = jobs
        self._draw = random.Random(seed)
        self._numbers = count()
        self._tasks: list[asyncio.Task[None]] = []
        self._goes_on = False
        self._references: dict[str, Stream] = {}
        self.splits = False
        """Whether two groups are to share each request."""
        self.asked: list[Asked] = []
        """Since the last start."""
        limits = httpx.Limits(max_connections=None, max_keepalive_connections=0)
        self.http = httpx.AsyncClient(base_url=server.url, timeout=TIMEOUT_S, limits=limits)

    async def learn(self) -> None:
        """Answer every job once, alone."""
        for job in self._jobs:
            self._references[job.name] = await stream(self.http, job.body(self._model, None))

    def start(self, clients: int) -> None:
        """Let so many clients begin."""
        self.asked, self._goes_on = [], True
        self._tasks = [asyncio.create_task(self._client()) for _ in range(clients)]

    async def until_streaming(self, within_s: float = 20.0) -> None:
        """Return once some streams go on."""
        async with asyncio.timeout(within_s):
            while (
                sum(bool(one.answer.tokens) and not one.answer.done for one in self.asked) < BEGUN
            ):
                await asyncio.sleep(0.005)

    async def stop(self) -> None:
        """Let every stream end."""
        self._goes_on = False
        await asyncio.gather(*self._tasks)
        self._tasks = []

    async def _client(self) -> None:
        while self._goes_on:
            job = self._draw.choice(self._jobs)
            one = Asked(f"chaos-{next(self._numbers)}", job)
            self.asked.append(one)
            await self._ask(one)

    async def _ask(self, one: Asked) -> None:
        body: dict[str, Any] = one.job.body(self._model, None) | {"request_id": one.name}
        if self.splits:
            draw, prompt = self._draw, len(one.job.prompt)
            at = draw.choice(
                (draw.randrange(1, prompt), prompt + draw.randrange(1, one.job.max_tokens // 2))
            )
            body |= {"vllm_xargs": {"split_at": at}, "cache_salt": one.name}
        try:
            await stream(self.http, body, into=one.answer)
        except (RequestFailed, httpx.HTTPError) as error:
            one.failed = repr(error)
        else:
            self._compare(one)
        one.is_over = True

    def _compare(self, one: Asked) -> None:
        found, expected = one.answer, self._references[one.job.name]
        if found.tokens != expected.tokens or found.text != expected.text:
            same = next(
                (
                    i
                    for i, (a, b) in enumerate(zip(found.tokens, expected.tokens, strict=False))
                    if a != b
                ),
                -1,
            )
            one.wrong = f"token {same}: {len(found.tokens)} of {len(expected.tokens)} tokens"
        elif (difference := worst_difference(found.logprobs, expected.logprobs)) > WORST_LOGPROB:
            one.wrong = f"logprobs differ by {difference:.1e}"
        elif found.finish_reason != expected.finish_reason:
            one.wrong = f"finish_reason={found.finish_reason}"

    async def close(self) -> None:
        """End what still streams."""
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        await self.http.aclose()
