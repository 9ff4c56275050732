"""What engines say to each other, beside migrations: steps of a group, and blocks that are lent to it."""

from dataclasses import dataclass
from typing import Any

from flying_serving.layout.groups import Group
from flying_serving.migration.messages import KVPulled, PullKV, ReleaseKV


@dataclass(frozen=True)
class RunStep:
    """Step the lane of `group` together: `plan` is a vLLM SchedulerOutput in group blocks."""

    group: Group
    plan: Any
    grammar: Any
    more: bool
    """The leader will order another step at once."""


@dataclass(frozen=True)
class ReserveBlocks:
    """Offer up to `count` blocks to `group`; answer its leader with a BlocksReserved."""

    group: Group
    count: int
    needed: int
    """Of these, what it takes to go on with what runs, or to run anything: no local request that waits comes first."""


@dataclass(frozen=True)
class LendBlocks:
    """Lend offered blocks to `group` as `blocks`; what was offered beyond goes back."""

    group: Group
    blocks: list[int]


@dataclass(frozen=True)
class ReturnBlocks:
    """`group` no longer uses `blocks`: they are their owners' again."""

    group: Group
    blocks: list[int]


@dataclass(frozen=True)
class BlocksReserved:
    """To a leader: `engine` offers `count` blocks to `group`."""

    group: Group
    engine: int
    count: int


@dataclass(frozen=True)
class RecallBlocks:
    """To a leader: `engine` needs `count` of the blocks it lent to `group`."""

    group: Group
    engine: int
    count: int


Message = (
    RunStep | PullKV | KVPulled | ReleaseKV | ReserveBlocks | LendBlocks | ReturnBlocks | BlocksReserved | RecallBlocks
)
