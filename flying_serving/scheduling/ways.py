"""The choice of what the engines of a group divide in a step, pure.

The group's leader makes it for each step, from costs that were measured at the start.
"""

import math
from collections.abc import Iterable

from flying_serving.layout.parallelism import Parallelism
from flying_serving.predict.steps import Step, StepCost, StepModel
from flying_serving.predict.token_cost import TokenCost
from flying_serving.wire import CalibrationRow


class StepWays:
    """Chooses the way that is predicted to take less time, from the measurements of the start.

    Costs are fitted once: a choice takes a few microseconds and is the same for the same step.
    """

    def __init__(self, measured: Iterable[CalibrationRow]) -> None:
        model, rows = StepModel(), list(measured)
        model.calibrate(Step.measured(rows))
        self._costs: dict[int, tuple[StepCost, TokenCost]] = {}
        for size in {row.size for row in rows if model.known(row.size)}:
            token = TokenCost.of(model, size)
            if token is not None:
                self._costs[size] = model.cost(size), token

    def least_tokens(self, size: int) -> float:
        """Return the tokens of the smallest step of a group that may divide them; infinite if none
        may.
        """
        costs = self._costs.get(size)
        return math.inf if costs is None else costs[1].least_tokens

    def choose(
        self,
        size: int,
        prefill_tokens: int,
        sequences: int,
        context_tokens: int,
        prefill_pairs: int,
    ) -> Parallelism:
        """Return what the group's engines divide in a step with these contents (see `StepRow`).

        It is TENSOR unless both ways were measured in groups of this size. It is TENSOR as well if
        the step has fewer tokens than two for each engine, or than any measured token parallel one.
        """
        costs = self._costs.get(size)
        if costs is None:
            return Parallelism.TENSOR
        tensor, token = costs
        token_s = token.step_s(prefill_tokens, sequences, context_tokens, prefill_pairs)
        tensor_s = tensor.step_s(prefill_tokens, sequences, context_tokens, prefill_pairs)
        return Parallelism.TOKEN if token_s < tensor_s else Parallelism.TENSOR
