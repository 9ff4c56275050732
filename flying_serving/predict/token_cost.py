"""The cost of steps of a group that divide tokens, beside that of its tensor parallel steps."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

from flying_serving.layout.parallelism import Parallelism
from flying_serving.predict.steps import StepCost, StepModel

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
