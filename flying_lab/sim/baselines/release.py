"""The switches that the authors' release of Flying Serving would make, given its modes and `auto`'s
predictions.
"""

import math
from dataclasses import dataclass, replace

from flying_serving.policy.policies import Policy, least_gain
from flying_serving.policy.snapshot import Decision, Snapshot
from flying_serving.predict.work import Objective


@dataclass(frozen=True)
class Draining(Policy):
    """Decides when to switch by `auto`'s predictions, but can neither weave nor keep KV, and weighs
    the cost of that.
    """

    def decide(self, snapshot: Snapshot, objective: Objective) -> Decision | None:
        """Decide as its base does. Urgent requests get a hard switch; other switches wait for the
        old requests, for any time.

        A switch for load needs the gain that `auto` asks for at the cost of waiting.
        """
        decision = super().decide(snapshot, objective)
        if decision is None or not decision.is_made:
            return decision
        mode = "hard" if any(need.urgent for need in snapshot.needs) else "sequential"
        # Waiting is impossible if no request runs there (the release cannot switch while idle) or
        # one fits no group.
        cost = decision.considered.get(mode, decision.cost if decision.stay is None else math.inf)
        needed = None if decision.stay is None else least_gain(decision.stay, cost, snapshot)
        return replace(decision, mode=mode, cost=cost, least_gain=needed, drain_s=math.inf)
