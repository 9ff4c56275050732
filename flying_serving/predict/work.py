"""Inputs of a forecast: the abilities of groups, the work to be done, and the objective."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, replace

from flying_serving.predict import arrivals
from flying_serving.predict.migrations import MigrationCost
from flying_serving.predict.parallelism import TokenCost, shorter_step
from flying_serving.predict.steps import StepCost, StepModel

URGENCY = 10.0
"""What a second of an urgent request counts, in seconds of others.

So urgent requests that are a tenth of all count as much as the others together.
"""


def weight(*, urgent: bool) -> float:
    """Return what a second of a request counts."""
    return URGENCY if urgent else 1.0


@dataclass(frozen=True)
class LaneFigures:
    """The abilities of one group of a size.

    Args:
        cost: of its steps: of tensor parallel ones, where it makes both.
        max_num_seqs: vLLM's: requests that it runs at a time.
        kv_tokens: tokens that its pooled KV cache holds.
        max_num_batched_tokens: vLLM's: tokens of a step.
        migration: cost of migrating KV from one group to another within its engines; None if KV
            cannot migrate.
        token_cost: of its token parallel steps; None if it makes none. A group divides what takes
            less time (`shorter_step`).
    """

    cost: StepCost
    max_num_seqs: int
    kv_tokens: float
    max_num_batched_tokens: int
    migration: MigrationCost | None = None
    token_cost: TokenCost | None = None

    @classmethod
    def of(
        cls,
        model: StepModel,
        size: int,
        max_num_seqs: int,
        kv_tokens: float,
        max_num_batched_tokens: int,
        migration: MigrationCost | None,
    ) -> LaneFigures:
        """Return the abilities of a group with the present costs of its steps. Raises KeyError if
        none was measured.
        """
        return cls(
            model.cost(size),
            max_num_seqs,
            kv_tokens,
            max_num_batched_tokens,
            migration,
            TokenCost.of(model, size),
        )

    def step_s(self, prefill_tokens: float, sequences: float, context_tokens: float) -> float:
        """Return the seconds of a step with these contents."""
        contents = prefill_tokens, sequences, context_tokens
        return shorter_step(self.cost, self.token_cost, *contents)[1]

    def tokens_before(self, prompt_tokens: float) -> float:
        """Return the tokens of a prompt that are computed before a step that takes more of it, on
        average of these steps.
        """
        return max(0.0, prompt_tokens - self.max_num_batched_tokens) / 2

    def prompts_s(self, tokens: float, prompts: float) -> float:
        """Return the seconds by which prompts, of `tokens` in all, make steps longer."""
        before = self.tokens_before(tokens / max(1.0, prompts))
        tensor_s = self.cost.prefill_token_s * tokens + self.cost.prefill_pair_s * (tokens * before)
        if self.token_cost is None or tokens == 0:
            return tensor_s
        step_tokens = min(tokens, self.max_num_batched_tokens)
        contents = step_tokens, 0, 0, step_tokens * before
        saved_s = self.cost.step_s(*contents) - self.token_cost.step_s(*contents)
        return max(0.0, tensor_s - max(0.0, saved_s) * (tokens / step_tokens))


def step_time(model: StepModel, size: int) -> Callable[..., float]:
    """Return a function of the seconds of a step of a group, from its contents as for
    `StepCost.step_s`, by `shorter_step`. Raises KeyError if no step was measured.
    """
    cost, token = model.cost(size), TokenCost.of(model, size)
    return lambda *contents: shorter_step(cost, token, *contents)[1]


def costs_by_size(lanes: Mapping[int, LaneFigures]) -> dict[str, object]:
    """Return the costs of the steps of groups, as plain JSON by kind and group size."""
    return {
        "step_cost": {str(size): asdict(lane.cost) for size, lane in lanes.items()},
        "token_parallel_step_cost": {
            str(size): asdict(lane.token_cost)
            for size, lane in lanes.items()
            if lane.token_cost is not None
        },
    }


@dataclass(frozen=True)
class Work:
    """Requests that arrive, wait and run.

    Args:
        rate: arrivals per second.
        prompt_tokens: of a request, mean.
        output_tokens: of a request, mean.
        waiting: requests that no group has yet.
        running: requests that stream, in any group.
        begun: prompt tokens that groups have not computed yet, in prompts of mean length.
        usual_rate: arrivals per second in the long run.
        rate_error: standard deviation of what the rate may be, in arrivals per second.
    """

    rate: float
    prompt_tokens: float
    output_tokens: float
    waiting: float
    running: float = 0.0
    begun: float = 0.0
    usual_rate: float = math.inf
    rate_error: float = 0.0

    def rate_between(self, from_s: float, to_s: float) -> float:
        """Return the mean arrivals per second between two times from now.

        A rate above the usual one decays over `arrivals.CHANGE_S`, the mean time that a rate lasts.
        """
        if self.rate <= self.usual_rate:
            return self.rate
        lasts_s = arrivals.CHANGE_S
        left_s = lasts_s * (math.exp(-from_s / lasts_s) - math.exp(-to_s / lasts_s))
        return self.usual_rate + (self.rate - self.usual_rate) * left_s / (to_s - from_s)

    @property
    def prompts(self) -> float:
        """Prompts to compute, in prompts of mean length."""
        return self.waiting + self.begun

    @property
    def unlike(self) -> tuple[Work, Work]:
        """The same work with a rate that is lower, and higher, by its standard deviation."""
        rates = max(arrivals.LEAST_RATE, self.rate - self.rate_error), self.rate + self.rate_error
        low, high = (replace(self, rate=rate) for rate in rates)
        return low, high

    def part(self, share: float) -> Work:
        """Return a share of the work."""
        return replace(
            self,
            rate=self.rate * share,
            usual_rate=self.usual_rate * share,
            waiting=self.waiting * share,
            running=self.running * share,
            begun=self.begun * share,
        )


@dataclass(frozen=True)
class Objective:
    """The objective of a layout: the least request-seconds, which is the least mean end-to-end
    latency.

    A service-level objective has targets (`ttft_s`, `tpot_s`; infinite without one). A request that
    is predicted to miss it counts `horizon_s` more, as if it had to wait for the whole horizon. So
    the share of requests that meet it comes first, and latency decides between layouts with equal
    shares.

    Args:
        horizon_s: seconds for which a forecast counts.
        ttft_s: target of the time to the first token.
        tpot_s: target of the time per output token.
        urgency: factor of seconds before a first token, above 1 if the switch is for an urgent
            request.
    """

    horizon_s: float
    ttft_s: float = math.inf
    tpot_s: float = math.inf
    urgency: float = 1.0

    @property
    def has_slo(self) -> bool:
        """True if there is a service-level objective."""
        return self.ttft_s < math.inf or self.tpot_s < math.inf


@dataclass(frozen=True)
class Interference:
    """Requests of an older layout, which keep the groups of a layout from new work at first.

    Args:
        blocked_s: the groups do no new work for this long.
        woven_s: until then, each step is followed by a time slice of an older group.
        slice_s: seconds of a step of the older group. A time slice is as long as the new group's
            step, and at least this long.
        overlap: share of the engines with such slices.
        synced: number of groups that share an older group, and so also wait for each other's
            prompts.
        held_tokens: KV tokens, of all groups, that are not free meanwhile.
    """

    blocked_s: float = 0.0
    woven_s: float = 0.0
    slice_s: float = 0.0
    overlap: float = 1.0
    synced: float = 1.0
    held_tokens: float = 0.0

    def cycle_s(self, step_s: float) -> float:
        """Return the seconds of a step and of the older group's time slice after it."""
        return step_s + self.overlap * max(self.slice_s, step_s)


NO_INTERFERENCE = Interference()
