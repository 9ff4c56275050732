"""The clients of a storm of switches: each stream is compared with the same request undisturbed,
token for token.
"""

from __future__ import annotations

import asyncio
import math
import random
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import combinations, product
from typing import Any

import httpx

from harness.live import Server
from harness.sampling_noise import noise_lead
from harness.storm_bounds import Bounds, rounding_bounds
from harness.storm_report import Report
from harness.streams import (
    RequestFailed,
    Stream,
    stream,
    streamed_body,
    worst_difference,
)

DEGREES = (None, None, None, 1, 2, 4)
VOCAB = 512
LONGEST_STEP = 32
LEAVE_SHARE = 0.15
FORCED_SHARE = 0.5


@dataclass(frozen=True)
class Job:
    """One request of the load."""

    name: str
    prompt: tuple[int, ...]
    max_tokens: int
    seed: int
    adapter: str = ""
    """The name of an adapter (LoRA); empty: none."""

    def body(
        self, model: str, degree: int | None, forced: Sequence[int] | None = None
    ) -> dict[str, Any]:
        """What is sent. `forced`: tokens that the answer must have."""
        told = {"tp_degree": degree, "force_token_ids": forced}
        extra = {"vllm_xargs": {key: value for key, value in told.items() if value is not None}}
        fields = {
            "max_tokens": self.max_tokens,
            "seed": self.seed,
            "temperature": 1.0,
            "ignore_eos": True,
        }
        return streamed_body(self.adapter or model, self.prompt, **fields, **extra)


