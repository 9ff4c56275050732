"""The time of a step in each lane, learned while serving: non-negative least squares with fading
memory.
"""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
from msgspec.structs import astuple
from scipy.optimize import nnls

from flying_serving.parallelism import Parallelism
from flying_serving.wire import CalibrationRow, StepRow

FEW, SOME = 8, 64
"""Tokens of a step: the first FEW, and the first SOME, may cost more than those after them."""
MEMORY_STEPS = 1000.0
"""Steps of a lane after which the weight of a measurement has fallen to 1/e."""
PRIOR_STEPS = 5.0
"""Steps that one measurement of the start counts for."""
_SCALE = np.array([1.0, 256.0, 8.0, 4096.0, FEW, SOME, 1e6, 256.0, 8.0])
"""Typical size of each feature, so that the equations are well conditioned."""
_START, _ADDED = [1, 2], [7, 8]
"""Features: prompt tokens and decoding requests, of all steps, and once more of served steps."""
_MOST_ADDED = [0.25, 1.5]
"""Share of the start's cost that serving in one lane adds to others at most: a lane with more is
slow itself.
"""
_HELD = [0.05, 0.01]
"""Weight of a pull towards the other lanes' share, per weight of the start's rows.

With 20 rows of decoding requests it is 20 x PRIOR_STEPS x 0.01. That is the weight of 1 served step
of such requests: some ten outweigh it.
"""
_REFIT_STEPS = 20
_RIDGE = 1e-6

StepKind = tuple[int, Parallelism]
"""A kind of step: the engines of a group, and what they divide."""


@dataclass(frozen=True)
class Step:
    """One measured step of `size` engines together.

    `sequences`: requests in it that decoded one token. `context_tokens`: tokens that its requests
    had computed before. `prefill_pairs`: each prompt token times the tokens of its request that
    were computed before. `parallelism`: what the engines divided.
    """

    size: int
    duration_s: float
    prefill_tokens: int
    sequences: int
    context_tokens: int
    prefill_pairs: int = 0
    parallelism: Parallelism = Parallelism.TENSOR

    @classmethod
    def measured(cls, rows: Iterable[CalibrationRow]) -> Iterator[Step]:
        """Return the steps that an engine measured at its start."""
        return (cls.of_probe(*astuple(row)) for row in rows)

    @classmethod
    def served(cls, rows: Iterable[StepRow]) -> Iterator[Step]:
        """Return the steps that an engine led while serving, without steps that another lane's step
        disturbed.
        """
        for row in rows:
            *contents, disturbed, parallelism = astuple(row)
            if not disturbed and row.seconds > 0:
                yield cls(*(*contents, parallelism))

    @classmethod
    def of_probe(
        cls,
        size: int,
        duration_s: float,
        tokens: int,
        is_prefill: bool,
        context_tokens: int,
        parallelism: Parallelism = Parallelism.TENSOR,
    ) -> Step:
        """Return a step with `tokens` of one prompt, or one of each decoding request; each has
        `context_tokens` before.
        """
        before = tokens * context_tokens
        contents = (tokens, 0, context_tokens, before) if is_prefill else (0, tokens, before, 0)
        return cls(size, duration_s, *contents, parallelism)

    @property
    def kind(self) -> StepKind:
        """The group size and what its engines divided, which have costs of their own."""
        return self.size, self.parallelism

    def to_row(self) -> CalibrationRow:
        """Return the row of which `of_probe` made this step."""
        if self.prefill_tokens:
            tokens, context = self.prefill_tokens, self.context_tokens
        else:
            tokens, context = self.sequences, self.context_tokens // max(1, self.sequences)
        return CalibrationRow(
            self.size, self.duration_s, tokens, bool(self.prefill_tokens), context, self.parallelism
        )


@dataclass(frozen=True)
class StepCost:
    """Seconds of a step in one lane: `fixed_s`, more for each token or request, and more for its
    first tokens.

    `few_token_s`, `some_token_s`: more for each of the first FEW and of the first SOME tokens, of
    prompts or decoding. The weights of experts are read for the first token that needs them, and
    small batches fill no kernel. `prefill_pair_s`: for each prompt token and each token of earlier
    steps before it: most of the cost of long prompts.
    """

    fixed_s: float
    prefill_token_s: float
    sequence_s: float
    context_token_s: float
    few_token_s: float = 0.0
    some_token_s: float = 0.0
    prefill_pair_s: float = 0.0

    def step_s(
        self,
        prefill_tokens: float,
        sequences: float,
        context_tokens: float,
        prefill_pairs: float = 0.0,
    ) -> float:
        """Return the seconds of a step with these contents."""
        return (
            self.fixed_s
            + self.prefill_token_s * prefill_tokens
            + self.sequence_s * sequences
            + self.context_token_s * context_tokens
            + self.prefill_pair_s * prefill_pairs
            + self.first_tokens_s(prefill_tokens + sequences)
        )

    def first_tokens_s(self, tokens: float) -> float:
        """Return the seconds that the first tokens of a step cost more."""
        # the builtin min takes twice as long
        few, some = tokens if tokens < FEW else FEW, tokens if tokens < SOME else SOME
        return self.few_token_s * few + self.some_token_s * some


