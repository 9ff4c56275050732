"""The engine client inside the API server: the shell that tells the controller what happens and does what it says."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections import deque
from collections.abc import Awaitable, Coroutine, Iterable
from typing import Any

from vllm.utils.async_utils import in_loop
from vllm.v1.engine import EngineCoreRequestType
from vllm.v1.engine.exceptions import EngineDeadError

from flying_serving.config import PREEMPTS, deployment_of
from flying_serving.controller.commands import Command, Dispatch, Order, Refuse, Withdraw
from flying_serving.controller.controller import Controller
from flying_serving.controller.moving import exchanges
from flying_serving.controller.switches import Switch
from flying_serving.errors import FlyingError, LayoutError
from flying_serving.layout.groups import Layout
from flying_serving.server.clock import keep_time
from flying_serving.server.metrics import ServerMetrics
from flying_serving.server.requests import EngineRequests
from flying_serving.server.settings import describe, settings_of
from flying_serving.server.streams import Streams
from flying_serving.tracing.writer import CLOSE_S

logger = logging.getLogger("vllm.flying_serving")

STREAMS_END_S = 0.1


class FlyingClient(EngineRequests):
    """vLLM's client for several engines, with groups of them as the places where requests run."""

    def __init__(self, vllm_config: Any, executor_class: Any, log_stats: bool, renderer: Any = None) -> None:
        self.deployment = deployment_of(vllm_config.additional_config)
        self._blocks: list[int] = []
        self.tasks = set()
        super().__init__(vllm_config, executor_class, log_stats, renderer=renderer)
        settings = settings_of(vllm_config, self.deployment, min(self._blocks))
        self.controller = Controller(settings)
        self.streams = Streams(settings.capacity, vllm_config.model_config.max_model_len)
        self.metrics = ServerMetrics(self) if log_stats else None
        self._switching = asyncio.Lock()
        self._switched: dict[int, asyncio.Future[None]] = {}
        self._deadlines = {}
        self._clock_runs = False
        self._ensure_clock()

    def _apply_ready_response(self, payload: bytes) -> None:
        before = self.vllm_config.cache_config.num_gpu_blocks or 0
        super()._apply_ready_response(payload)
        self._blocks.append((self.vllm_config.cache_config.num_gpu_blocks or 0) - before)
        logger.info("%d of %d engines are ready", len(self._blocks), self.deployment.engines)

    # ---- what the controller says

    def carry_out(self, commands: list[Command], awaiting: Iterable[int] = ()) -> Awaitable[Any]:
        """Do what the controller says, in order. Returns what to wait for until engines have been sent all of it.

        At once, because the controller speaks of how things are now: if an output or another decision came in between,
        a request could be withdrawn from where it is no more.
        """
        for engine, counts in exchanges(commands, self.deployment.group_sizes, awaiting).items():
            self.tell(engine, "flying_moving", *counts)
        sent, left = [], deque(commands)
        while left:
            command = left.popleft()
            try:
                sent.append(self._do(command))
            except EngineDeadError:
                raise
            except Exception as error:
                if not isinstance(command, Dispatch):
                    raise
                left += self._fail(command.request_id, error)
        # shielded: one client's going away must not take back what is sent for others
        return asyncio.shield(asyncio.gather(*(s for s in sent if s is not None)))

    def _do(self, command: Command) -> Awaitable[Any] | None:
        match command:
            case Dispatch(request_id, group):
                request = self.streams.to_engine(command)
                self._admit(request_id)
                return None if request is None else self._to_leader(EngineCoreRequestType.ADD, request, group)
            case Withdraw(request_id, group):
                engine_id = self.streams.withdraw(request_id)
                if not self.controller.moves:
                    return self._to_leader(EngineCoreRequestType.ABORT, [engine_id], group)
                self.tell(group[0], "flying_park", [engine_id])  # its KV is kept for a while
            case Refuse(request_id, waited_s):
                self._refuse(request_id, waited_s)
            case Order(switch, weave_steps):
                self._order(switch, weave_steps)
        return None

    def _order(self, switch: Switch, steps: int) -> None:
        worked_s, switch.wall_time_s = time.thread_time(), time.time()
        answers = [
            self.utility(e, "flying_switch", list(switch.new.group_of(e)), switch.preempt, steps, switch.ordered_s)
            for e in range(self.deployment.engines)
        ]
        switch.work_ms = (time.thread_time() - worked_s) * 1e3
        self.background(self._await_switch(switch, answers))

    async def _await_switch(self, switch: Switch, answers: list[Coroutine[Any, Any, Any]]) -> None:
        done = self._switched.pop(switch.number, None)
        try:
            reports = await asyncio.gather(*answers)
        except Exception as error:  # noqa: BLE001 - whatever it is, the switch is over and somebody may wait for it
            self.controller.failed(str(error), time.monotonic())
            logger.error("layout %s -> %s failed: %s", switch.old, switch.new, error)
            if done is not None and not done.done():
                done.set_exception(error)
            return
        commands = self.controller.acknowledged(list(reports), time.monotonic())
        _log(switch)
        if done is not None and not done.done():
            done.set_result(None)
        await self.carry_out(commands, switch.awaiting)

    def _ensure_clock(self) -> None:
        if not self._clock_runs:
            with contextlib.suppress(RuntimeError):  # no loop runs yet: the first request starts it
                asyncio.get_running_loop()
                self._clock_runs = True
                self.background(keep_time(self))

    # ---- switches by an operator

    async def switch(self, groups: object, preempt: object = "weave", weave_steps: int | None = None) -> Switch:
        """Change the layout and return when every engine works in the new one.

        Args:
            groups: list of lists of engine numbers, a partition into aligned groups.
            preempt: one of PREEMPTS (see docs/engine.md).
            weave_steps: with "weave": steps of the new layout for each step of an older one.

        Raises:
            LayoutError: naming field, value and what is allowed; nothing has changed then.
            EngineLost: naming the engines that did not answer.
        """
        policy = self.deployment.flying.policy
        if policy != "manual":
            raise LayoutError("policy", policy, "this policy decides the layout; start with --policy manual to do it")
        layout = Layout.parse(groups, self.deployment.engines, self.deployment.group_sizes)
        if preempt not in PREEMPTS:
            raise LayoutError("preempt", preempt, f"must be one of {list(PREEMPTS)}")
        async with self._switching:
            switch, commands = self.controller.order(layout, str(preempt), weave_steps, time.monotonic())
            done = self._switched[switch.number] = asyncio.get_running_loop().create_future()
            await self.carry_out(commands)
            while not done.done():
                await asyncio.wait([done], timeout=1.0)
                self.ensure_alive()
            done.result()
            return switch

    def shutdown(self, timeout: float | None = None) -> None:
        """vLLM's; but streams that are still open then end with an error, where vLLM may wait for their clients.

        Engines that trace are given the time to write what is left, where vLLM would kill them at once.
        """
        if self.deployment.flying.trace_out is not None and timeout is not None:
            timeout = max(timeout, CLOSE_S)
        task = self.resources.output_queue_task
        for own in list(self.tasks):
            if not own.get_loop().is_closed():
                own.get_loop().call_soon_threadsafe(own.cancel)
        super().shutdown(timeout)
        if task is not None and task.get_loop().is_running() and not in_loop(task.get_loop()):
            # vLLM has cancelled that task, which reports so to who reads its queue, and would cancel the reader next
            ending = asyncio.run_coroutine_threadsafe(asyncio.sleep(STREAMS_END_S), task.get_loop())
            with contextlib.suppress(TimeoutError):
                ending.result(50 * STREAMS_END_S)

    # ---- what operators see

    async def status(self) -> dict[str, Any]:
        """Layout, engines, waiting requests: `GET /flying/status`."""
        engines = await asyncio.gather(*self.of_engines("flying_report"))
        return describe(self.controller, self.deployment) | {"engines": list(engines)}

    async def check_integrity(self) -> None:
        """Check the block bookkeeping of every engine.

        Raises:
            FlyingError: with what the first failing engine said.
        """
        try:
            await asyncio.gather(*self.of_engines("flying_check"))
        except FlyingError:
            raise
        except Exception as error:  # noqa: BLE001 - vLLM reports every failure of a utility as a bare Exception
            raise FlyingError(str(error)) from None


def _log(switch: Switch) -> None:
    decision = switch.decision
    why = "ordered" if decision is None else f"{decision.reason}; gain {decision.gain:.2f}, cost {decision.cost:.2f}"
    logger.info("layout %s -> %s by %s in %.1f ms (%s)", switch.old, switch.new, switch.preempt, switch.cutover_ms, why)
