"""vLLM's engine client of a Flying Serving server. Each overridden method calls the shell."""

import asyncio
import contextlib
import threading
from collections.abc import Awaitable
from http import HTTPStatus
from typing import Any

import msgspec
import zmq
from vllm.exceptions import GracefulHTTPError
from vllm.v1.engine import EngineCoreOutputs, EngineCoreReadyResponse, EngineCoreRequest, PauseMode
from vllm.v1.engine.core_client import AsyncMPClient
from vllm.v1.engine.exceptions import EngineDeadError

from flying_serving.config import deployment_of
from flying_serving.engine.core import FlyingEngineCore
from flying_serving.errors import TooFewEngines
from flying_serving.log import logger
from flying_serving.memory.peers import KVBlocks, announced_groups, fewest_blocks
from flying_serving.observe.tracing.writer import CLOSE_S
from flying_serving.server.calls.adapters import AdapterLoads
from flying_serving.server.calls.engine_calls import EngineCalls
from flying_serving.server.clock import keep_time
from flying_serving.server.engines.processes import CleanParent, EngineProcess
from flying_serving.server.engines.shutdown import let_requests_end, let_streams_end
from flying_serving.server.engines.starter import EngineStarter
from flying_serving.server.engines.supervisor import EngineSupervisor
from flying_serving.server.metrics import ServerMetrics
from flying_serving.server.shell import Shell
from flying_serving.server.start.settings import settings_of
from flying_serving.vllm_adapter.api_server.client_channel import ClientChannel


