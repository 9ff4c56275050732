"""The oracle: never worse than a layout that is kept, and its copies leave the world alone."""

from experiments import oracle
from experiments.oracle import World
from flying_lab.sim.clock import Clock
from flying_lab.sim.fleet import LEAD_S
from flying_lab.workload.synth import Alternating, synthesise
from flying_serving.layout.groups import Layout

SHAPE = Alternating(requests=40, low_s=8.0, burst_s=4.0, low_rate_rps=1.0, burst_rate_rps=12.0)
REQUESTS = list(synthesise(SHAPE, 1).requests)


def test_oracle_is_at_least_as_good_as_a_kept_layout() -> None:
    kept = [
        oracle._kept(World(Clock(-LEAD_S)), Layout.uniform(4, size), REQUESTS) for size in (1, 2, 4)
    ]
    mean_s, _, _ = oracle.oracle(REQUESTS)
    assert mean_s <= min(kept)


def test_trial_in_a_copy_leaves_the_world_unchanged() -> None:
    """What a copy does is not seen in the world that it was copied from, and the same again costs
    the same.
    """
    world = World(Clock(-LEAD_S))
    wide = Layout.uniform(4, 4)
    first = oracle._cost(world, wide, "weave", REQUESTS)
    assert world.ended == 0
    assert world.total_s == 0.0
    assert world.node.controller.state.layout == Layout.uniform(4, 1)
    assert oracle._cost(world, wide, "weave", REQUESTS) == first
