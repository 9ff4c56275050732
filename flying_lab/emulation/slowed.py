"""The simulator's view of emulated devices: its machine, with steps that last as many times as
long.
"""

from __future__ import annotations

from dataclasses import dataclass

from flying_lab.emulation.profile import Profile
from flying_lab.sim.cost import Execution
from flying_lab.sim.machine import DegreeTime, Modelled
from flying_lab.sim.requests import SimStep
from flying_serving.predict.migrations import MigrationCost


@dataclass(frozen=True)
class Slowed(Modelled):
    """A modelled machine whose devices take `slowdown` times as long; engines' host work does not.

    `steps`: execution of all steps.
    """

    slowdown: float = 1.0
    steps: Execution = "graph"

    @classmethod
    def of(cls, profile: Profile) -> Slowed:
        """Return the machine that a profile emulates."""
        machine = profile.machine
        return cls(machine.model, machine.kind, slowdown=profile.slowdown, steps=profile.execution)

    def step_time(self, degree: int, execution: Execution = "graph", size: int = 0) -> DegreeTime:
        """Return the step times of a degree, with the coordination of a group of `size`."""
        alone = super().step_time(degree, self.steps)
        with_host = super().step_time(degree, self.steps, size)

        def seconds(step: SimStep) -> float:
            device_s = alone(step)
            return self.slowdown * device_s + with_host(step) - device_s

        return seconds

    def migration(self, degree: int) -> MigrationCost | None:
        """Return the cost of KV migration on the slowed devices."""
        cost = super().migration(degree)
        if cost is None:
            return None
        return MigrationCost(cost.fixed_s * self.slowdown, cost.token_s * self.slowdown)
