"""The simulator's view of emulated devices: its machine, with steps that last as many times as
long.
"""

from __future__ import annotations

from dataclasses import dataclass

from flying_lab.emulation.profile import Profile
from flying_lab.sim.cost import Execution
from flying_lab.sim.machine import DegreeTime, Modelled
from flying_serving.predict.migrations import MigrationCost


@dataclass(frozen=True)
class Slowed(Modelled):
    """A modelled machine whose devices take `slowdown` times as long; the host's work does not.

    `steps`: execution of all steps.
    """

    slowdown: float = 1.0
    steps: Execution = "graph"

    @classmethod
    def of(cls, profile: Profile) -> Slowed:
        """Return the machine that a profile emulates."""
        machine = profile.machine
        return cls(machine.model, machine.kind, slowdown=profile.slowdown, steps=profile.execution)

    def device_time(self, degree: int, execution: Execution, size: int) -> DegreeTime:
        """Return the times of a degree on the slowed devices."""
        seconds = super().device_time(degree, self.steps, size)
        return lambda step: self.slowdown * seconds(step)

    def migration(self, degree: int) -> MigrationCost | None:
        """Return the cost of KV migration on the slowed devices."""
        cost = super().migration(degree)
        if cost is None:
            return None
        return MigrationCost(cost.fixed_s * self.slowdown, cost.token_s * self.slowdown)
