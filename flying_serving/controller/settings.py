"""What a controller is started with."""

from dataclasses import dataclass

from flying_serving.controller.capacity import Capacity
from flying_serving.controller.placing import Limits
from flying_serving.policy.policies import Policy
from flying_serving.predict.work import Objective


@dataclass(frozen=True)
class Settings:
    """Settings of one server's controller.

    Args:
        engines: how many.
        capacity: what each group size holds, in tokens.
        policy: decides on the layout.
        limits: how much is dispatched ahead.
        objective: what layouts are compared by.
        weave_steps: steps of a new layout for each step of an older one.
        most_waiting: requests that may wait; more are refused.
        aging_s: after this wait a request is overdue: see `TaskPool`.
        dry_run: decide and record, but change nothing.
    """

    engines: int
    capacity: Capacity
    policy: Policy
    limits: Limits
    objective: Objective
    weave_steps: int = 1
    most_waiting: int = 10_000
    aging_s: float = 30.0
    dry_run: bool = False

    @property
    def forms_groups(self) -> bool:
        """Whether a request that no group of the present layout holds gets one."""
        return self.policy.by_context and not self.dry_run

    @property
    def loses_groups(self) -> bool:
        """Whether a group may be split while a request waits that only it could hold, and no other will be formed."""
        return (self.policy.by_load or self.policy.by_priority) and not self.policy.by_context and not self.dry_run
