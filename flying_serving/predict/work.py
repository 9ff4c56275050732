"""What policies reckon with: what groups can do, the work there is, and how to judge what comes of it."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

from flying_serving.predict.moves import MoveCost
from flying_serving.predict.steps import StepCost


@dataclass(frozen=True)
class LaneFigures:
    """What one group of a size can do.

    Args:
        cost: seconds of its steps.
        slots: requests at a time.
        kv_tokens: tokens that its pooled KV cache holds.
        budget_tokens: tokens in a step at most.
        move: what it takes to move KV from one group to another within its engines; None if KV cannot move.
    """

    cost: StepCost
    slots: int
    kv_tokens: int
    budget_tokens: int
    move: MoveCost | None = None

    def tokens_before(self, prompt_tokens: float) -> float:
        """Tokens of a prompt that are computed before a step that takes more of it, on average of these steps."""
        return max(0.0, prompt_tokens - self.budget_tokens) / 2

    def prompts_s(self, tokens: float, prompts: float) -> float:
        """Seconds by which prompts, of `tokens` in all, make steps longer."""
        pairs = tokens * self.tokens_before(tokens / max(1.0, prompts))
        return self.cost.prefill_token_s * tokens + self.cost.prefill_pair_s * pairs


@dataclass(frozen=True)
class Work:
    """Requests to come, requests that wait and requests that run.

    Args:
        rate: arrivals per second.
        prompt_tokens, output_tokens: mean lengths.
        waiting: requests that no group has yet.
        running: requests that stream, in whatever group.
        begun: what groups have left of other prompts, in prompts of mean length.
        usual_rate: what the rate falls back to if it is higher than that now.
        burst_s: seconds until then, as expected: how long a rate above the usual one still lasts.
    """

    rate: float
    prompt_tokens: float
    output_tokens: float
    waiting: float
    running: float = 0.0
    begun: float = 0.0
    usual_rate: float = 0.0
    burst_s: float = math.inf

    def rate_in(self, from_s: float, to_s: float) -> float:
        """Arrivals per second expected between two times from now: a burst does not last."""
        if self.rate <= self.usual_rate or to_s <= self.burst_s:
            return self.rate
        lasting = max(0.0, self.burst_s - from_s) / (to_s - from_s)
        return self.usual_rate + (self.rate - self.usual_rate) * lasting

    @property
    def prompts(self) -> float:
        """Those that are to be computed, in prompts of mean length."""
        return self.waiting + self.begun

    def part(self, share: float) -> Work:
        """A share of it."""
        return replace(
            self,
            rate=self.rate * share,
            usual_rate=self.usual_rate * share,
            waiting=self.waiting * share,
            running=self.running * share,
            begun=self.begun * share,
        )


@dataclass(frozen=True)
class Weights:
    """How to judge.

    Args:
        horizon_s: how far to look ahead.
        ttft_weight: seconds of streaming that one second before the first token counts for.
    """

    horizon_s: float
    ttft_weight: float


@dataclass(frozen=True)
class Interference:
    """What keeps groups from work at first: an older layout's requests.

    Args:
        blocked_s: they do nothing of it for so long.
        woven_s: for so long an older group gets as much time as they do, and one step of `turn_s` at least,
        overlap: on this share of the engines.
        synced: how many of them share an older group, and so wait for each other's prompts too.
        held_tokens: of all groups' KV cache, tokens that are not free meanwhile.
    """

    blocked_s: float = 0.0
    woven_s: float = 0.0
    turn_s: float = 0.0
    overlap: float = 1.0
    synced: float = 1.0
    held_tokens: float = 0.0

    def cycle_s(self, step_s: float) -> float:
        """Seconds of a step of theirs and of the older group's turn after it."""
        return step_s + self.overlap * max(self.turn_s, step_s)


FREE = Interference()
