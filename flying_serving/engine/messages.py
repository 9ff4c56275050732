"""Messages between engines: steps of a group, and blocks that its members lend to it.

Messages of migrations are in `migration/messages.py`.
"""

from dataclasses import dataclass
from enum import Enum, auto
from typing import Any

from flying_serving.layout.groups import Group
from flying_serving.migration.messages import KVPulled, PullKV, ReleaseKV
from flying_serving.parallelism import Parallelism


class Overlap(Enum):
    """The overlap of a group's step with the steps before and after it."""

    NONE = auto()
    """It is over before another step of the group is planned."""
    FIRST = auto()
    """All steps before it were over when it was planned. Another may be planned beside it."""
    SECOND = auto()
    """It was planned while a step before it was outstanding."""


@dataclass(frozen=True)
class RunStep:
    """A leader to its `group`: step its lane together.

    `plan`: vLLM's SchedulerOutput, in group blocks. `grammar`: vLLM's GrammarOutput, or None.
    `more`: the leader plans another step at once, so that members hold for it. `parallelism`: what
    the members divide in it.
    """

    group: Group
    plan: Any
    grammar: Any
    more: bool
    overlap: Overlap = Overlap.NONE
    parallelism: Parallelism = Parallelism.TENSOR


@dataclass(frozen=True)
class ReserveBlocks:
    """A leader to its `group`: set up to `count` free blocks aside, and answer BlocksReserved.

    `needed`: of these, the blocks that the group needs to continue its running requests, or to run
    any. They come before the member's waiting requests.
    """

    group: Group
    count: int
    needed: int


@dataclass(frozen=True)
class LendBlocks:
    """A leader to its `group`: lend reserved blocks as the group's `blocks`, free the others."""

    group: Group
    blocks: list[int]


@dataclass(frozen=True)
class ReturnBlocks:
    """A leader to its `group`: it uses `blocks` no more, and the members have them back."""

    group: Group
    blocks: list[int]


@dataclass(frozen=True)
class BlocksReserved:
    """A member to the leader of `group`: `engine` has set `count` blocks aside."""

    group: Group
    engine: int
    count: int


@dataclass(frozen=True)
class ReclaimBlocks:
    """A member to the leader of `group`: `engine` needs `count` of the blocks that it has lent."""

    group: Group
    engine: int
    count: int


@dataclass(frozen=True)
class BeginAnew:
    """A leader to its `group`, whose members have sampled different tokens: draw other random
    numbers from now on. `times`: how often it has sent this since the group was whole.
    """

    group: Group
    times: int


Message = (
    RunStep
    | BeginAnew
    | PullKV
    | KVPulled
    | ReleaseKV
    | ReserveBlocks
    | LendBlocks
    | ReturnBlocks
    | BlocksReserved
    | ReclaimBlocks
)
