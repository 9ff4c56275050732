"""Orders to engines about their weights in the simulator: the shell's part, as
`server/calls/weight_orders.py`.
"""

from collections.abc import Callable
from functools import partial

from flying_lab.sim.cluster import Cluster
from flying_lab.sim.engines import SimEngine
from flying_lab.sim.loans import SimWeights
from flying_serving.controller.commands import Command, FetchWeights, LendWeights
from flying_serving.controller.controller import Controller
from flying_serving.layout.groups import Group

NARROWER_LANES_POLL_S = 0.005
"""Seconds between two looks whether a step of a narrower lane, whose request was aborted, is over;
as live.
"""


class WeightOrders:
    """Tells all engines of a group to lend their weights or to fetch them back.

    The controller hears when all have done it, and `carry_out` gets its commands.
    """

    def __init__(
        self, cluster: Cluster, controller: Controller, carry_out: Callable[[list[Command]], None]
    ) -> None:
        self._cluster = cluster
        self._controller = controller
        self._carry_out = carry_out
        self._message_s = cluster.shape.options.message_s
        loan = cluster.shape.loan
        if loan is None:
            return
        for number, engine in enumerate(cluster.engines):
            lanes = [lane for group, lane in cluster.lanes.items() if number in group]
            kick = partial(cluster.kick, engine)
            engine.weights = SimWeights(
                loan, cluster.pools[number], lanes, cluster.clock.after, kick
            )

    def tell(self, command: LendWeights | FetchWeights) -> None:
        """Tell the engines of a group to lend or fetch their weights.

        They lend all pieces once no request of their narrower lanes is left. They fetch all pieces
        back as fast as their room is free.
        """
        group, clock = command.group, self._cluster.clock
        if isinstance(command, LendWeights):
            done = partial(self._over, self._controller.weights_lent, group)
            clock.after(self._message_s, self._prepare, group, done)
        else:
            done = partial(self._over, self._controller.weights_back, group)
            clock.after(self._message_s, self._begin, self._members(group), False, done)

    def _over(self, hear: Callable[[Group, float], list[Command]], group: Group) -> None:
        """Report to the controller that all engines of a group have lent their weights, or have
        them back.
        """
        self._carry_out(hear(group, self._cluster.clock.now_s))

    def _prepare(self, group: Group, done: Callable[[], None]) -> None:
        clock, members = self._cluster.clock, self._members(group)
        narrower = [
            lane for engine in members for size, lane in engine.lanes.items() if size < len(group)
        ]
        if any(lane.requests or lane.step is not None for lane in narrower):
            clock.after(NARROWER_LANES_POLL_S, self._prepare, group, done)
        else:
            clock.after(2 * self._message_s, self._begin, members, True, done)

    def _begin(self, members: list[SimEngine], lends: bool, done: Callable[[], None]) -> None:
        left = set(range(len(members)))

        def over(number: int) -> None:
            left.discard(number)
            if not left:
                self._cluster.clock.after(self._message_s, done)

        for number, engine in enumerate(members):
            assert engine.weights is not None
            engine.weights.begin(lends=lends, done=partial(over, number))

    def _members(self, group: Group) -> list[SimEngine]:
        return [self._cluster.engines[engine] for engine in group]
