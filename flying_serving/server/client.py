"""The engine client inside the API server: the shell that tells the controller what happens and does what it says."""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections import deque
from collections.abc import Awaitable, Iterable
from typing import Any

from vllm.v1.engine import EngineCoreRequestType
from vllm.v1.engine.exceptions import EngineDeadError

from flying_serving.config import deployment_of
from flying_serving.controller.commands import Command, Dispatch, Order, Recall, Reject
from flying_serving.controller.controller import Controller
from flying_serving.controller.moving import exchanges
from flying_serving.errors import FlyingError
from flying_serving.server.calls import heard
from flying_serving.server.clock import keep_time
from flying_serving.server.metrics import ServerMetrics
from flying_serving.server.pausing import PausingClient
from flying_serving.server.requests import EngineRequests
from flying_serving.server.settings import describe, settings_of
from flying_serving.server.streams import Streams

logger = logging.getLogger("vllm.flying_serving")


class FlyingClient(EngineRequests, PausingClient):
    """vLLM's client for several engines, with groups of them as the places where requests run."""

    def __init__(self, vllm_config: Any, executor_class: Any, log_stats: bool, renderer: Any = None) -> None:
        self.deployment = deployment_of(vllm_config.additional_config)
        self._blocks: list[int] = []
        self.tasks = set()
        super().__init__(vllm_config, executor_class, log_stats, renderer=renderer)
        settings = settings_of(vllm_config, self.deployment, self.fewest_blocks)
        self.controller = Controller(settings)
        self.streams = Streams(settings.capacity, vllm_config.model_config.max_model_len)
        self.metrics = ServerMetrics(self) if log_stats else None
        self._deadlines = {}
        self.begin_orders()
        self._clock_runs = False
        self._ensure_clock()

    def _apply_ready_response(self, payload: bytes) -> None:
        before = self.vllm_config.cache_config.num_gpu_blocks or 0
        super()._apply_ready_response(payload)
        self._blocks.append((self.vllm_config.cache_config.num_gpu_blocks or 0) - before)
        logger.info("%d of %d engines are ready", len(self._blocks), self.deployment.engines)

    @property
    def fewest_blocks(self) -> int:
        """KV blocks of the engine that has fewest."""
        return min(self._blocks)

    # ---- what the controller says

    def carry_out(self, commands: list[Command], awaiting: Iterable[int] = ()) -> Awaitable[Any]:
        """Do what the controller says, in order. Returns what to wait for until engines have been sent all of it.

        At once, because the controller speaks of how things are now: if an output or another decision came in between,
        a request could be withdrawn from where it is no more. A command that fails ends its request or its order, and
        the others are carried out.

        Raises:
            EngineDeadError: if engines are gone, once all is done that needs none.
        """
        for engine, counts in exchanges(commands, self.deployment.group_sizes, awaiting).items():
            self.tell(engine, "flying_announce_migrations", *counts)
        sent, left, failed = [], deque(commands), set()
        dead: EngineDeadError | None = None
        while left:
            command = left.popleft()
            if not isinstance(command, Order) and command.request_id in failed:
                continue
            try:
                sent.append(self._do(command))
            except EngineDeadError as error:
                dead = error
            except Exception as error:  # noqa: BLE001 - whatever it is, the other commands are carried out
                if isinstance(command, Order):
                    self.order_failed(command.switch, error)
                else:
                    failed.add(command.request_id)
                    left += self._fail(command.request_id, error)
        # shielded: one client's going away must not take back what is sent for others
        on_their_way = heard(asyncio.shield(heard(asyncio.gather(*(s for s in sent if s is not None)))))
        if dead is not None:
            raise dead
        return on_their_way

    def _do(self, command: Command) -> Awaitable[Any] | None:
        match command:
            case Dispatch(request_id, group):
                request = self.streams.to_engine(command)
                self._admit(request_id)
                return None if request is None else self._to_leader(EngineCoreRequestType.ADD, request, group)
            case Recall(request_id, group):
                engine_id = self.streams.withdraw(request_id)
                if not self.controller.moves:
                    return self._to_leader(EngineCoreRequestType.ABORT, [engine_id], group)
                self.tell(group[0], "flying_retain", [engine_id])  # its KV is kept for a while
            case Reject(request_id, waited_s):
                self._refuse(request_id, waited_s)
            case Order(switch, weave_steps):
                self.order_engines(switch, weave_steps)
        return None

    def _ensure_clock(self) -> None:
        if not self._clock_runs:
            with contextlib.suppress(RuntimeError):  # no loop runs yet: the first request starts it
                asyncio.get_running_loop()
                self._clock_runs = True
                self.background(keep_time(self, self.metrics))

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