class FlyingClient(AsyncMPClient):
    """vLLM's client for several engines that do not depend on each other."""

    def __init__(
        self, vllm_config: Any, executor_class: Any, log_stats: bool, renderer: Any = None
    ) -> None:
        deployment = deployment_of(vllm_config.additional_config)
        self._blocks: dict[int, int] = {}
        """The number of KV blocks of each engine."""
        # before vLLM starts the engines: its monitor calls `shutdown` if one of them ends
        self._calls = EngineCalls(ClientChannel(self), deployment)
        self._adapters = AdapterLoads(self._calls, vllm_config.lora_config)
        self.flying_executor_class, self.flying_log_stats = executor_class, log_stats
        self._parent = (
            CleanParent(FlyingEngineCore.run_engine_core) if deployment.survives else None
        )
        super().__init__(vllm_config, executor_class, log_stats, renderer=renderer)
        blocks = KVBlocks(self.fewest_blocks, 0)
        if deployment.lends:
            blocks = fewest_blocks(deployment.run_dir, deployment.engines)
        groups = announced_groups(deployment.run_dir, 0)
        settings = settings_of(vllm_config, deployment, blocks, groups)
        self.shell = Shell(self._calls, settings, vllm_config.model_config)
        self.metrics = ServerMetrics(self.shell) if log_stats else None
        self.supervisor: EngineSupervisor | None = None
        self.too_few: TooFewEngines | None = None
        """The error with which the server ends when too few engines are left."""
        if self._parent is not None:
            processes = [
                EngineProcess(child.pid, child.name)
                for child in self.resources.engine_manager.processes
            ]
            # an engine that is started again has the same name
            self.input_socket.setsockopt(zmq.ROUTER_HANDOVER, 1)
            starter = EngineStarter(self, self._parent, deployment, self._blocks)
            self.supervisor = EngineSupervisor(
                self.shell, processes, starter.restart, self._end_server
            )
        self._clock_runs = False
        # no loop runs yet: the first request starts the clock
        with contextlib.suppress(RuntimeError):
            self._ensure_clock()

    def _apply_ready_response(self, payload: bytes) -> None:
        super()._apply_ready_response(payload)
        ready = msgspec.msgpack.decode(payload, type=EngineCoreReadyResponse)
        self._blocks[ready.data_parallel_rank] = ready.num_gpu_blocks
        logger.info("%d of %d engines are ready", len(self._blocks), self._calls.deployment.engines)

    @property
    def fewest_blocks(self) -> int:
        """Return the KV blocks of the engine that has fewest."""
        return min(self._blocks.values())

    def _ensure_clock(self) -> None:
        if not self._clock_runs:
            asyncio.get_running_loop()
            self._calls.run_in_background(keep_time(self.shell, self.metrics))
            if self.supervisor is not None:
                self.supervisor.watch()
            self._clock_runs = True

    # ---- engines that die

    def start_engine_core_monitor(self) -> None:
        """In place of vLLM's monitor, which ends the server when an engine ends: ours goes on where
        it can.
        """
        if self._parent is None:
            super().start_engine_core_monitor()

    def _end_server(self, problem: str) -> None:
        """End as vLLM does when an engine dies, because too few engines are left, and raise that at
        the end.
        """
        self.too_few = TooFewEngines(problem)
        logger.error("the server ends: %s", problem)
        self.resources.engine_dead = True
        threading.Thread(target=self.shutdown, name="flying-end").start()

    # ---- requests

    async def add_request_async(self, request: EngineCoreRequest) -> None:
        """Add a request, as `Shell.add` does."""
        request.client_index = self.client_index
        self._ensure_output_queue_task()
        self._ensure_clock()
        await self.shell.add(request)

    async def abort_requests_async(self, request_ids: list[str]) -> None:
        """Abort requests, as `Shell.abort` does."""
        await self.shell.abort(request_ids)

    async def process_engine_outputs(self, outputs: EngineCoreOutputs) -> None:
        """Take a batch of outputs, as `Shell.take_outputs` does. vLLM calls this for each batch."""
        self._calls.mark_idle_if_lost(outputs)
        await self.shell.take_outputs(outputs)

    async def get_output_async(self) -> Any:
        """Return vLLM's outputs, without an error at the end of a server that was told to end."""
        return await until_the_end(self._calls, super().get_output_async())

    async def call_utility_async(self, method: str, *args: Any) -> Any:
        """Call a utility of vLLM in every engine. The first engine's answer counts, as in vLLM's
        own client.
        """
        return (await self.call_utility_all_async(method, *args))[0]

    async def _call_utility_async(self, method: str, *args: Any, engine: bytes) -> Any:
        """Call one engine, as vLLM does. Raises EngineLost if that engine is lost."""
        return (await self._calls.call(int.from_bytes(engine, "little"), method, args))[1]

    async def add_lora_async(self, lora_request: Any) -> bool:
        """Load an adapter on all engines or on none: see `AdapterLoads`. vLLM calls this."""
        return await self._adapters.add_everywhere(lora_request)

    # ---- vLLM's routes of dev mode

    async def pause_scheduler_async(
        self, mode: PauseMode = "abort", clear_cache: bool = True
    ) -> None:
        """Pause all lanes of all engines. Later requests wait, in the engines or in the task pool,
        until resumed.
        """
        if mode == "abort":
            await self.shell.abort_all()
        await super().pause_scheduler_async(mode, clear_cache)

    async def sleep_async(self, level: int = 1, mode: PauseMode = "abort") -> None:
        """Pause, as level 0 does.

        Raises:
            GracefulHTTPError: 400 for a level that releases memory, which lanes share.
        """
        if level > 0:
            raise _unsupported(f"level={level}: must be 0; sleep mode")
        if mode == "abort":
            await self.shell.abort_all()
        await super().sleep_async(level, mode)

    async def release_kv_cache_memory_async(self) -> None:
        """Raise GracefulHTTPError (400): lanes share the KV memory."""
        raise _unsupported("releasing KV memory")

    # ---- the end

    def end(self, timeout_s: float | None, outputs: Any) -> float | None:
        """Let requests end before the engines do: see `let_requests_end`. Returns the seconds that
        are left for the engines.

        If `timeout_s` is None, vLLM ends without having been told to, and nothing is done.
        """
        if timeout_s is None or self._calls.ending:
            return timeout_s
        return let_requests_end(self.shell, outputs, timeout_s)

    def shutdown(self, timeout: float | None = None) -> None:
        """Shut down as vLLM does, but end open streams with an error, where vLLM may wait for their
        clients.

        Engines that trace get time to write their last events, where vLLM would kill them at once.
        """
        if self._calls.deployment.flying.trace_out is not None and timeout is not None:
            timeout = max(timeout, CLOSE_S)
        self._calls.cancel_tasks()
        loop = self._calls.channel.loop
        super().shutdown(timeout)
        if self._parent is not None:
            self._parent.close()
        if not self._calls.ending:
            let_streams_end(loop)


async def until_the_end(calls: EngineCalls, reading: Awaitable[Any]) -> Any:
    """Await outputs. When the server was told to end, dead engines cancel the reader, without an
    error.
    """
    try:
        return await reading
    except EngineDeadError:
        if not calls.ending:
            raise
    raise asyncio.CancelledError


def _unsupported(what: str) -> GracefulHTTPError:
    return GracefulHTTPError(
        f"{what} cannot be served by Flying Serving yet", HTTPStatus.BAD_REQUEST
    )
