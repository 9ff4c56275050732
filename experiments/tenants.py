"""Tenants of many nodes, who have quiet times and bursts in turn, at times of their own or all at
once.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

from flying_lab.workload.model import MOONCAKE_BLOCK_TOKENS, Request, blocks_of

_FIRST_SHARED_ID = 2**40
_IDS_PER_PROMPT = 2**10


@dataclass(frozen=True)
class Tenants:
    """What clients send to some nodes.

    Args:
        nodes: whose number sets that of the tenants, so that the load per node is always the same.
        together: share of the tenants whose bursts are at the same time, each between two halves of
            a quiet time that begins and ends the period; each other tenant has them at a time of
            its own.
        seconds: for which requests arrive.
        shared_blocks: blocks of 512 tokens that all prompts of a tenant begin with, if they are
            that long.
        per_node: tenants for each node.
        low_s, burst_s: lengths of quiet times and bursts, in turn.
        low_rps, burst_rps: requests per second per node, if all tenants are quiet or all have a
            burst.
        prompt_tokens, output_tokens: uniform, both ends included.
    """

    nodes: int
    together: float
    seconds: float
    shared_blocks: int = 0
    per_node: int = 4
    low_s: float = 22.5
    burst_s: float = 7.5
    low_rps: float = 3.5
    burst_rps: float = 20.0
    prompt_tokens: tuple[int, int] = (128, 4000)
    output_tokens: tuple[int, int] = (16, 128)

    def requests(self, seed: int, replica: int = 0) -> list[Request]:
        """Of all tenants, in the order of arrival, drawn from a seed as often as asked."""
        count = self.nodes * self.per_node
        rows = sorted(
            row for tenant in range(count) for row in self._of(tenant, [seed, replica, tenant])
        )
        return [
            Request(
                index, arrival_s, prompt, output, hash_ids=self._hash_ids(index, prompt, tenant)
            )
            for index, (arrival_s, prompt, output, tenant) in enumerate(rows)
        ]

    def _of(self, tenant: int, seed: list[int]) -> list[tuple[float, int, int, int]]:
        """(arrival, prompt, output, tenant) of one tenant's requests: Poisson within each phase."""
        rng = np.random.default_rng(seed)
        period_s = self.low_s + self.burst_s
        own_s = rng.uniform(0, period_s)
        begin_s = (
            -self.low_s / 2 if tenant < round(self.together * self.nodes * self.per_node) else own_s
        )
        count = rng.poisson(self.burst_rps / self.per_node * self.seconds)
        arrivals: Any = rng.uniform(0, self.seconds, count)
        chances: Any = rng.uniform(0, 1, count)
        prompts = rng.integers(*self.prompt_tokens, size=count, endpoint=True)
        outputs = rng.integers(*self.output_tokens, size=count, endpoint=True)
        in_burst = (arrivals - begin_s) % period_s >= self.low_s
        kept = in_burst | (chances < self.low_rps / self.burst_rps)
        columns = (arrivals[kept].tolist(), prompts[kept].tolist(), outputs[kept].tolist())
        return [(*row, tenant) for row in zip(*columns, strict=True)]

    def _hash_ids(self, index: int, prompt_tokens: int, tenant: int) -> tuple[int, ...]:
        if not self.shared_blocks:
            return ()
        blocks = blocks_of(prompt_tokens, MOONCAKE_BLOCK_TOKENS)
        shared = [
            _FIRST_SHARED_ID + tenant * self.shared_blocks + n for n in range(self.shared_blocks)
        ]
        own = [index * _IDS_PER_PROMPT + n for n in range(blocks)]
        return (*shared[:blocks], *own[self.shared_blocks :])
