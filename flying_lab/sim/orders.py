"""Orders of layouts in the simulator: the shell's part, as `server/calls/layout_orders.py`."""

from collections.abc import Callable
from functools import partial

from flying_lab.sim.cluster import Cluster
from flying_lab.sim.engines import SimOrder
from flying_serving.controller.commands import Command
from flying_serving.controller.controller import Controller
from flying_serving.controller.switches import Switch
from flying_serving.wire import SwitchAnswer


class LayoutOrders:
    """Tells all engines of a switch, and the controller when they have answered; `carry_out` does
    the commands that follow.
    """

    def __init__(
        self, cluster: Cluster, controller: Controller, carry_out: Callable[[list[Command]], None]
    ) -> None:
        self._cluster = cluster
        self._clock = cluster.clock
        self._controller = controller
        self._carry_out = carry_out
        self._message_s = cluster.shape.options.message_s

    def send(self, switch: Switch, weave_steps: int) -> None:
        """Tell every engine of a switch."""
        switch.wall_time_s = self._clock.now_s
        answers: dict[int, SwitchAnswer] = {}
        if not switch.changed_engines:
            self._clock.after(self._message_s, self._regroup)
        for engine in range(self._cluster.shape.engines):
            done = partial(self._answered, switch, answers, engine, self._clock.now_s)
            order = SimOrder(len(switch.new.group_of(engine)), switch.mode, weave_steps, done)
            self._clock.after(self._message_s, self._cluster.order, engine, order)

    def _answered(
        self,
        switch: Switch,
        answers: dict[int, SwitchAnswer],
        engine: int,
        begun_s: float,
        now_s: float,
    ) -> None:
        """Note the answer of an engine that has carried out an order sent at `begun_s`; `answers`:
        all to this order.
        """
        answers[engine] = SwitchAnswer((now_s - begun_s) * 1e3, 0.0, 0.0)
        if engine in switch.changed_engines and answers.keys() >= set(switch.changed_engines):
            self._clock.after(self._message_s, self._regroup)
        if len(answers) == self._cluster.shape.engines:
            self._clock.after(self._message_s, self._acknowledge, list(answers.values()))

    def _regroup(self) -> None:
        """Report that the engines whose groups change have answered an order."""
        self._carry_out(self._controller.regrouped(self._clock.now_s))
        self._clock.after(self._message_s, self._cluster.announce_migrations)

    def _acknowledge(self, answers: list[SwitchAnswer]) -> None:
        """Report that all engines have answered an order."""
        self._carry_out(self._controller.acknowledged(answers, self._clock.now_s))
