"""The cost of migrating the KV of requests from one group to another, from engines'
measurements.
"""

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from scipy.optimize import nnls


@dataclass(frozen=True)
class MigrationCost:
    """Seconds that a group takes to pull the KV of a request from another group.

    `fixed_s`: of every migration; `token_s`: for each token whose KV migrates.
    """

    fixed_s: float
    token_s: float

    def seconds(self, tokens: float) -> float:
        """Return the seconds of one migration of `tokens` tokens."""
        return self.fixed_s + self.token_s * tokens


def cost_within(costs: Mapping[int, MigrationCost], size: int) -> MigrationCost | None:
    """Return the cost between two groups within `size` engines: of the fewest engines that hold as
    many and were measured.

    If no such number was measured, the cost of most engines; None if nothing was measured.
    """
    known = min((one for one in costs if one >= size), default=max(costs, default=None))
    return None if known is None else costs[known]


def fit_migrations(rows: Iterable[Sequence[float]]) -> dict[int, MigrationCost]:
    """Fit costs by size of the group that pulls; a size that no engine has measured is missing.

    `rows`: `[engines in that group, seconds, tokens]`; of each size several token counts, by any of
    its engines.
    """
    by_size: defaultdict[int, list[tuple[float, float]]] = defaultdict(list)
    for size, seconds, tokens in rows:
        by_size[int(size)].append((seconds, tokens))
    return {size: _fit(measured) for size, measured in sorted(by_size.items())}


def _fit(measured: Sequence[tuple[float, float]]) -> MigrationCost:
    """Fit by non-negative least squares of relative errors, so that a short migration counts as
    much as a long one.
    """
    seconds, tokens = np.array(measured).T
    scale = max(1.0, tokens.max())
    table = np.column_stack([1.0 / seconds, tokens / scale / seconds])
    (fixed_s, all_s), _ = nnls(table, np.ones(len(measured)))
    return MigrationCost(float(fixed_s), float(all_s / scale))
