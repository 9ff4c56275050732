"""Settings with which a controller is started."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

from flying_serving.controller.requests import RequestSpec
from flying_serving.errors import RequestError
from flying_serving.layout.shards import lane_block_tokens
from flying_serving.policy.policies import Policy
from flying_serving.predict.work import Objective


def beside_steps(kv_tokens: int, step_tokens: int, max_model_len: int) -> int:
    """Return the tokens that a request may have in a group of `kv_tokens`, so that its next step of
    `step_tokens` fits. No step goes beyond the model's length.
    """
    return kv_tokens if kv_tokens >= max_model_len else kv_tokens - step_tokens + 1


@dataclass(frozen=True)
class Capacity:
    """The tokens of KV that groups hold.

    Args:
        kv_tokens: that a group holds, by its size.
        devices: of an engine, for TP degrees.
        block_tokens: in one block of a group, by its size.
        lent_tokens: that a widest group holds with extra room, while it lends its weights to its KV
            cache; 0 if none does.
        spare: sizes that there are only while an engine is lost; no client may ask for them.
        request_blocks: that each request takes whatever its length, beside its KV; those of one
            request are left out of `kv_tokens`.
        step_tokens: most tokens of a step of a request that decodes; all but one are left out of
            `kv_tokens`, unless a group holds the longest request anyway.
    """

    kv_tokens: Mapping[int, int]
    devices: int
    block_tokens: Mapping[int, int] = field(default_factory=dict)
    lent_tokens: int = 0
    spare: frozenset[int] = frozenset()
    request_blocks: int = 0
    step_tokens: int = 1

    def with_steps(self, step_tokens: int, max_model_len: int) -> Capacity:
        """Return the capacity where a step of a request that decodes may have `step_tokens`.

        No step goes beyond the model's length, so a group that holds it needs no more room.
        """
        kv_tokens = self.kv_tokens.items()
        beside = {size: beside_steps(held, step_tokens, max_model_len) for size, held in kv_tokens}
        return replace(self, kv_tokens=beside, step_tokens=step_tokens)

    @classmethod
    def of(
        cls,
        sizes: Sequence[int],
        blocks: int,
        block_tokens: int,
        devices: int,
        kv_heads: int,
        *,
        extra: int = 0,
    ) -> Capacity:
        """Compute the capacity from the blocks of the engine that has fewest, and `extra` blocks in
        the room of lent weights.

        One block of each engine is vLLM's null block.
        """
        usable = blocks - 1
        of_block = {s: lane_block_tokens(block_tokens, s, devices, kv_heads) for s in sizes}
        lent_tokens = (usable + extra) * of_block[max(sizes)] if extra else 0
        return cls(
            {s: usable * tokens for s, tokens in of_block.items()}, devices, of_block, lent_tokens
        )

    @property
    def most_tokens(self) -> dict[int, int]:
        """Most tokens that a group of each size ever holds."""
        widest = max(self.kv_tokens)
        return {**self.kv_tokens, widest: max(self.kv_tokens[widest], self.lent_tokens)}

    def request_tokens(self, size: int) -> int:
        """Return the KV that each request takes whatever its length, in tokens of a group of a
        size.
        """
        return self.request_blocks * self.block_tokens.get(size, 0)

    def in_blocks(self, size: int, tokens: float) -> float:
        """Return the tokens of KV that a request of some tokens takes in a group of a size.

        Where requests take `request_blocks`, blocks are large, and the last one counts as a whole.
        """
        if not self.request_blocks:
            return tokens
        block_tokens = self.block_tokens[size]
        return float(math.ceil(tokens / block_tokens) * block_tokens)

    def fitting_sizes(self, needed_tokens: int) -> list[int]:
        """Return the group sizes that can ever hold a number of tokens, narrow first."""
        most = self.most_tokens
        return [size for size in sorted(most) if most[size] >= needed_tokens]

    def sizes(self, spec: RequestSpec) -> tuple[int, ...]:
        """Return the group sizes that a request may have. Raises RequestError as `check`."""
        self.check(spec.longest_tokens, spec.degree)
        return self.check(spec.needed_tokens, spec.degree)

    def check(self, tokens: int, degree: int | None) -> tuple[int, ...]:
        """Return the group sizes that hold `tokens` of prompt and output, for a request that may
        ask for a degree.

        Raises:
            RequestError: if no layout of this server can ever run it; the message says what would
                do.
        """
        sizes = tuple(self.fitting_sizes(tokens))
        if degree is not None:
            return self._check_degree(tokens, degree, sizes)
        if not sizes:
            widest = max(self.kv_tokens)
            raise RequestError(
                f"prompt plus max_tokens are {tokens} tokens; the widest group "
                f"(degree {self.degree(widest)}) holds {self.most_tokens[widest]}"
            )
        return sizes

    def _check_degree(self, tokens: int, degree: int, sizes: tuple[int, ...]) -> tuple[int, ...]:
        """Return the size of a degree. Raises RequestError unless it is among `sizes`."""
        if degree not in self.degrees:
            raise RequestError(f"tp_degree={degree}: must be one of {self.degrees}")
        size = degree // self.devices
        if size not in sizes:
            hint = (
                f"degree {self.degree(sizes[0])} would do"
                if sizes
                else "no degree of this server holds them"
            )
            raise RequestError(
                f"tp_degree={degree}: its KV cache holds {self.most_tokens[size]} tokens, "
                f"prompt plus max_tokens are {tokens}; {hint}"
            )
        return (size,)

    def degree(self, size: int) -> int:
        """Return the TP degree of a group of `size` engines."""
        return size * self.devices

    @property
    def degrees(self) -> list[int]:
        """Every degree that a client may ask for."""
        return [self.degree(size) for size in sorted(self.kv_tokens) if size not in self.spare]


@dataclass(frozen=True)
class Limits:
    """The limits of a group's scheduler.

    Args:
        max_num_seqs: vLLM's: requests that a group runs at a time.
        max_num_batched_tokens: vLLM's: tokens of a step, at least one for each request.
        capped: nothing is dispatched ahead of the engines' progress. A server whose layout never
            changes gains nothing by holding back, unless its queue is bounded in time.
        max_variants: variants of the model that a group has in a step; 0 if there are none.
    """

    max_num_seqs: int
    max_num_batched_tokens: int
    capped: bool = True
    max_variants: int = 0


@dataclass(frozen=True)
class Settings:
    """Settings of one server's controller.

    Args:
        engines: their number.
        capacity: the tokens of KV that groups hold.
        policy: decides the layout.
        limits: of the schedulers.
        objective: of the policy.
        weave_steps: steps of a new layout for each step of an older one.
        most_waiting: requests that may wait; more are refused, see `Admission`.
        most_waiting_tokens: the same for the tokens of their prompts.
        most_wait_s: the same for the seconds that a request has to wait.
        aging_s: after this wait a request is overdue: see `TaskPool`.
        dry_run: decide and record, but change nothing.
        tbt_slo_s: target for the time between two tokens, infinite without one.
    """

    engines: int
    capacity: Capacity
    policy: Policy
    limits: Limits
    objective: Objective
    weave_steps: int = 1
    most_waiting: int = 10_000
    most_waiting_tokens: int = 4_000_000
    most_wait_s: float = math.inf
    aging_s: float = 30.0
    dry_run: bool = False
    tbt_slo_s: float = math.inf

    @property
    def forms_groups(self) -> bool:
        """True if a request that no group of the present layout holds gets one."""
        return self.policy.by_context and not self.dry_run

    @property
    def loses_groups(self) -> bool:
        """True if a group may be split while a request waits that only it could hold, and no other
        will be formed.
        """
        return (
            (self.policy.by_load or self.policy.by_priority)
            and not self.policy.by_context
            and not self.dry_run
        )
