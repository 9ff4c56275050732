"""The choice between a tensor parallel step and a token parallel one: what the latter costs, and
what a group's leader chooses for each step, from costs that were measured at the start. Pure.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass, replace

from flying_serving.parallelism import Parallelism
from flying_serving.predict.steps import Step, StepCost, StepModel
from flying_serving.wire import CalibrationRow

LEAST_EACH = 2
"""Tokens of each engine in a step that divides them, at least: with fewer some have none."""


@dataclass(frozen=True)
class TokenCost:
    """Seconds of the token parallel steps of a group.

    Args:
        cost: by the tokens and requests of each engine's share: what first tokens cost more, each
            engine has for its own. Context and pairs are of the whole step, divided by heads.
        size: engines of the group.
        least_tokens: of a token parallel step. Smaller ones were not measured. They are bound by
            reading all weights, and a tensor parallel step reads a part of them.
    """

    cost: StepCost
    size: int
    least_tokens: int

    @classmethod
    def of(cls, model: StepModel, size: int) -> TokenCost | None:
        """Return the present cost of groups of this size; None if no such step was measured.

        Context costs at least as much as in tensor parallel steps: attention is divided by heads in
        both. In token parallel steps that take their time to be launched it hides.
        """
        if not model.known(size, Parallelism.TOKEN):
            return None
        measured_tokens = model.least_tokens(size, Parallelism.TOKEN)
        cost = model.cost(size, Parallelism.TOKEN)
        if model.known(size):
            tensor = model.cost(size)
            context_s = max(cost.context_token_s, tensor.context_token_s)
            pair_s = max(cost.prefill_pair_s, tensor.prefill_pair_s)
            cost = replace(cost, context_token_s=context_s, prefill_pair_s=pair_s)
        return cls(cost, size, max(LEAST_EACH * size, measured_tokens))

    def step_s(
        self,
        prefill_tokens: float,
        sequences: float,
        context_tokens: float,
        prefill_pairs: float = 0.0,
    ) -> float:
        """Return the seconds of a step with these contents; infinite if it has too few tokens."""
        if prefill_tokens + sequences < self.least_tokens:
            return math.inf
        share = prefill_tokens / self.size, sequences / self.size
        return self.cost.step_s(*share, context_tokens, prefill_pairs)

    def first_tokens_s(self, tokens: float) -> float:
        """Return the seconds that the first tokens of a step cost more."""
        return self.cost.first_tokens_s(tokens / self.size)


def shorter_step(
    tensor: StepCost, token: TokenCost | None, *contents: float
) -> tuple[Parallelism, float]:
    """Return what a group divides to make a step with these contents shorter, and its seconds.

    `token`: None if the group makes no token parallel steps. `contents`: as for `StepCost.step_s`.
    """
    tensor_s = tensor.step_s(*contents)
    token_s = math.inf if token is None else token.step_s(*contents)
    if token_s < tensor_s:
        return Parallelism.TOKEN, token_s
    return Parallelism.TENSOR, tensor_s


class ParallelismChoice:
    """Chooses what a group divides, to take less time by the measurements of the start.

    Costs are fitted once: a choice takes a few microseconds and is the same for the same step.
    """

    def __init__(self, measured: Iterable[CalibrationRow]) -> None:
        model, rows = StepModel(), list(measured)
        model.calibrate(Step.measured(rows))
        self._costs = {
            size: (model.cost(size), token)
            for size in {row.size for row in rows if model.known(row.size)}
            if (token := TokenCost.of(model, size)) is not None
        }

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

        It is TENSOR unless both were measured in groups of this size. It is TENSOR as well if
        the step has fewer tokens than two for each engine, or than any measured token parallel one.
        """
        costs = self._costs.get(size)
        if costs is None:
            return Parallelism.TENSOR
        contents = prefill_tokens, sequences, context_tokens, prefill_pairs
        return shorter_step(*costs, *contents)[0]
