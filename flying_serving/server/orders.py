"""The part of the engine client that changes the layout, for the controller and for operators."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Coroutine
from typing import Any

from flying_serving.config import MODES
from flying_serving.controller.switches import Switch
from flying_serving.errors import FlyingError, LayoutError, OrderDropped
from flying_serving.layout.groups import Layout
from flying_serving.server.calls import EngineCalls, heard

logger = logging.getLogger("vllm.flying_serving")

LOOK_S = 1.0
"""How often who waits for a switch looks whether the engines are still there."""


class EngineOrders(EngineCalls):
    """vLLM's client for several engines whose layout changes."""

    def begin_orders(self) -> None:
        """Nothing is ordered yet."""
        self._switching = asyncio.Lock()
        self._switched: dict[int, asyncio.Future[None]] = {}
        self._last_order = 0

    async def switch(self, groups: object, mode: object = "weave", weave_steps: int | None = None) -> Switch:
        """Change the layout and return when every engine works in the new one.

        As long as it waits for requests to end, a later order replaces it. If who waits for this is cancelled then,
        the switch is not made; once engines know of it, it is, and the next order waits for it.

        Args:
            groups: list of lists of engine numbers, a partition into aligned groups.
            mode: one of MODES (see docs/engine.md).
            weave_steps: with "weave": steps of the new layout for each step of an older one.

        Raises:
            LayoutError: naming field, value and what is allowed; nothing has changed then.
            OrderDropped: another order came, or somebody cancelled this one; nothing has changed then.
            EngineLost: naming the engines that did not answer, or because the server ends.
        """
        policy = self.deployment.flying.policy
        if policy != "manual":
            raise LayoutError("policy", policy, "this policy decides the layout; start with --policy manual to do it")
        layout = Layout.parse(groups, self.deployment.engines, self.deployment.group_sizes)
        if mode not in MODES:
            raise LayoutError("mode", mode, f"must be one of {list(MODES)}")
        self._last_order += 1
        order = self._last_order
        self._replace_waiting()
        async with self._switching:
            for before in list(self._switched.values()):  # who ordered it may have left
                await self._until(before)
            self.check_serving()
            switch, commands = self.controller.order(layout, str(mode), weave_steps, time.monotonic())
            done = self._switched[switch.number] = heard(asyncio.get_running_loop().create_future())
            sent = self.carry_out(commands)
            if order != self._last_order:  # later ones have come while it waited for its turn
                self._replace_waiting()
            try:
                await sent
                await self._until(done)
            except asyncio.CancelledError:
                if self.controller.waits_for_idle is switch:
                    self.drop_order(OrderDropped("who ordered it has left"))
                raise
            done.result()
            return switch

    async def _until(self, done: asyncio.Future[None]) -> None:
        """Return once a switch is over, whether it was made or not. Raises if the engines are gone before."""
        while not done.done():
            await asyncio.wait([done], timeout=LOOK_S)
            if not done.done() and self.resources.engine_dead:
                self.check_serving()
                self.ensure_alive()

    def _replace_waiting(self) -> None:
        if self.controller.waits_for_idle is not None:
            self.drop_order(OrderDropped("a later order has replaced this one"))

    def drop_order(self, error: FlyingError) -> Switch | None:
        """Do not make the switch that waits for requests to end, if one does; who ordered it gets the error."""
        switch = self.controller.waits_for_idle
        if switch is None:
            return None
        commands = self.controller.drop(str(error), time.monotonic())
        logger.info("layout %s -> %s is not made: %s", switch.old, switch.new, error)
        self._over(switch, error)
        self.carry_out(commands)
        return switch

    def _over(self, switch: Switch, error: Exception | None = None) -> None:
        """A switch is made, or not for this reason: who ordered it hears of it, and the next order begins."""
        done = self._switched.pop(switch.number, None)
        if done is None:
            return
        if error is None:
            done.set_result(None)
        else:
            done.set_exception(error)

    def order_engines(self, switch: Switch, steps: int) -> None:
        """Tell every engine its group; what they answer goes to the controller."""
        worked_s, switch.wall_time_s = time.thread_time(), time.time()
        answers = [
            self.utility(e, "flying_switch", list(switch.new.group_of(e)), switch.mode, steps, switch.ordered_s)
            for e in range(self.deployment.engines)
        ]
        switch.work_ms = (time.thread_time() - worked_s) * 1e3
        self.background(self._await_switch(switch, answers))

    async def _await_switch(self, switch: Switch, answers: list[Coroutine[Any, Any, Any]]) -> None:
        try:
            reports = await asyncio.gather(*answers)
        except Exception as error:  # noqa: BLE001 - whatever it is, the switch is over and somebody may wait for it
            self.order_failed(switch, error)
            return
        commands = self.controller.acknowledged(list(reports), time.monotonic())
        _log(switch)
        self._over(switch)
        await self.carry_out(commands, switch.awaiting)

    def order_failed(self, switch: Switch, error: Exception) -> None:
        """Engines could not be told, or one of them did not answer."""
        self.controller.failed(str(error), time.monotonic())
        if not self.ending:
            logger.error("layout %s -> %s failed: %s", switch.old, switch.new, error)
        self._over(switch, error)


def _log(switch: Switch) -> None:
    decision = switch.decision
    why = "ordered" if decision is None else f"{decision.reason}; gain {decision.gain:.2f}, cost {decision.cost:.2f}"
    logger.info("layout %s -> %s by %s in %.1f ms (%s)", switch.old, switch.new, switch.mode, switch.cutover_ms, why)