def make_jobs(count: int, draw: random.Random) -> list[Job]:
    """Requests of 5 to 600 prompt tokens and 16 to 80 output tokens; some begin alike, for the
    prefix caches.
    """
    jobs: list[Job] = []
    for number in range(count):
        length = round(5 * 120 ** draw.random())
        begin = jobs[-1].prompt[: length // 2] if number % 4 == 3 else ()
        prompt = (*begin, *(draw.randrange(VOCAB) for _ in range(length - len(begin))))
        jobs.append(Job(f"job {number}", prompt, draw.randint(16, 80), seed=1000 + number))
    return jobs


class Load:
    """Clients that stream random jobs at random degrees and compare each with its reference.

    Args:
        server: where to.
        jobs: what is asked.
        clients: how many at a time.
        draw: source of randomness.
        is_rounded: degrees differ by more than rounding errors of float32. Then half of the streams
            are forced to their references' tokens, and the others may part at a near-tie.
    """

    def __init__(
        self,
        server: Server,
        jobs: Sequence[Job],
        clients: int,
        draw: random.Random,
        report: Report,
        *,
        is_rounded: bool = False,
    ) -> None:
        self._model = server.model
        self._jobs = jobs
        self._draw = draw
        self._report = report
        self._open = asyncio.Event()
        self._idle: set[int] = set()
        self._answers: dict[int, Stream] = {}
        self._stopped = False
        limits = httpx.Limits(max_connections=None, max_keepalive_connections=0)
        self._http = httpx.AsyncClient(base_url=server.url, timeout=120, limits=limits)
        self.reference: dict[str, Stream] = {}
        self._is_rounded = is_rounded
        self._bounds = Bounds()
        self._clients = clients
        self._tasks: list[asyncio.Task[None]] = []

    async def learn(self) -> None:
        """Answer every job once, alone."""
        for job in self._jobs:
            answer = await stream(self._http, job.body(self._model, None))
            problem = _incomplete(job, answer)
            if problem:
                raise RequestFailed(f"{job.name} undisturbed: {problem}")
            self.reference[job.name] = answer
        if self._is_rounded:
            self._bounds = self._report.bounds = rounding_bounds(await self._pairs())

    async def _pairs(self) -> list[tuple[list[float], list[float]]]:
        """Answer every job alone at each degree, with the tokens of its reference: the logprobs of
        any two degrees.
        """
        pairs = []
        for job in self._jobs:
            forced = self.reference[job.name].tokens
            bodies = [job.body(self._model, degree, forced) for degree in (1, 2, 4)]
            answers = [(await stream(self._http, body)).logprobs for body in bodies]
            pairs += list(combinations(answers, 2))
        return pairs

    async def warm(self) -> None:
        """Let engines build what they build at first use, which is no cost of a switch and no
        growth.

        Those are oneDNN's kernels for every number of tokens that a step may have, with each
        adapter too, and what vLLM compiles. Where a step has a whole prompt, those are of any
        length: every job is asked at every degree.
        """
        models = sorted({job.adapter or self._model for job in self._jobs})
        for count, model, degree in product(range(1, LONGEST_STEP + 1), models, (1, 2, 4)):
            fields = {"max_tokens": 1, "vllm_xargs": {"tp_degree": degree}}
            body = streamed_body(model, [count] * count, **fields)
            await asyncio.gather(*(stream(self._http, body) for _ in range(4 // degree)))
        for degree, first in product((4, 2, 1), range(0, len(self._jobs), self._clients)):
            jobs = self._jobs[first : first + self._clients]
            bodies = [job.body(self._model, degree) for job in jobs]
            answers = await asyncio.gather(*(stream(self._http, body) for body in bodies))
            for job, answer in zip(jobs, answers, strict=True):
                await self._compare(job, degree, answer, left=False)

    def start(self) -> None:
        """Let the clients begin."""
        self._open.set()
        self._tasks = [asyncio.create_task(self._client(number)) for number in range(self._clients)]

    async def quiet(self) -> None:
        """Let every stream end and begin no other."""
        self._open.clear()
        while len(self._idle) < self._clients:
            await asyncio.sleep(0.05)

    def resume(self) -> None:
        """Go on after `quiet`."""
        self._open.set()

    def streaming(self) -> int:
        """Return how many streams have a token and want more."""
        return sum(bool(one.tokens) and not one.done for one in self._answers.values())

    async def stop(self) -> None:
        """Let every stream end."""
        self._stopped = True
        self._open.set()
        await asyncio.gather(*self._tasks)
        await self._http.aclose()

    async def _client(self, number: int) -> None:
        while not self._stopped:
            if not self._open.is_set():
                self._idle.add(number)
                await self._open.wait()
                self._idle.discard(number)
                continue
            job, degree = self._draw.choice(self._jobs), self._draw.choice(DEGREES)
            leave = (
                self._draw.randint(1, job.max_tokens - 1)
                if self._draw.random() < LEAVE_SHARE
                else None
            )
            is_forced = self._is_rounded and self._draw.random() < FORCED_SHARE
            forced = self.reference[job.name].tokens if is_forced else None
            body = job.body(self._model, degree, forced)
            answer = self._answers[number] = Stream()
            try:
                await stream(self._http, body, leave_after=leave, into=answer)
            except (RequestFailed, httpx.HTTPError) as error:
                self._fail("failed", f"{job.name} at degree {degree}: {error!r}")
                await asyncio.sleep(0.5)
            else:
                await self._compare(job, degree, answer, left=leave is not None)
            finally:
                del self._answers[number]

    def _fail(self, what: str, text: str) -> None:
        self._report.outcomes[what] += 1
        self._report.failures.append(text)

    async def _compare(self, job: Job, degree: int | None, answer: Stream, *, left: bool) -> None:
        reference = self.reference[job.name]
        same = _same(answer.tokens, reference.tokens)
        problem = None if left else _incomplete(job, answer)
        ending = "left midway" if left else "complete"
        if same < len(answer.tokens):
            expected, found = reference.tokens[same], answer.tokens[same]
            lead = await self._lead(job, same, expected, found)
            ending = "parted at a near-tie"
            self._report.worst_lead = max(self._report.worst_lead, abs(lead))
            if not abs(lead) < self._bounds.lead:
                problem = (
                    f"token {same} of {len(answer.tokens)} is {found}, not {expected}, which "
                    f"leads it by {lead:.2e}"
                )
        logprobs = answer.logprobs[:same], reference.logprobs[:same]
        self._report.worst_logprob = max(self._report.worst_logprob, worst_difference(*logprobs))
        problem = problem or self._bounds.problem(*logprobs)
        if problem:
            self._fail("different", f"{job.name} at degree {degree}: {problem}")
            return
        self._report.tokens += same
        self._report.outcomes[ending] += 1

    async def _lead(self, job: Job, at: int, expected: int, found: int) -> float:
        """By how much logits plus noise of the expected token exceed the other's: a near-tie is
        below 1e-4 in float32. NaN if it cannot be said.
        """
        forced = self.reference[job.name].tokens[: at + 1]
        body = job.body(self._model, None, forced)
        body |= {"max_tokens": at + 1, "logprobs": VOCAB, "stream": False}
        body.pop("stream_options")
        answer = await self._http.post(
            "/v1/completions", json={**body, "return_tokens_as_token_ids": True}
        )
        if answer.status_code != 200:
            return math.nan
        top = answer.json()["choices"][0]["logprobs"]["top_logprobs"][at]
        lead = top[f"token_id:{expected}"] - top[f"token_id:{found}"]
        return float(lead + noise_lead(job.seed, at, expected, found))


def _same(ours: Sequence[int], theirs: Sequence[int]) -> int:
    """Return the number of tokens before the first that differs."""
    pairs = enumerate(zip(ours, theirs, strict=False))
    return next((at for at, (a, b) in pairs if a != b), min(len(ours), len(theirs)))


def _incomplete(job: Job, answer: Stream) -> str | None:
    if answer.finish_reason != "length" or len(answer.tokens) != job.max_tokens or not answer.done:
        return (
            f"{len(answer.tokens)} of {job.max_tokens} tokens, finish_reason={answer.finish_reason}"
        )
    usage = answer.usage or {}
    if (usage.get("completion_tokens"), usage.get("prompt_tokens")) != (
        job.max_tokens,
        len(job.prompt),
    ):
        return f"usage {usage}"
    return None
