"""Batches to a target: a step takes as many prompt tokens as its predicted time allows
(`--tbt-slo-ms`).

DynaServe fills batches likewise (section 4.2 of the paper). Decoding requests come first, then
prompts as long as the time between two tokens stays under its target.
"""

from bisect import bisect_right
from collections.abc import Callable, Iterable
from dataclasses import dataclass

from flying_serving.predict.steps import Step, StepModel
from flying_serving.predict.work import step_time
from flying_serving.wire import CalibrationRow, StepRow

OVERRUN = 0.9
"""Factor of the planned time after a step that has taken longer than the target."""
WITHIN = 1.001
"""Factor of the planned time, up to 1, after a step within the target: about one step with prompts
in a hundred takes longer.
"""


@dataclass(frozen=True)
class Running:
    """The demand of requests with KV on a scheduler's next step: running requests, and requests
    that arrived with KV.

    `decoding`: requests with one token to compute, `context_tokens`: the tokens before it.
    `prefilling`: the other running requests, `computed_tokens`: the tokens that the first of them
    has of its prompt.
    """

    decoding: int = 0
    context_tokens: int = 0
    prefilling: int = 0
    computed_tokens: int = 0


class Batches:
    """Computes how many prompt tokens steps may take beside requests that decode.

    Args:
        target_s: the longest time between two tokens of a request.
        most_tokens, least_tokens: in a step. A prompt gets the least in any step, so that it ends.
        active_lanes: lanes of this engine that have requests now; they take turns, and share the
            time.
    """

    def __init__(
        self, target_s: float, most_tokens: int, least_tokens: int, active_lanes: Callable[[], int]
    ) -> None:
        self._target_s = target_s
        self._tokens = range(least_tokens, most_tokens + 1)
        self._active_lanes = active_lanes
        self._costs = StepModel()
        self._planned: dict[int, float] = {}
        """The planned share of the target in a step, by group size."""

    def calibrate(self, rows: Iterable[CalibrationRow]) -> None:
        """Take the steps that were measured at start."""
        self._costs.calibrate(Step.measured(rows))

    def stepped(self, row: StepRow) -> None:
        """Learn from a step of a lane that this engine leads, which has ended."""
        for step in Step.served([row]):
            self._costs.observe(step)
            if step.prefill_tokens and step.sequences:
                factor = OVERRUN if step.duration_s > self._target_s / self._lanes() else WITHIN
                self._planned[step.size] = min(1.0, self._planned.get(step.size, 1.0) * factor)

    def prompt_tokens(self, size: int, running: Running) -> int | None:
        """Return the limit of prompt tokens for the next step of the lane of this size.

        Returns None, no limit, if no request decodes and no other lane is active, or if no step of
        the lane was measured.
        """
        lanes = self._lanes()
        if (not running.decoding and lanes == 1) or not self._costs.known(size):
            return None
        time_s = step_time(self._costs, size)
        limit_s = self._target_s * self._planned.get(size, 1.0) / lanes

        def step_s(tokens: int) -> float:
            pairs = tokens * running.computed_tokens
            return time_s(tokens, running.decoding, running.context_tokens, pairs)

        return max(
            self._tokens.start,
            self._tokens.start + bisect_right(self._tokens, limit_s, key=step_s) - 1,
        )

    def _lanes(self) -> int:
        return max(1, self._active_lanes())
