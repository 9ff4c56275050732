"""The steps of a group whose requests have prompts and outputs of mean length."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

from flying_serving.predict.steps import StepCost
from flying_serving.predict.work import LaneFigures


class StepTimes(NamedTuple):
    """Seconds of the steps of a group with some decoding requests.

    Args:
        decode_s: of a step that decodes only.
        chunk_s: of a step with a chunk of one prompt too.
        full_s: of a step full of prompt tokens.
    """

    decode_s: float
    chunk_s: float
    full_s: float


# not frozen: made for every layout that is evaluated, and that takes three times as long
@dataclass(slots=True)
class LaneSteps:
    """The constants of a group's steps.

    Args:
        request_s: seconds that a decoding request adds to a step.
        parts: (prompt tokens, seconds) of the three steps of `StepTimes`, without decoding requests
            and without the extra cost of first tokens.
        first_tokens_s: that extra cost, by the tokens of a step.
        token: the steps if they are token parallel; None if the group makes none such.
        least_tokens: of a token parallel step.
    """

    request_s: float
    parts: tuple[tuple[float, float], tuple[float, float], tuple[float, float]]
    first_tokens_s: Callable[[float], float]
    token: LaneSteps | None = None
    least_tokens: float = 0.0

    @classmethod
    def of(cls, lane: LaneFigures, prompt: float, outputs: float) -> LaneSteps:
        """Return the steps of a group with these abilities; `prompt`, `outputs`: mean tokens."""
        steps, token = cls._of(lane, lane.cost, 1, prompt, outputs), lane.token_cost
        if token is not None:
            steps.token = cls._of(lane, token.cost, token.size, prompt, outputs)
            steps.token.first_tokens_s = token.first_tokens_s
            steps.least_tokens = token.least_tokens
        return steps

    @classmethod
    def _of(
        cls, lane: LaneFigures, cost: StepCost, members: int, prompt: float, outputs: float
    ) -> LaneSteps:
        """Return the steps of one parallelism; each engine computes 1 / `members` of the tokens."""
        budget = lane.max_num_batched_tokens
        before, chunk = lane.tokens_before(prompt), min(prompt, budget)
        # a prompt's token reads earlier steps' tokens; a step's start reads all tokens of its
        # prompts
        token_s = cost.prefill_token_s / members + before * (
            cost.prefill_pair_s + cost.context_token_s / chunk
        )
        fixed_s = cost.fixed_s
        parts = (
            (0.0, fixed_s),
            (chunk, fixed_s + token_s * chunk),
            (budget, fixed_s + token_s * budget),
        )
        request_s = cost.sequence_s / members + cost.context_token_s * (prompt + outputs / 2)
        return cls(request_s, parts, cost.first_tokens_s)

    def times(self, running: float) -> StepTimes:
        """Return the times of steps with this many decoding requests, each tensor parallel or token
        parallel, whichever is shorter.
        """
        (none, base_s), (chunk, single_s), (most, full_s) = self.parts
        first_s, decode_s = self.first_tokens_s, running * self.request_s
        tensor = StepTimes(
            base_s + decode_s + first_s(none + running),
            single_s + decode_s + first_s(chunk + running),
            full_s + decode_s + first_s(most + running),
        )
        return tensor if self.token is None else self._shorter(tensor, self.token, running)

    def _shorter(self, tensor: StepTimes, token: LaneSteps, running: float) -> StepTimes:
        """Return the shorter ones. No step is shorter than one with less in it."""
        times, less_s, least = [], 0.0, self.least_tokens
        first_s, decode_s = token.first_tokens_s, running * token.request_s
        for tensor_s, (prompt_tokens, token_s) in zip(tensor, token.parts, strict=True):
            tokens, shorter_s = prompt_tokens + running, tensor_s
            if tokens >= least:
                token_s += decode_s + first_s(tokens)
                # the builtin min and max take twice as long
                shorter_s = token_s if token_s < tensor_s else tensor_s
            less_s = shorter_s if shorter_s > less_s else less_s
            times.append(less_s)
        return StepTimes(*times)