class StepModel:
    """Step costs by group size, and by what the group's engines divide.

    Each lane keeps the weighted sums that least squares needs, so a step costs one small outer
    product and no history is stored. Errors are relative: a step that a neighbour on the machine
    has delayed weighs little. Old steps fade. The start's measurements stay as a weak prior for
    steps that the traffic does not show.

    Requests cost more while serving than in a step of the start. Their tokens are sampled, sent and
    made text, on cores that the engine may share. The extra cost of a prompt token and of a
    decoding request is fitted apart. Otherwise the start's steps with many of them would hide the
    evidence of small served ones.

    Until a lane has served some, its extra cost is held near that of other lanes, as a share of the
    cost at the start. Otherwise lanes that have not served yet would seem cheap, and the first few
    prompts say little.
    """

    def __init__(self) -> None:
        self._prior: dict[StepKind, _Sums] = {}
        self._seen: dict[StepKind, _Sums] = {}
        self._costs: dict[StepKind, StepCost] = {}
        self._added: dict[StepKind, Any] = {}
        self._steps: Counter[StepKind] = Counter()

    def calibrate(self, steps: Iterable[Step]) -> None:
        """Take measurements from the start of the server, which never fade."""
        for step in steps:
            self._prior.setdefault(step.kind, _Sums()).add(step, PRIOR_STEPS, served=False)
        self._costs.clear()
        self._added.clear()

    def observe(self, step: Step) -> None:
        """Take a step that was measured while serving."""
        kind = step.kind
        sums = self._seen.setdefault(kind, _Sums())
        sums.fade(1.0 - 1.0 / MEMORY_STEPS)
        sums.add(step, 1.0, served=True)
        self._steps[kind] += 1
        fits, rest = divmod(self._steps[kind], _REFIT_STEPS)
        if rest:
            return
        self._costs.pop(kind, None)
        # other lanes learn what serving adds here each time that twice as much is known
        if fits & (fits - 1) == 0:
            self._costs.clear()
            self._added.pop(kind, None)

    def known(self, size: int, parallelism: Parallelism = Parallelism.TENSOR) -> bool:
        """Return whether a step of this lane was ever measured that divides this."""
        return any((size, parallelism) in table for table in (self._prior, self._seen))

    def least_tokens(self, size: int, parallelism: Parallelism) -> int:
        """Return the tokens of the smallest step of this lane that was measured and divides this.
        Raises ValueError if none was.
        """
        kind = size, parallelism
        return min(table[kind].least_tokens for table in (self._prior, self._seen) if kind in table)

    def cost(self, size: int, parallelism: Parallelism = Parallelism.TENSOR) -> StepCost:
        """Return the present costs of the lane's steps that divide this; of token parallel ones by
        each engine's share of tokens and requests. Raises KeyError if none was measured.
        """
        kind = size, parallelism
        cost = self._costs.get(kind)
        if cost is None:
            if not self.known(size, parallelism):
                raise KeyError(
                    f"no {parallelism.value} parallel step of group size {size} was measured"
                )
            values = self._values(kind, self._added_elsewhere(kind)) / _SCALE
            values[_START] += values[_ADDED]
            cost = self._costs[kind] = StepCost(*(float(value) for value in values[: _ADDED[0]]))
        return cost

    def _values(self, kind: StepKind, added: Any) -> Any:
        """Return the coefficients, each times its scale. `added`: the shares near which the extra
        cost of serving is held.
        """
        sums = [table[kind] for table in (self._prior, self._seen) if kind in table]
        gram, right = sum(s.gram for s in sums), sum(s.right for s in sums)
        if kind in self._prior:
            for start, more, share, held in zip(_START, _ADDED, added, _HELD, strict=True):
                apart = np.zeros(_SCALE.size)
                apart[more], apart[start] = 1.0, -share
                gram = gram + held * self._prior[kind].gram[start, start] * np.outer(apart, apart)
        return _solve(gram, right)

    def _added_elsewhere(self, kind: StepKind) -> Any:
        """Return the extra cost of serving in other lanes, as shares of the cost at the start; 0
        where none has served.
        """
        total, weight = np.zeros(len(_ADDED)), np.full(len(_ADDED), 1e-9)
        others = (one for one in self._seen if one in self._prior and one != kind)
        for other in others:  # in their own order, so that sums have the same bits each time
            shares = self._added.get(other)
            if shares is None:
                values = self._values(other, np.zeros(len(_ADDED)))
                shares = values[_ADDED] / np.maximum(values[_START], 1e-12)
                shares = self._added[other] = np.minimum(shares, _MOST_ADDED)
            seen = np.diag(self._seen[other].gram)[_ADDED]
            total += seen * shares
            weight += seen
        return total / weight


class _Sums:
    """X'WX and X'Wy of rows that are divided by their duration, so that the right-hand side is
    1.
    """

    def __init__(self) -> None:
        self.gram: Any = np.zeros((_SCALE.size, _SCALE.size))
        self.right: Any = np.zeros(_SCALE.size)
        self.least_tokens = sys.maxsize

    def add(self, step: Step, weight: float, *, served: bool) -> None:
        self.least_tokens = min(self.least_tokens, step.prefill_tokens + step.sequences)
        parts = step.size if step.parallelism is Parallelism.TOKEN else 1
        counts = [step.prefill_tokens / parts, step.sequences / parts]
        few, some = (min(sum(counts), first) for first in (FEW, SOME))
        computed = [1.0, *counts, step.context_tokens, few, some, step.prefill_pairs]
        added = counts if served else [0, 0]
        row = np.array([*computed, *added]) / _SCALE / step.duration_s
        self.gram += weight * np.outer(row, row)
        self.right += weight * row

    def fade(self, keep: float) -> None:
        self.gram *= keep
        self.right *= keep


def _solve(gram: Any, right: Any) -> Any:
    # each feature to its own scale: prompts make long steps, so their rows are small beside rows of
    # decodes
    own = np.diag(gram)
    gram = gram + _RIDGE * np.diag(np.maximum(own, _RIDGE * own.max()))
    root = np.linalg.cholesky(gram)
    return nnls(root.T, np.linalg.solve(root, right))[0]
