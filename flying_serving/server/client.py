"""The engine client inside the API server: routes requests over the present layout and carries out switches."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections import deque
from collections.abc import Iterable
from typing import Any

from vllm.exceptions import VLLMValidationError
from vllm.utils.async_utils import in_loop
from vllm.v1.engine import EngineCoreOutputs, EngineCoreRequest, EngineCoreRequestType
from vllm.v1.engine.core_client import AsyncMPClient

from flying_serving.config import PREEMPTS, deployment_of
from flying_serving.controller.capacity import Capacity
from flying_serving.controller.routing import Router, Wanted
from flying_serving.controller.switches import Switch
from flying_serving.engine.keys import LANE_KEY
from flying_serving.errors import EngineLost, FlyingError, LayoutError, RequestError
from flying_serving.layout.groups import Group, Layout

logger = logging.getLogger("vllm.flying_serving")

KEPT_SWITCHES = 1000
STREAMS_END_S = 0.1
DEGREE_KEY = "tp_degree"


class FlyingClient(AsyncMPClient):
    """vLLM's client for several engines, with groups of them as the places where requests run."""

    def __init__(self, vllm_config: Any, executor_class: Any, log_stats: bool, renderer: Any = None) -> None:
        self.deployment = deployment_of(vllm_config.additional_config)
        self._blocks: list[int] = []
        super().__init__(vllm_config, executor_class, log_stats, renderer=renderer)
        deployment = self.deployment
        capacity = Capacity.of(
            deployment.group_sizes,
            min(self._blocks),
            vllm_config.cache_config.block_size,
            deployment.devices,
            vllm_config.model_config.get_total_num_kv_heads(),
        )
        self.router = Router(Layout.uniform(deployment.engines, 1), capacity)
        self.held: dict[str, tuple[EngineCoreRequest, Wanted]] = {}
        self.switches: deque[Switch] = deque(maxlen=KEPT_SWITCHES)
        self._open: list[Switch] = []
        self._switch_count = 0
        self._switching = asyncio.Lock()
        self._idle = asyncio.Event()
        self._hold_all = False
        self._token_at: dict[str, float] = {}

    def _apply_ready_response(self, payload: bytes) -> None:
        before = self.vllm_config.cache_config.num_gpu_blocks or 0
        super()._apply_ready_response(payload)
        self._blocks.append((self.vllm_config.cache_config.num_gpu_blocks or 0) - before)
        logger.info("%d of %d engines are ready", len(self._blocks), self.deployment.engines)

    # ---- requests

    async def add_request_async(self, request: EngineCoreRequest) -> None:
        """Send a request to the group that should run it, or hold it until the layout has one.

        Raises:
            VLLMValidationError: if no layout of this server can run it (HTTP 400).
        """
        request.client_index = self.client_index
        self._ensure_output_queue_task()
        wanted = self._wanted(request)
        try:
            self.router.check(wanted)
        except RequestError as error:
            raise VLLMValidationError(str(error), parameter=DEGREE_KEY if wanted.degree else None) from None
        group = None if self._hold_all else self.router.place(wanted)
        if group is None:
            self.held[request.request_id] = (request, wanted)
        else:
            await self._dispatch(request, group)

    def _wanted(self, request: EngineCoreRequest) -> Wanted:
        params = request.sampling_params
        prompt = len(request.prompt_token_ids or ())
        limit = self.vllm_config.model_config.max_model_len
        if params is None:
            return Wanted(prompt)
        extra = params.extra_args or {}
        if LANE_KEY in extra:
            raise VLLMValidationError(f"vllm_xargs.{LANE_KEY} is not for clients", parameter=LANE_KEY)
        # vLLM gives a request without max_tokens all that the model's length leaves: it takes what its group holds
        open_ended = params.max_tokens is None or prompt + params.max_tokens >= limit
        tokens = prompt + 1 if open_ended else prompt + params.max_tokens
        degree = extra.get(DEGREE_KEY)
        if degree is not None and (isinstance(degree, bool) or not isinstance(degree, int)):
            raise VLLMValidationError(f"{DEGREE_KEY}={degree!r}: must be one of {self.router.capacity.degrees}")
        return Wanted(tokens, degree)

    async def _dispatch(self, request: EngineCoreRequest, group: Group) -> None:
        if request.sampling_params is not None:
            request.sampling_params = self._params_in(group, request)
        self.router.started(request.request_id, group)
        await self._send_input(EngineCoreRequestType.ADD, request, self.core_engines[group[0]])

    def _params_in(self, group: Group, request: EngineCoreRequest) -> Any:
        """The request's parameters with the lane noted, and max_tokens at most what the group holds."""
        params = request.sampling_params
        room = self.router.capacity.tokens[len(group)] - len(request.prompt_token_ids or ())
        if len(group) == 1 and params.max_tokens is not None and params.max_tokens <= room:
            return params
        # copied: vLLM's output processing shares the object, and n > 1 shares it between requests
        params = params.clone()
        params.max_tokens = room if params.max_tokens is None else min(params.max_tokens, room)
        params.extra_args = {**(params.extra_args or {}), LANE_KEY: len(group)}
        return params

    async def _dispatch_held(self) -> None:
        for request_id, (request, wanted) in list(self.held.items()):
            group = self.router.place(wanted)
            if group is not None and self.held.pop(request_id, None) is not None:
                await self._dispatch(request, group)

    async def abort_requests_async(self, request_ids: list[str]) -> None:
        """Abort wherever they run, or forget them if they wait."""
        if self.resources.engine_dead:
            return
        by_leader: dict[int, list[str]] = {}
        for request_id in request_ids:
            self.held.pop(request_id, None)
            group = self.router.group_of(request_id)
            if group is not None:
                by_leader.setdefault(group[0], []).append(request_id)
        for leader, ids in by_leader.items():
            await self._send_input(EngineCoreRequestType.ABORT, ids, self.core_engines[leader])
        self._finish(request_ids)

    async def process_engine_outputs(self, outputs: EngineCoreOutputs) -> None:
        """vLLM calls this for each batch of outputs: note tokens and ends."""
        now = time.monotonic()
        over = []
        for output in outputs.outputs:
            if self.router.group_of(output.request_id) is None:
                continue  # aborted; the engine had not heard of it yet
            last = self._token_at.get(output.request_id)
            self._token_at[output.request_id] = now
            if last is not None:
                for switch in self._open:
                    switch.token_gap(now - max(last, switch.ordered_s))
            if output.finish_reason is not None:
                over.append(output.request_id)
        if over:
            self._finish(over)

    def _finish(self, request_ids: Iterable[str]) -> None:
        now = time.monotonic()
        for request_id in request_ids:
            self._token_at.pop(request_id, None)
            if self.router.finished(request_id) is not None:
                for switch in self._open:
                    switch.finished(request_id, now)
        self._open = [switch for switch in self._open if switch.open]
        self._idle.set()

    # ---- switches

    async def switch(self, groups: object, preempt: object = "weave", weave_steps: int | None = None) -> Switch:
        """Change the layout and return when every engine works in the new one.

        Args:
            groups: list of lists of engine numbers, a partition into aligned groups.
            preempt: "weave", "hard" or "sequential" (see docs/architecture.md).
            weave_steps: with "weave": steps of the new layout for each step of an older one.

        Raises:
            LayoutError: naming field, value and what is allowed; nothing has changed then.
            EngineLost: naming the engines that did not answer.
        """
        layout = Layout.parse(groups, self.deployment.engines, self.deployment.group_sizes)
        if preempt not in PREEMPTS:
            raise LayoutError("preempt", preempt, f"must be one of {list(PREEMPTS)}")
        steps = self.deployment.flying.weave_steps if weave_steps is None else weave_steps
        async with self._switching:
            waited_ms = await self._wait_until_drained(layout) if preempt == "sequential" else 0.0
            try:
                return await self._order(layout, str(preempt), steps, waited_ms)
            finally:
                self._hold_all = False
                await self._dispatch_held()

    async def _wait_until_drained(self, layout: Layout) -> float:
        """Hold new requests until those of groups that `layout` lacks have ended. Returns the wait in ms."""
        started = time.monotonic()
        self._hold_all = True
        while self.router.draining(layout):
            self._idle.clear()
            try:
                await asyncio.wait_for(self._idle.wait(), timeout=1.0)
            except TimeoutError:
                self.ensure_alive()
        return (time.monotonic() - started) * 1e3

    async def _order(self, layout: Layout, preempt: str, steps: int, waited_ms: float) -> Switch:
        worked_s = time.thread_time()
        self._switch_count += 1
        switch = Switch(
            number=self._switch_count,
            old=self.router.layout,
            new=layout,
            preempt=preempt,
            ordered_s=time.monotonic(),
            requests_in_flight=self.router.running,
            wall_time_s=time.time(),
            waited_for_idle_ms=waited_ms,
            draining=self.router.draining(layout),
        )
        self._open.append(switch)
        self.switches.append(switch)
        self.router.layout = layout
        orders = [
            self._utility(engine, "flying_switch", list(layout.group_of(engine)), preempt, steps, switch.ordered_s)
            for engine in range(self.deployment.engines)
        ]
        reports = asyncio.gather(*orders)
        switch.work_ms = (time.thread_time() - worked_s) * 1e3
        # on their way behind the orders: requests that waited for this layout
        self._hold_all = False
        await asyncio.sleep(0)
        await self._dispatch_held()
        switch.acknowledged(list(await reports), time.monotonic())
        self._open = [s for s in self._open if s.open]
        logger.info("layout %s -> %s by %s in %.1f ms", switch.old, switch.new, preempt, switch.cutover_ms)
        return switch

    async def _utility(self, engine: int, method: str, *args: Any) -> Any:
        timeout_s = self.deployment.flying.collective_timeout_s
        call = self._call_utility_async(method, *args, engine=self.core_engines[engine])
        try:
            return await asyncio.wait_for(call, timeout_s)
        except TimeoutError:
            raise EngineLost(f"engine {engine} did not answer {method} within {timeout_s} s") from None

    async def call_utility_async(self, method: str, *args: Any) -> Any:
        """vLLM's utilities go to every engine; the first one's answer counts, as in vLLM's own client."""
        return (await self.call_utility_all_async(method, *args))[0]

    def shutdown(self, timeout: float | None = None) -> None:
        """vLLM's; but streams that are still open then end with an error, where vLLM may wait for their clients."""
        task = self.resources.output_queue_task
        super().shutdown(timeout)
        if task is not None and task.get_loop().is_running() and not in_loop(task.get_loop()):
            # vLLM has cancelled that task, which reports so to who reads its queue, and would cancel the reader next
            ending = asyncio.run_coroutine_threadsafe(asyncio.sleep(STREAMS_END_S), task.get_loop())
            with contextlib.suppress(TimeoutError):
                ending.result(50 * STREAMS_END_S)

    # ---- what operators see

    async def status(self) -> dict[str, Any]:
        """Layout, engines, held requests: `GET /flying/status`."""
        engines = await asyncio.gather(*(self._utility(e, "flying_report") for e in range(self.deployment.engines)))
        return {
            "layout": self.router.layout.to_lists(),
            "group_sizes": list(self.deployment.group_sizes),
            "devices_per_engine": self.deployment.devices,
            "capacity_tokens": {str(size): tokens for size, tokens in self.router.capacity.tokens.items()},
            "requests": {"running": self.router.running, "held": len(self.held)},
            "engines": list(engines),
        }

    async def check_integrity(self) -> None:
        """Check the block bookkeeping of every engine.

        Raises:
            FlyingError: with what the first failing engine said.
        """
        try:
            await asyncio.gather(*(self._utility(e, "flying_check") for e in range(self.deployment.engines)))
        except FlyingError:
            raise
        except Exception as error:  # noqa: BLE001 - vLLM reports every failure of a utility as a bare Exception
            raise FlyingError(str(error)) from None
