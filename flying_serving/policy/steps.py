"""How long a step takes in each lane, learned while serving: non-negative least squares with fading memory."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import numpy as np
from scipy.optimize import nnls

FEW, SOME = 8, 64
"""Tokens of a step: the first so many may cost more than those after them."""
_SCALE = np.array([1.0, 256.0, 8.0, 4096.0, FEW, SOME, 1e6, 8.0, 256.0])
"""Typical size of each feature, so that the equations are well conditioned."""
_HELD = 0.05
"""What serving adds to prompt tokens is 0 as far as so much of each measurement of the start says."""
_REFIT_STEPS = 20
_RIDGE = 1e-6


@dataclass(frozen=True)
class Step:
    """One measured step.

    Args:
        size: engines that stepped together.
        duration_s: how long it took.
        prefill_tokens: tokens of prompts in it.
        sequences: requests in it that decoded one token.
        context_tokens: tokens that its requests had computed before.
        prefill_pairs: each prompt token times the tokens of its request that were computed before.
    """

    size: int
    duration_s: float
    prefill_tokens: int
    sequences: int
    context_tokens: int
    prefill_pairs: int = 0


@dataclass(frozen=True)
class StepCost:
    """Seconds of a step in one lane: linear in what it holds, and more for its first tokens.

    Args:
        fixed_s: of every step.
        prefill_token_s, sequence_s, context_token_s: for each prompt token, decoding request and token of context.
        few_token_s, some_token_s: more for each of the first FEW and of the first SOME tokens, of prompts or decoding:
            the weights of experts are read for the first token that needs them, and small batches fill no kernel.
        prefill_pair_s: for each prompt token and each token before it, of earlier steps: what long prompts are made of.
    """

    fixed_s: float
    prefill_token_s: float
    sequence_s: float
    context_token_s: float
    few_token_s: float = 0.0
    some_token_s: float = 0.0
    prefill_pair_s: float = 0.0

    def step_s(
        self, prefill_tokens: float, sequences: float, context_tokens: float, prefill_pairs: float = 0.0
    ) -> float:
        """Seconds of a step with these contents."""
        tokens = prefill_tokens + sequences
        return (
            self.fixed_s
            + self.prefill_token_s * prefill_tokens
            + self.sequence_s * sequences
            + self.context_token_s * context_tokens
            + self.prefill_pair_s * prefill_pairs
            + self.few_token_s * (tokens if tokens < FEW else FEW)  # builtin min takes twice as long
            + self.some_token_s * (tokens if tokens < SOME else SOME)
        )


class StepModel:
    """Step costs by group size.

    Each lane keeps the weighted sums that least squares needs, so a step costs one small outer product and no history
    is stored. Errors are relative (a step that a neighbour on the machine has delayed weighs little), old steps fade,
    and what was measured at the start stays as a weak prior for what the traffic does not show.

    Requests cost more while serving than in a step of the start: their tokens are sampled, sent and made text, on cores
    that the engine may share. What a decoding request and a prompt token cost more is fitted apart, else the start's
    steps with many of them would hide what small served ones say of it. First prompts are few and differ more than what
    they cost more: that is held near 0 until some have come.

    Args:
        memory_steps: after so many steps of a lane the weight of a measurement has fallen to 1/e.
        prior_weight: how many steps one measurement of the start counts for.
    """

    def __init__(self, memory_steps: float = 1000.0, prior_weight: float = 5.0) -> None:
        self._keep = 1.0 - 1.0 / memory_steps
        self._prior_weight = prior_weight
        self._prior: dict[int, _Sums] = {}
        self._seen: dict[int, _Sums] = {}
        self._costs: dict[int, StepCost] = {}
        self._stale: dict[int, int] = {}

    def calibrate(self, steps: Iterable[Step]) -> None:
        """Take measurements from the start of the server; they never fade."""
        for step in steps:
            self._prior.setdefault(step.size, _Sums()).add(step, self._prior_weight, served=False)
            self._costs.pop(step.size, None)

    def observe(self, step: Step) -> None:
        """Take a step that was measured while serving."""
        sums = self._seen.setdefault(step.size, _Sums())
        sums.fade(self._keep)
        sums.add(step, 1.0, served=True)
        stale = self._stale.get(step.size, 0) + 1
        if stale >= _REFIT_STEPS:
            self._costs.pop(step.size, None)
            stale = 0
        self._stale[step.size] = stale

    def known(self, size: int) -> bool:
        """Whether a step of this lane was ever measured."""
        return size in self._prior or size in self._seen

    def cost(self, size: int) -> StepCost:
        """The lane's present costs.

        Raises:
            KeyError: if no step of it was measured.
        """
        cost = self._costs.get(size)
        if cost is None:
            sums = [table[size] for table in (self._prior, self._seen) if size in table]
            if not sums:
                raise KeyError(f"no step of group size {size} was measured")
            cost = self._costs[size] = _solve(sums)
        return cost


class _Sums:
    """X'WX and X'Wy of rows that are divided by their duration, so that the right-hand side is 1."""

    def __init__(self) -> None:
        self.gram: Any = np.zeros((_SCALE.size, _SCALE.size))
        self.right: Any = np.zeros(_SCALE.size)

    def add(self, step: Step, weight: float, *, served: bool) -> None:
        tokens = step.prefill_tokens + step.sequences
        few, some = min(tokens, FEW), min(tokens, SOME)
        computed = [1.0, step.prefill_tokens, step.sequences, step.context_tokens, few, some, step.prefill_pairs]
        more = [step.sequences, step.prefill_tokens] if served else [0, 0]
        row = np.array([*computed, *more]) / _SCALE / step.duration_s
        self.gram += weight * np.outer(row, row)
        self.right += weight * row
        if not served:
            self.gram[-1, -1] += _HELD * weight * row[1] ** 2

    def fade(self, keep: float) -> None:
        self.gram *= keep
        self.right *= keep


def _solve(sums: list[_Sums]) -> StepCost:
    gram = sum(s.gram for s in sums)
    right = sum(s.right for s in sums)
    # to each feature's own scale: prompts make long steps, so their rows are small beside those of decodes
    own = np.diag(gram)
    gram = gram + _RIDGE * np.diag(np.maximum(own, _RIDGE * own.max()))
    root = np.linalg.cholesky(gram)
    values, _ = nnls(root.T, np.linalg.solve(root, right))
    fixed_s, prefill_s, sequence_s, *others, more_sequence_s, more_prefill_s = (float(v) for v in values / _SCALE)
    return StepCost(fixed_s, prefill_s + more_prefill_s, sequence_s + more_sequence_s, *others)
