"""The commands of the controller to its shell: the API server's, or the simulator."""

from dataclasses import dataclass

from flying_serving.controller.switches import Switch
from flying_serving.layout.groups import Group, KVSource


@dataclass(frozen=True)
class Dispatch:
    """Send a request to the leader of a group.

    `output_tokens`: how many it has got already, in another group. `limit_tokens`: output tokens
    that it may have there (the group holds no more); then `Controller.group_full` is called.
    `migrated_from`: its KV, which the group pulls; if None, its prompt and outputs are prefilled.
    `offer`: the number under which the group offers its KV when it ends there; with `publishes`
    from its first step on.
    """

    request_id: str
    group: Group
    output_tokens: int
    limit_tokens: int
    migrated_from: KVSource | None = None
    offer: int | None = None
    publishes: bool = False


@dataclass(frozen=True)
class DispatchPrefix:
    """Send the first `prefix_tokens` of a prompt to the leader of a group, which offers their KV
    under the number `offer`.

    The KV can be pulled from the first step on. Its output is dropped; its end goes to
    `Controller.prefix_ended`.
    """

    request_id: str
    group: Group
    prefix_tokens: int
    offer: int


@dataclass(frozen=True)
class PullAhead:
    """Let a group pull KV of a request that another group runs, up to this number of tokens of
    prompt and output.

    A Dispatch with the same KV, or a DropPart, follows.
    """

    request_id: str
    group: Group
    kv: KVSource
    up_to_tokens: int


@dataclass(frozen=True)
class DropPart:
    """End the part that a DispatchPrefix or a PullAhead with the number `offer` has begun in a
    group.

    `keeps`: the request itself goes on, and may still pull the KV of its prefix.
    """

    request_id: str
    group: Group
    offer: int
    keeps: bool


@dataclass(frozen=True)
class Recall:
    """Take a request from the leader of a group. It waits in the task pool, or a Dispatch follows.

    `offer`: the number under which the group offers its KV from then on; if None, no group will
    pull it.
    """

    request_id: str
    group: Group
    offer: int | None = None


@dataclass(frozen=True)
class RevokeOffer:
    """Tell the leader of a group that a request ends there: no group will pull the KV on offer."""

    request_id: str
    group: Group


@dataclass(frozen=True)
class Reject:
    """End a request that has waited for too long. `group`: has it in its queue; None: it is in the
    task pool.
    """

    request_id: str
    waited_s: float
    group: Group | None = None


@dataclass(frozen=True)
class Fail:
    """End a request with an error."""

    request_id: str
    why: str


@dataclass(frozen=True)
class Order:
    """Tell every engine its group in `switch.new`; the answers go to `Controller.acknowledged`."""

    switch: Switch
    weave_steps: int


@dataclass(frozen=True)
class Weave:
    """Tell every engine of the layout to pause no older lane: a switch waits until their requests
    have ended.
    """

    engines: frozenset[int]


@dataclass(frozen=True)
class LendWeights:
    """Tell the engines of a widest group to lend their weights; the answers go to
    `Controller.weights_lent`.
    """

    group: Group


@dataclass(frozen=True)
class FetchWeights:
    """Tell the engines of a widest group to take their weights back; the answers go to
    `Controller.weights_back`.
    """

    group: Group


PartCommand = DispatchPrefix | PullAhead
"""Begins a part of a split request. Where that fails, the request goes on as an ordinary one."""
RequestCommand = Dispatch | PartCommand | Recall | RevokeOffer | Reject | Fail
"""Is void once its request has failed."""
WeightCommand = LendWeights | FetchWeights
"""Is of the engines of a widest group, and of no request."""
Command = RequestCommand | DropPart | Order | Weave | WeightCommand
