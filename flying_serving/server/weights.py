"""Engines are told to lend their weights or to have them back, and their answers go to the controller."""

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from typing import Any

from flying_serving.controller.commands import Command, FetchWeights, LendWeights
from flying_serving.controller.controller import Controller
from flying_serving.log import logger
from flying_serving.observe.metrics.histogram import Histogram
from flying_serving.observe.metrics.table import DRAIN_BOUNDS_S
from flying_serving.server.calls import EngineCalls

ANSWER_S = 3600.0
"""How long engines have: pieces of weights go and come between two steps, and few of them while requests run."""


class WeightOrders:
    """What the API server tells engines of their weights. `carry_out`: `Shell.carry_out`, `clock`: in seconds."""

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
        """How often a group has lent its weights."""
        self.fetch_s = Histogram(DRAIN_BOUNDS_S)
        """Seconds until it had them back."""

    def tell(self, command: LendWeights | FetchWeights) -> None:
        """Tell all engines of a group; what follows from their answers is carried out."""
        lends = isinstance(command, LendWeights)
        method = "flying_lend_weights" if lends else "flying_fetch_weights"
        answers = [self._calls.utility(engine, method, timeout_s=ANSWER_S) for engine in command.group]
        self._calls.background(self._await(command, answers))

    async def _await(self, command: LendWeights | FetchWeights, answers: Sequence[Awaitable[int]]) -> None:
        began_s, group = self._clock(), command.group
        found = await asyncio.gather(*answers, return_exceptions=True)
        problems = [str(answer) for answer in found if isinstance(answer, BaseException)]
        now_s = self._clock()
        if problems and not self._calls.ending:
            logger.error("weights of group %s: %s", list(group), "; ".join(problems))
        if isinstance(command, LendWeights):
            self.loans += 1
            logger.info("group %s lends its weights: %s blocks in %.2f s", list(group), found[0], now_s - began_s)
            commands = self._controller.weights_lent(group, now_s, complete=not problems)
        elif problems:
            return  # narrower groups of these engines stay closed
        else:
            self.fetch_s.observe(now_s - began_s)
            logger.info("group %s has its weights back after %.2f s", list(group), now_s - began_s)
            commands = self._controller.weights_back(group, now_s)
        await self._carry_out(commands)
