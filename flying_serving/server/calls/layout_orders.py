"""Changes of the layout, for the controller and for operators: orders to engines, and answers to
operators.
"""

import asyncio
import time
from collections.abc import Awaitable, Callable, Coroutine, Iterable, Sequence
from typing import Any

from flying_serving.config import MODES
from flying_serving.controller.controller import Controller
from flying_serving.controller.switches import Switch
from flying_serving.errors import EngineLost, FlyingError, LayoutError, OrderDropped, ServerEnds
from flying_serving.layout.groups import Layout
from flying_serving.log import logger
from flying_serving.server.calls.engine_calls import EngineCalls, consume_exception, resolve_once
from flying_serving.wire import SwitchAnswer

ALIVE_POLL_S = 1.0
"""How often an order that waits for a switch checks that the engines live."""


class LayoutOrders:
    """Orders of operators, one after another, and the messages to engines of every switch.

    `carry_out`: `Shell.carry_out`. `clock`: the controller's time in seconds.
    """

    def __init__(
        self,
        calls: EngineCalls,
        controller: Controller,
        carry_out: Callable[..., Awaitable[Any]],
        clock: Callable[[], float],
    ) -> None:
        self._calls = calls
        self._controller = controller
        self._carry_out = carry_out
        self._clock = clock
        self._one_order = asyncio.Lock()
        self._under_way: dict[int, asyncio.Future[None]] = {}
        """Done when the switch under way is over, made or not; by the number of the switch."""
        self._last_order = 0

    async def switch(
        self, groups: object, mode: object = "weave", weave_steps: int | None = None
    ) -> Switch:
        """Change the layout and return when every engine works in the new one.

        While the order waits for requests to end, a later order replaces it, and cancelling this
        call drops it. Once engines know of it, the switch is made, and the next order waits for it.

        Raises:
            LayoutError: naming field, value and the allowed values; nothing has changed then.
            OrderDropped: a later order replaced this one, or it was cancelled; nothing has changed
                then.
            EngineLost: naming the engines that did not answer, or because the server ends.
        """
        policy = self._controller.settings.policy
        if not policy.is_operated:
            raise LayoutError(
                "policy",
                policy.name,
                "this policy decides the layout; start with --policy manual to change it",
            )
        self._parse(groups)
        if mode not in MODES:
            raise LayoutError("mode", mode, f"must be one of {list(MODES)}")
        self._last_order += 1
        order = self._last_order
        self._replace_waiting()
        async with self._one_order:
            while self._under_way:  # its client may have left, or it makes a layout again
                await self._until(next(iter(self._under_way.values())))
            if self._calls.ending:
                raise ServerEnds
            layout = self._parse(groups)  # again: engines may have been lost since
            switch, commands = self._controller.begin_switch(
                layout, str(mode), weave_steps, self._clock()
            )
            done = self._under_way[switch.number] = consume_exception(
                asyncio.get_running_loop().create_future()
            )
            sent = self._carry_out(commands)
            if order != self._last_order:  # a later one arrived while this one waited for the lock
                self._replace_waiting()
            try:
                await sent
                await self._until(done)
            except asyncio.CancelledError:
                if self._controller.changeover.untold_switch is switch:
                    self.drop(OrderDropped("the client of the order has left"))
                raise
            done.result()
            return switch

    def _parse(self, groups: object) -> Layout:
        """Return the layout of these groups. Raises LayoutError if the present engines cannot form
        it.
        """
        deployment = self._calls.deployment
        why = "is lost, and is started again"
        absent = dict.fromkeys(self._controller.state.absent_engines, why)
        return Layout.parse(groups, deployment.engines, deployment.group_sizes, absent)

    async def _until(self, done: asyncio.Future[None]) -> None:
        """Return when a switch is over, made or not. Raises ServerEnds or EngineDeadError if
        engines end before.
        """
        while not done.done():
            await asyncio.wait([done], timeout=ALIVE_POLL_S)
            if not done.done() and self._calls.channel.engines_dead:
                if self._calls.ending:
                    raise ServerEnds
                self._calls.channel.ensure_alive()

    def _replace_waiting(self) -> None:
        if self._controller.changeover.untold_switch is not None:
            self.drop(OrderDropped("a later order has replaced this one"))

    def drop(self, error: FlyingError) -> Switch | None:
        """Drop the switch that waits for requests to end, if there is one. Its order is answered
        with the error.
        """
        switch = self._controller.changeover.untold_switch
        if switch is None:
            return None
        commands = self._controller.drop(str(error), self._clock())
        logger.info("layout %s -> %s is not made: %s", switch.old, switch.new, error)
        self._end_waits(switch, error)
        self._carry_out(commands)
        return switch

    def tell_engines(self, switch: Switch, weave_steps: int) -> None:
        """Tell every engine of a layout its group; their answers go to the controller."""
        worked_s, switch.wall_time_s = time.thread_time(), time.time()
        answers = {
            engine: self._calls.utility(
                engine,
                "flying_switch",
                list(switch.new.group_of(engine)),
                switch.mode,
                weave_steps,
                switch.ordered_s,
            )
            for engine in sorted(switch.new.engines)
        }
        switch.work_ms = (time.thread_time() - worked_s) * 1e3
        # orders wait for each other, also orders of the policy
        self._under_way.setdefault(
            switch.number, consume_exception(asyncio.get_running_loop().create_future())
        )
        self._calls.run_in_background(self._await_answers(switch, answers))

    def weave(self, engines: Iterable[int]) -> None:
        """Tell engines to pause older lanes no longer."""
        for engine in sorted(engines):
            self._calls.tell(engine, "flying_weave")

    async def _await_answers(
        self, switch: Switch, answers: dict[int, Coroutine[Any, Any, SwitchAnswer]]
    ) -> None:
        every = {
            engine: consume_exception(asyncio.ensure_future(answer))
            for engine, answer in answers.items()
        }
        if (
            await self._await_all(switch, [every[engine] for engine in switch.changed_engines])
            is None
        ):
            return
        sent = self._carry_out(self._controller.regrouped(self._clock()), switch.paused_engines)
        answered = await self._await_all(switch, list(every.values()))
        if answered is None:
            return
        commands = self._controller.acknowledged(answered, self._clock())
        why = "ordered"
        if switch.decision is not None:
            why = (
                f"{switch.decision.reason}; gain {switch.decision.gain:.2f}, cost "
                f"{switch.decision.cost:.2f}"
            )
        took = f"{switch.cutover_ms:.1f} ms"
        logger.info(
            "layout %s -> %s by %s in %s (%s)", switch.old, switch.new, switch.mode, took, why
        )
        self._end_waits(switch)
        await asyncio.gather(sent, self._carry_out(commands))

    async def _await_all(
        self, switch: Switch, answers: Sequence[asyncio.Future[SwitchAnswer]]
    ) -> list[SwitchAnswer] | None:
        """Return the answers to an order when all of them have come. Returns None if one does not:
        the order has failed then.
        """
        try:
            answered = list(await asyncio.gather(*answers))
        except Exception as error:  # noqa: BLE001 - after any error the switch is over and an order may wait for it
            self.failed(switch, error)
            return None
        return answered if self._controller.changeover.is_current(switch) else None

    def failed(self, switch: Switch, error: Exception) -> None:
        """Note the failure of a switch: engines did not get its order, or one did not answer."""
        self._controller.failed(switch, str(error), self._clock())
        if not self._calls.ending:
            logger.error("layout %s -> %s failed: %s", switch.old, switch.new, error)
        self._end_waits(switch, error)

    def fail_under_way(self, error: EngineLost) -> None:
        """Fail the switch under way, if there is one, after the loss of an engine."""
        for number in list(self._under_way):
            resolve_once(self._under_way.pop(number), error)

    def _end_waits(self, switch: Switch, error: Exception | None = None) -> None:
        done = self._under_way.pop(switch.number, None)
        if done is not None:
            resolve_once(done, error)
