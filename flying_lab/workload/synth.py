"""Synthesised workloads: arrivals and lengths, drawn from a seed.

Arrivals are a renewal process with gamma-distributed gaps of mean 1, run at the speed of the
phase's rate. So one parameter holds across phases, and a phase ends exactly where it should. It is
the burstiness as vLLM names it, the gamma's shape: 1 is Poisson, less is more bursty, much more is
even.
"""

from __future__ import annotations

import itertools
import math
from abc import abstractmethod
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Annotated, Any

import numpy as np
from pydantic import AfterValidator, BaseModel, ConfigDict, Field, ValidationError, model_validator

from flying_lab.errors import WorkloadError
from flying_lab.workload.model import MAX_TOKENS, Request, Workload

MAX_REQUESTS = 10_000_000
MAX_RATE_RPS = 1e6


def _ascending(pair: tuple[Any, Any]) -> tuple[Any, Any]:
    if pair[0] > pair[1]:
        raise ValueError("the first number is the lower one")
    return pair


Tokens = Annotated[int, Field(ge=1, le=MAX_TOKENS)]
TokenRange = Annotated[tuple[Tokens, Tokens], AfterValidator(_ascending)]
Rate = Annotated[float, Field(gt=0, le=MAX_RATE_RPS)]
RateRange = Annotated[tuple[Rate, Rate], AfterValidator(_ascending)]
Seconds = Annotated[float, Field(ge=1e-3, le=1e9)]
Burstiness = Annotated[float, Field(ge=1e-3, le=1e9)]


@dataclass(frozen=True)
class Phase:
    """A time with one arrival rate."""

    label: str | None
    rate_rps: float
    length_s: float


class Synthesis(BaseModel):
    """The parameters that every synthesised workload has. It ends at the first of `requests` and
    `duration_s`.
    """

    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False)

    requests: int | None = Field(default=None, ge=1, le=MAX_REQUESTS)
    duration_s: Seconds | None = None
    prompt_tokens: TokenRange = (128, 4000)
    """Tokens of a prompt: uniform, both ends included."""
    output_tokens: TokenRange = (64, 512)

    @model_validator(mode="after")
    def _ends(self) -> Synthesis:
        if self.requests is None and self.duration_s is None:
            raise ValueError("requests or duration_s is needed")
        return self

    @abstractmethod
    def phases(self, rng: np.random.Generator) -> Iterator[Phase]:
        """Yield the phases of the workload, without end."""

    @property
    def kind(self) -> str:
        """Return the name on the command line."""
        return type(self).__name__.lower()


class Poisson(Synthesis):
    """Independent arrivals at one rate."""

    rate_rps: Rate = 5.0

    def phases(self, rng: np.random.Generator) -> Iterator[Phase]:
        """Yield one phase without end."""
        yield Phase(None, self.rate_rps, math.inf)


class Gamma(Poisson):
    """Arrivals at one rate, as bursty as asked for."""

    burstiness: Burstiness = 0.25


class Alternating(Synthesis):
    """Low phases and bursts in turn, each with its own fixed rate."""

    low_rate_rps: Rate = 3.5
    burst_rate_rps: Rate = 20.0
    low_s: Seconds = 60.0
    burst_s: Seconds = 60.0
    burstiness: Burstiness = 1.0

    def phases(self, rng: np.random.Generator) -> Iterator[Phase]:
        """Yield low phases and bursts in turn."""
        return itertools.cycle(
            [
                Phase("low", self.low_rate_rps, self.low_s),
                Phase("burst", self.burst_rate_rps, self.burst_s),
            ]
        )


class Paper(Synthesis):
    """The generator of section 6.1 of the Flying Serving paper (arXiv 2602.22593).

    Each phase draws its rate uniformly, arrivals inside are Poisson. The paper does not say how
    long phases are: a minute each is our choice.
    """

    requests: int | None = Field(default=4000, ge=1, le=MAX_REQUESTS)
    low_rate_rps: RateRange = (2.0, 5.0)
    burst_rate_rps: RateRange = (10.0, 30.0)
    low_s: Seconds = 60.0
    burst_s: Seconds = 60.0

    def phases(self, rng: np.random.Generator) -> Iterator[Phase]:
        """Yield low phases and bursts in turn, each with a rate of its own."""
        while True:
            yield Phase("low", rng.uniform(*self.low_rate_rps), self.low_s)
            yield Phase("burst", rng.uniform(*self.burst_rate_rps), self.burst_s)


KINDS: dict[str, type[Synthesis]] = {
    "paper": Paper,
    "poisson": Poisson,
    "gamma": Gamma,
    "alternating": Alternating,
}


def parse_synthesis(kind: str, parameters: dict[str, Any]) -> Synthesis:
    """Check the parameters of a generator. Raises WorkloadError, naming the parameter, its value
    and the allowed values.
    """
    if kind not in KINDS:
        raise WorkloadError("synth", kind, f"one of {', '.join(KINDS)}")
    try:
        return KINDS[kind].model_validate(parameters)
    except ValidationError as error:
        problem = error.errors()[0]
        field = ".".join(str(place) for place in problem["loc"]) or kind
        if problem["type"] == "extra_forbidden":
            known = ", ".join(KINDS[kind].model_fields)
            raise WorkloadError(field, problem["input"], f"{kind} has only {known}") from None
        raise WorkloadError(field, problem["input"], problem["msg"]) from None


def synthesise(synthesis: Synthesis, seed: int) -> Workload:
    """Draw a workload. Raises WorkloadError if no request arrives in time, or more than ten million
    do.
    """
    if seed < 0:
        raise WorkloadError("seed", seed, "at least 0")
    most = synthesis.requests or MAX_REQUESTS + 1
    arrivals = list(itertools.islice(_arrivals(synthesis, seed), most))
    if not arrivals:
        raise WorkloadError(
            "duration_s", synthesis.duration_s, "long enough for one request at this rate"
        )
    if len(arrivals) > MAX_REQUESTS:
        raise WorkloadError("duration_s", synthesis.duration_s, f"at most {MAX_REQUESTS} requests")
    rng = np.random.default_rng([seed, 2])
    prompts = rng.integers(*synthesis.prompt_tokens, size=len(arrivals), endpoint=True).tolist()
    outputs = rng.integers(*synthesis.output_tokens, size=len(arrivals), endpoint=True).tolist()
    requests = tuple(
        Request(index, arrival_s, prompt, output, phase=label)
        for index, ((arrival_s, label), prompt, output) in enumerate(
            zip(arrivals, prompts, outputs, strict=True)
        )
    )
    return Workload(
        synthesis.kind, seed, requests, origin=f"{synthesis.kind} {synthesis.model_dump_json()}"
    )


def _arrivals(synthesis: Synthesis, seed: int) -> Iterator[tuple[float, str | None]]:
    """Yield (time in s, phase label) of each arrival before `duration_s`."""
    rng = np.random.default_rng([seed, 1])
    shape = float(getattr(synthesis, "burstiness", 1.0))  # of the gamma: 1 is Poisson
    end_s = synthesis.duration_s or math.inf
    start_s, due = 0.0, rng.gamma(shape, 1 / shape)
    for phase in synthesis.phases(np.random.default_rng([seed, 3])):
        now_s = start_s
        while (now_s := now_s + due / phase.rate_rps) < start_s + phase.length_s:
            if now_s >= end_s:
                return
            yield now_s, phase.label
            due = rng.gamma(shape, 1 / shape)
        due = max(0.0, now_s - start_s - phase.length_s) * phase.rate_rps
        start_s += phase.length_s
        if start_s >= end_s:
            return
