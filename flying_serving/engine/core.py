"""The engine process: vLLM's EngineCore, which owns an `EngineLoop` over its scheduler and its
executor.
"""

import logging
import os
import queue
from collections.abc import Callable
from typing import Any, get_args

from vllm.utils.gc_utils import freeze_gc_heap
from vllm.v1.core.sched.interface import PauseState
from vllm.v1.engine import EngineCoreRequest, EngineCoreRequestType, PauseMode
from vllm.v1.engine.core import EngineCore, EngineCoreProc, EngineShutdownState
from vllm.v1.request import Request, RequestStatus

from flying_serving.comm.pulse import Pulse
from flying_serving.config import deployment_of
from flying_serving.engine.build import build
from flying_serving.engine.caches import reset_prefix_caches
from flying_serving.engine.ending import LeaveGuard
from flying_serving.engine.sampled import answer_of
from flying_serving.layout.shards import lane_block_tokens
from flying_serving.scheduling.arbiter import Wait
from flying_serving.start_error import told_to_server
from flying_serving.vllm_adapter.kv.cache import pooled_capacity
from flying_serving.vllm_adapter.kv.heads import fewest_kv_heads
from flying_serving.vllm_adapter.patches import installer
from flying_serving.vllm_adapter.patches.engine_class import engine_classes
from flying_serving.vllm_adapter.processes.queues import note_in
from flying_serving.vllm_adapter.request_kinds import note_of_kinds
from flying_serving.vllm_adapter.scheduler.history import resume
from flying_serving.vllm_adapter.scheduler.scheduler import use_lane_class
from flying_serving.wire import ANSWERS
from flying_serving.worker.parent import end_with_parent, forget_port, forget_signals

IDLE_S = 1.0
"""Seconds that an idle engine waits at most before it checks again whether it is to end.

Python runs a signal's handler in the main thread. That thread does not wake up for a signal that
came just before it began to wait.
"""


class CoreWithLanes(EngineCore):
    """vLLM's core with the loop and the utilities, which are built in the engine's main thread
    before a request can come.
    """

    def __init__(self, vllm_config: Any, *args: Any, **kwargs: Any) -> None:
        super().__init__(vllm_config, *args, **kwargs)
        self.note = note_of_kinds(vllm_config)  # vLLM may have fitted the model's length
        built: Any = self
        built.loop, built.utilities = build(built)
        # vLLM has frozen its own objects before; the garbage collector need not look at ours either
        freeze_gc_heap()

    def _initialize_kv_caches(self, vllm_config: Any) -> Any:
        deployment = deployment_of(vllm_config.additional_config)
        heads = fewest_kv_heads(vllm_config.model_config)
        with pooled_capacity(lane_block_tokens(1, deployment.widest, deployment.devices, heads)):
            self.kv_config = super()._initialize_kv_caches(vllm_config)
        # next vLLM makes the scheduler; the workers' configuration stays as the user has it
        use_lane_class(vllm_config)
        return self.kv_config


