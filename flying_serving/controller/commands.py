"""What the controller tells its shell to do: the API server's, or the simulator."""

from dataclasses import dataclass

from flying_serving.controller.switches import Switch
from flying_serving.layout.groups import Group


@dataclass(frozen=True)
class Dispatch:
    """Send a request to the leader of a group.

    `output_tokens`: how many it has got already, in another group. `limit_tokens`: output tokens that it may have there
    (what the group holds); then it is `Controller.group_full`. `migrated_from`: the group that has its KV, from which
    it migrates; if None, its prompt and outputs are prefilled.
    """

    request_id: str
    group: Group
    output_tokens: int
    limit_tokens: int
    migrated_from: Group | None = None


@dataclass(frozen=True)
class Recall:
    """Take a request from the leader of a group; a Dispatch of it follows."""

    request_id: str
    group: Group


@dataclass(frozen=True)
class Reject:
    """End a request that has waited for too long."""

    request_id: str
    waited_s: float


@dataclass(frozen=True)
class Order:
    """Tell every engine its group in `switch.new`; the answers go to `Controller.acknowledged`."""

    switch: Switch
    weave_steps: int


Command = Dispatch | Recall | Reject | Order
