"""The switches that the authors' release of Flying Serving would make: by `auto`'s predictions, or
by an operator's thresholds.
"""

import math
from dataclasses import dataclass, replace

from flying_serving.policy.policies import Policy
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
        needed = decision.least_gain
        if needed is not None:
            needed += 2 * (cost - decision.cost)
        return replace(decision, mode=mode, cost=cost, least_gain=needed, drain_s=math.inf)


@dataclass(frozen=True)
class Thresholds:
    """When an operator switches, by requests in flight. Requests that wait count.

    `join_at_most`: up to this number all engines join. `part_above`: above it they part.
    """

    join_at_most: int
    part_above: int


@dataclass(frozen=True)
class Operated(Policy):
    """The release with an operator who has two thresholds. Its switches wait for the old requests.

    It serves no needs of single requests: an operator sees the load alone.
    """

    thresholds: Thresholds = Thresholds(0, 0)

    def decide(self, snapshot: Snapshot, objective: Objective) -> Decision | None:
        """Return the switch that a threshold asks for, None without one.

        None while the server is idle: the release cannot switch then.
        """
        running = sum(load.requests for load in snapshot.loads.values())
        in_flight = running + round(snapshot.work.waiting)
        layouts = sorted(snapshot.layouts, key=lambda one: len(one.groups))
        if in_flight <= self.thresholds.join_at_most:
            target = layouts[0]
        elif in_flight > self.thresholds.part_above:
            target = layouts[-1]
        else:
            return None
        if not running or target == snapshot.layout:
            return None
        reason = f"threshold: {in_flight} requests in flight"
        return Decision(target, "sequential", reason, math.inf, 0.0)
