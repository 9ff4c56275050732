"""The plan for this machine and this environment."""

import os
from collections.abc import Mapping

from flying_serving.placement.plan import Placement, plan
from flying_serving.placement.topology import read_topology
from flying_serving.placement.wishes import read_wishes


def placements_here(
    engines: int, devices: int, variables: Mapping[str, str] = os.environ
) -> tuple[Placement, ...]:
    """Return the placement of each device of each engine, engine 0's first; `devices`: of each
    engine.

    Raises:
        ConfigError: naming the variable, its value and what is allowed, if it cannot be satisfied
            on this machine.
    """
    return plan(read_topology(), read_wishes(variables), engines, devices)
