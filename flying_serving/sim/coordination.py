"""What groups and lanes add to a step's time: host time, which `benchmarks.coordination` measures live.

Measured on CPUs and taken over for the hosts of modelled devices: no part of it is the model's arithmetic.
docs/simulator.md says how, with medians and spread.
"""

from __future__ import annotations

from collections.abc import Callable

from flying_serving.sim.requests import SimStep

DegreeTime = Callable[[SimStep], float]
"""Contents of a step of one degree -> seconds."""

GROUP_STEP_S = 367e-6
"""A step of a group, from planned by its leader to begun by its last member.

372, 412 and 538 us for 1, 8 and 32 requests, the 10th percentile of the least disturbed of 20 rounds, and a line
through them.
"""
GROUP_REQUEST_S = 5.35e-6
"""The same, more for each request in the step."""
LANE_STEP_S = 250e-6
"""A step of an engine alone, more than without lanes: processor time of a tiny model's, median of 10 rounds."""


def coordinated(time: DegreeTime, size: int) -> DegreeTime:
    """Steps of a lane for groups of `size`, from those of its degree."""

    def seconds(step: SimStep) -> float:
        if size == 1:
            return time(step) + LANE_STEP_S
        return time(step) + GROUP_STEP_S + GROUP_REQUEST_S * (step.sequences + len(step.chunks))

    return seconds