class FlyingEngineCore(EngineCoreProc, CoreWithLanes):
    """One engine: the host of an `EngineLoop`, whose lane 1 is vLLM's own scheduler and worker.

    In the order of base classes CoreWithLanes is between EngineCoreProc and EngineCore:
    EngineCoreProc's constructor calls it, and starts the input thread after it.
    """

    @staticmethod
    def run_engine_core(*args: Any, **kwargs: Any) -> None:
        """Entry point of the process; installs the hooks where the process did not inherit them."""
        forget_signals()
        end_with_parent()
        forget_port()
        deployment = deployment_of(kwargs["vllm_config"].additional_config)
        pulse = Pulse(deployment.run_dir, deployment.engines, deployment.devices)
        pulse.enter(kwargs["dp_rank"])
        pulse.beat(kwargs["dp_rank"])
        installer.install()
        with engine_classes(FlyingEngineCore):
            EngineCoreProc.run_engine_core(*args, **kwargs)

    def __init__(self, vllm_config: Any, *args: Any, engine_index: int = 0, **kwargs: Any) -> None:
        deployment = deployment_of(vllm_config.additional_config)
        self.leave_guard = LeaveGuard(vllm_config.shutdown_timeout, survives=deployment.survives)
        note_in(deployment.run_dir, engine_index)
        with told_to_server(deployment.run_dir, engine_index):
            super().__init__(vllm_config, *args, engine_index=engine_index, **kwargs)

    # ---- the methods of `Host`, which the loop calls

    def serves_on(self) -> bool:
        return bool(self._handle_shutdown())

    def take_messages(self, wait: Wait | None) -> bool:
        if wait is not None:
            if not self.has_work():
                self._notify_idle_state_callbacks()
                with self.aborts_queue.mutex:  # as vLLM does: each is in the input queue too
                    self.aborts_queue.queue.clear()
            timeout_s = IDLE_S if wait.timeout_s is None else min(wait.timeout_s, IDLE_S)
            try:
                self._handle_client_request(*self.input_queue.get(timeout=timeout_s))
            except queue.Empty:
                return False
        handled = wait is not None
        while not self.input_queue.empty():
            self._handle_client_request(*self.input_queue.get_nowait())
            handled = True
        return handled

    def has_own_steps(self) -> bool:
        return self.scheduler.has_requests() or bool(self.batch_queue)

    def step_own(self) -> bool:
        return self._process_engine_step() or bool(self.batch_queue)

    def add_own(self, request: Request, wave: int) -> None:
        super().add_request(request, wave)

    def call_lane(self, size: int, function: Callable[..., Any], *args: Any) -> Any:
        call = (size, function, *args)
        return answer_of(self.model_executor.collective_rpc("on_lane", args=call))

    def call_workers(self, function: Callable[..., Any], *args: Any) -> Any:
        return answer_of(self.model_executor.collective_rpc("on_lanes", args=(function, *args)))

    def process_aborts(self) -> None:
        self._process_aborts_queue()

    def emit(self, outputs: dict[int, Any] | None) -> None:
        for output in (outputs or {}).items():
            self.output_queue.put_nowait(output)

    def wake(self) -> None:
        """End a wait for the API server's messages. Any thread may call it."""
        self.input_queue.put_nowait((EngineCoreRequestType.WAKEUP, None))

    # ---- methods that vLLM calls

    def run_busy_loop(self) -> None:
        """Run the loop until the engine is shut down."""
        with self.leave_guard.quietly(self):
            self.loop.run()
        deployment = deployment_of(self.vllm_config.additional_config)
        Pulse(deployment.run_dir, deployment.engines, deployment.devices).leave(self.engine_index)
        raise SystemExit

    def preprocess_add_request(self, request: EngineCoreRequest) -> tuple[Request, int]:
        """Make the request as vLLM does, with the block hashes of its lane and its history. Runs in
        the input thread.
        """
        self.request_block_hasher = self.loop.requests.hash_blocks(request)
        made, wave = super().preprocess_add_request(request)
        resume(made, request, self.structured_output_manager, self.note)
        return made, wave

    def add_request(self, request: Request, request_wave: int = 0) -> None:
        """Give the request to the lane that the API server chose, at once or when its KV has
        arrived.
        """
        self.loop.add(request, request_wave)

    def abort_requests(self, request_ids: list[str]) -> None:
        """Abort requests in any lane."""
        self.loop.abort(list(request_ids))

    def has_work(self) -> bool:
        """Return whether any lane has requests, or a message waits."""
        return super().has_work() or self.loop.has_work()

    def reset_prefix_cache(
        self, reset_running_requests: bool = False, reset_connector: bool = False
    ) -> bool:
        """Reset the prefix cache of every lane: vLLM's utility."""
        options = {
            "reset_running_requests": reset_running_requests,
            "reset_connector": reset_connector,
        }
        return reset_prefix_caches(self.loop, **options)

    def pause_scheduler(self, mode: PauseMode = "abort", clear_cache: bool = True) -> Any:
        """Pause every lane: vLLM's utility (`/pause` in dev mode). It is over when no lane that
        this engine leads has anything to do.

        Raises:
            ValueError: for a mode that vLLM does not have.
        """
        if mode not in get_args(PauseMode):
            return super().pause_scheduler(mode, clear_cache)  # which raises
        for leader in self.loop.lanes.leaders.values():
            scheduler = leader.scheduler
            if mode == "abort":
                aborted = scheduler.finish_requests(None, RequestStatus.FINISHED_ABORTED)
                self._send_abort_outputs(aborted)
            scheduler.set_pause_state(
                PauseState.PAUSED_ALL if mode == "keep" else PauseState.PAUSED_NEW
            )
        return super().pause_scheduler(mode, clear_cache)

    def resume_scheduler(self) -> None:
        """Resume every lane: vLLM's utility."""
        for leader in self.loop.lanes.leaders.values():
            leader.scheduler.set_pause_state(PauseState.UNPAUSED)
        super().resume_scheduler()

    def _handle_shutdown(self) -> bool:
        guard = self.leave_guard
        if self.shutdown_state == EngineShutdownState.RUNNING or guard.waits:
            return True
        return not guard.ends_at_once and super()._handle_shutdown()

    def _reject_add_in_shutdown(self, request: Any) -> bool:
        guard = self.leave_guard
        return not (guard.waits or guard.ends_at_once) and super()._reject_add_in_shutdown(request)

    def _reject_utility_in_shutdown(self, client_idx: int, call_id: int, method_name: str) -> bool:
        return False  # the engine may answer while it is here: its end is no failure of the call

    def flying_leave(self) -> None:
        """Let the engine end, as no request is left in the whole server. A utility."""
        self.leave_guard.may_leave = True

    def _send_engine_dead(self) -> None:
        """Handle an error that ends the engine as vLLM does; where the other engines go on, end the
        process at once.
        """
        if not deployment_of(self.vllm_config.additional_config).survives:
            super()._send_engine_dead()
            return
        if self.loop.instruments.trace is not None:
            self.loop.instruments.trace.close()
        logging.shutdown()
        os._exit(1)

    def __getattr__(self, name: str) -> Any:
        """Return a utility that `wire.ANSWERS` lists: vLLM looks utilities up by name in its
        engine.
        """
        if name in ANSWERS:
            return getattr(self.utilities, name)
        raise AttributeError(name)

    def shutdown(self) -> None:
        """Write the rest of the trace, then shut down as vLLM does."""
        if "loop" in vars(self) and self.loop.instruments.trace is not None:
            self.loop.instruments.trace.close()
        super().shutdown()
