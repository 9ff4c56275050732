"""Orders to engines to lend their weights or to fetch them back. Their answers go to the
controller.
"""

import asyncio
import math
from collections.abc import Awaitable, Callable, Coroutine
from typing import Any

from flying_serving.controller.commands import Command, LendWeights, WeightCommand
from flying_serving.controller.controller import Controller
from flying_serving.log import logger
from flying_serving.observe.metrics.histogram import Histogram
from flying_serving.observe.metrics.table import DRAIN_BOUNDS_S
from flying_serving.server.calls.engine_calls import EngineCalls


class WeightOrders:
    """Orders to engines about their weights. `carry_out`: `Shell.carry_out`, `clock`: in
    seconds.
    """

    def __init__(
        self,
        calls: EngineCalls,
        controller: Controller,
        carry_out: Callable[[list[Command]], Awaitable[Any]],
        clock: Callable[[], float],
    ) -> None:
        self._calls = calls
        self._controller = controller
        self._carry_out = carry_out
        self._clock = clock
        self.loans = 0
        """The number of times that a group has lent its weights."""
        self.fetch_s = Histogram(DRAIN_BOUNDS_S)
        """Seconds from the order until a group had its weights back."""

    def tell(self, command: WeightCommand) -> None:
        """Tell all engines of a group, and carry out the commands that follow from their
        answers.
        """
        methods = ["flying_fetch_weights"]
        # no step of a narrower lane may be left when the first piece goes
        if isinstance(command, LendWeights):
            methods = ["flying_prepare_to_lend", "flying_lend_weights"]
        self._calls.run_in_background(
            self._carry_through(command, methods, self._call_group(command, methods[0]))
        )

    def _call_group(self, command: WeightCommand, method: str) -> list[Coroutine[Any, Any, int]]:
        """Call all engines of a group. Each answers when it is done; only its end ends the wait
        earlier.
        """
        return [self._calls.utility(engine, method, timeout_s=math.inf) for engine in command.group]

    async def _carry_through(
        self,
        command: WeightCommand,
        methods: list[str],
        answers: list[Coroutine[Any, Any, int]],
    ) -> None:
        began_s, group = self._clock(), list(command.group)
        results = await asyncio.gather(*answers, return_exceptions=True)
        for method in methods[1:]:
            if not any(isinstance(answer, BaseException) for answer in results):
                results = await asyncio.gather(
                    *self._call_group(command, method), return_exceptions=True
                )
        problems = [str(answer) for answer in results if isinstance(answer, BaseException)]
        now_s = self._clock()
        if problems and not self._calls.ending:
            logger.error("weights of group %s: %s", group, "; ".join(problems))
        if isinstance(command, LendWeights):
            if not problems:
                self.loans += 1
                logger.info(
                    "group %s lends its weights: %s blocks in %.2f s",
                    group,
                    results[0],
                    now_s - began_s,
                )
            commands = self._controller.weights_lent(command.group, now_s, complete=not problems)
        elif problems:
            return  # an engine has ended, and so does the server
        else:
            self.fetch_s.observe(now_s - began_s)
            logger.info("group %s has its weights back after %.2f s", group, now_s - began_s)
            commands = self._controller.weights_back(command.group, now_s)
        await self._carry_out(commands)
