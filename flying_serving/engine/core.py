"""The engine process: vLLM's EngineCore with lanes. Its loop is `run_busy_loop`, one screen."""

from __future__ import annotations

import queue
import time
from typing import Any

from vllm.utils.hashing import get_hash_fn_by_name
from vllm.v1.core.kv_cache_utils import (
    generate_scheduler_kv_cache_config,
    get_request_block_hasher,
    resolve_kv_cache_block_sizes,
)
from vllm.v1.engine import EngineCoreOutputs, EngineCoreRequestType
from vllm.v1.engine.core import EngineCoreProc

from flying_serving.comm.board import StepBoard
from flying_serving.config import deployment_of
from flying_serving.engine import tickets
from flying_serving.engine.aging import Aging
from flying_serving.engine.arbiter import LaneArbiter, Serve, Turn, Wait
from flying_serving.engine.group import Leader, Member, in_physical_blocks
from flying_serving.engine.leaving import Leaving
from flying_serving.engine.moves import Led, Moves
from flying_serving.engine.orders import Orders
from flying_serving.engine.pausing import Pausing
from flying_serving.engine.report import Report
from flying_serving.engine.requests import LaneRequests
from flying_serving.engine.steps import StepLog
from flying_serving.engine.tracing import EngineTrace
from flying_serving.layout.groups import aligned_group
from flying_serving.layout.shards import lane_block_tokens
from flying_serving.start_error import told_to_server
from flying_serving.vllm_adapter import table
from flying_serving.vllm_adapter.blocks import SchedulerPool
from flying_serving.vllm_adapter.engines import engine_classes
from flying_serving.vllm_adapter.kv import pooled_capacity
from flying_serving.worker.parent import end_with_parent, forget_port, forget_signals

RETRY_S = 0.005
"""How long lane 1 leaves the engine to other lanes when nothing of it could run."""


class FlyingEngineCore(LaneRequests, Orders, Leaving, Pausing, EngineCoreProc):
    """One engine: its own scheduler and worker (lane 1), a part in each group, and the groups that it leads."""

    _alone_at = 0.0

    @staticmethod
    def run_engine_core(*args: Any, **kwargs: Any) -> None:
        """Entry point of the process; installs the hooks where the process did not inherit them."""
        forget_signals()
        end_with_parent()
        forget_port()
        table.install()
        with engine_classes(FlyingEngineCore):
            EngineCoreProc.run_engine_core(*args, **kwargs)

    def __init__(self, vllm_config: Any, *args: Any, engine_index: int = 0, **kwargs: Any) -> None:
        self.deployment = deployment_of(vllm_config.additional_config)
        self.engine = engine_index
        flying = self.deployment.flying
        self.arbiter = LaneArbiter(flying.weave_steps, flying.max_pause_ms / 1000)
        self.aging = Aging(flying.priority_aging_s)
        self.members: dict[int, Member] = {}
        self.leaders: dict[int, Leader] = {}
        self._lane_of = {}
        self._moved_from = {}
        self._last_step_s = (0.0, 0.0)
        self.trace: EngineTrace | None = None
        with told_to_server(self.deployment.run_dir, engine_index):
            super().__init__(vllm_config, *args, engine_index=engine_index, **kwargs)

    def _initialize_kv_caches(self, vllm_config: Any) -> Any:
        heads = vllm_config.model_config.get_total_num_kv_heads()
        widest = lane_block_tokens(1, self.deployment.widest, self.deployment.devices, heads)
        with pooled_capacity(widest):
            kv_config = super()._initialize_kv_caches(vllm_config)
            self._block_bytes = sum(tensor.size for tensor in kv_config.kv_cache_tensors) // kv_config.num_blocks
            self._lane_configs = {size: self._lane_config(size) for size in self.deployment.lanes}
        return kv_config

    def _lane_config(self, size: int) -> tuple[Any, Any]:
        return self.model_executor.collective_rpc("lane_kv_config", args=(size,))[0]  # type: ignore[no-any-return]

    def process_input_sockets(self, *args: Any, **kwargs: Any) -> None:
        """vLLM's input thread: it starts when the scheduler exists and before a request can come, so groups go here."""
        self._build_groups()
        super().process_input_sockets(*args, **kwargs)

    def _build_groups(self) -> None:
        self.own = SchedulerPool(self.scheduler)
        deadline_s = self.deployment.flying.collective_timeout_s
        self.channel = tickets.Channel(
            self.deployment.run_dir, self.engine, self.deployment.engines, self._wake, deadline_s
        )
        self._hashers: dict[int, Any] = dict.fromkeys(self.deployment.group_sizes, self.request_block_hasher)
        for size, (config, kv_config) in self._lane_configs.items():
            group = aligned_group(self.engine, size)
            self.members[size] = Member(group, self.engine, self.own, self.channel)
            block, hash_block = resolve_kv_cache_block_sizes(kv_config, config)
            if self.request_block_hasher is not None:
                hash_fn = get_hash_fn_by_name(config.cache_config.prefix_caching_hash_algo)
                self._hashers[size] = get_request_block_hasher(hash_block, hash_fn)
            if group[0] == self.engine:
                scheduler = config.scheduler_config.get_scheduler_cls()(
                    vllm_config=config,
                    kv_cache_config=generate_scheduler_kv_cache_config([kv_config]),
                    structured_output_manager=self.structured_output_manager,
                    log_stats=self.log_stats,
                    block_size=block,
                    hash_block_size=hash_block,
                )
                lend = self.deployment.flying.lend_blocks
                self.leaders[size] = Leader(group, scheduler, self.channel, lend)
        self.moves = Moves(
            self.engine,
            self._led(),
            {1: self.scheduler.block_size}
            | {size: k.kv_cache_groups[0].kv_cache_spec.block_size for size, (_, k) in self._lane_configs.items()},
            self.members,
            self.channel,
            lambda method, *args: self.model_executor.collective_rpc(method, args=args)[0],
            self._admit,
            self._lacks,
        )
        self.report = Report(self.scheduler, self.own, self.members, self.leaders)
        self.board = StepBoard(f"{self.deployment.run_dir}/steps", self.deployment.engines)
        self.steps = StepLog(self.board)
        self.steps.watch((self.engine,), self.scheduler)
        for leader in self.leaders.values():
            self.steps.watch(leader.group, leader.scheduler)
        if self.deployment.flying.trace_out is not None:
            self.trace = EngineTrace(self.deployment.flying.trace_out, self.engine, self.scheduler)

    def _wake(self) -> None:
        self.input_queue.put_nowait((EngineCoreRequestType.WAKEUP, None))

    def run_busy_loop(self) -> None:
        """Observe, decide, act, until shut down."""
        with self.ending_quietly():
            while self._handle_shutdown():
                self._take_messages(None)
                self.moves.begin(time.monotonic())
                turn = self._choose()
                if isinstance(turn, Wait):
                    self._take_messages(turn)
                elif isinstance(turn, Serve):
                    self._serve(self.channel.receive())
                elif turn.size == 1:
                    self._step_alone()
                else:
                    self._emit(
                        self.leaders[turn.size].order(time.monotonic(), goes_on=self.arbiter.announce(turn.size))
                    )
        raise SystemExit

    def _choose(self) -> Turn:
        now = time.monotonic()
        if self.moves.holds(now):
            return Serve() if self.channel.pending() else Wait(RETRY_S)
        ready = {size: leader.ready(now) for size, leader in self.leaders.items()}
        alone = self.scheduler.has_requests() or bool(self.batch_queue)
        ready[1] = alone and now >= self._alone_at
        turn = self.arbiter.choose(now, ready, ticket=self.channel.pending())
        if isinstance(turn, Wait):
            retries = [r for r in (leader.retry_in_s(now) for leader in self.leaders.values()) if r is not None]
            if alone and not ready[1]:
                retries.append(self._alone_at - now)
            limits = [t for t in (turn.timeout_s, self.moves.retry_in_s(now), *retries) if t is not None]
            return Wait(min(limits) if limits else None)
        return turn

    def _take_messages(self, wait: Wait | None) -> None:
        """Handle what clients sent; with `wait`, block for the first message."""
        if wait is not None:
            if not self.has_work():
                self._notify_idle_state_callbacks()
                with self.aborts_queue.mutex:  # as vLLM does: each is in the input queue too
                    self.aborts_queue.queue.clear()
            try:
                self._handle_client_request(*self.input_queue.get(timeout=wait.timeout_s))
            except queue.Empty:
                return
            self._alone_at = 0.0
        while not self.input_queue.empty():
            self._handle_client_request(*self.input_queue.get_nowait())
            self._alone_at = 0.0

    def _step_alone(self) -> None:
        started = time.monotonic()
        self._reclaim_if_short()
        if self._process_engine_step() or self.batch_queue:
            self._ran(1, started, more=False, led_here=True)
        else:  # older lanes may hold the blocks that it waits for: it is their turn
            self._alone_at = time.monotonic() + RETRY_S

    def _ran(self, size: int, started: float, *, more: bool, led_here: bool, plan: Any = None) -> None:
        ended = time.monotonic()
        self._last_step_s = (started, ended)
        self.board.ended(self.engine, size, ended)
        began = self.board.together_since(aligned_group(self.engine, size), size, started)
        took_s, waited_s = max(0.0, ended - began), max(0.0, began - started)
        self.arbiter.ran(size, ended, more=more, led_here=led_here, took_s=took_s, waited_s=waited_s)
        if self.trace is not None:
            self.trace.stepped(size, plan, started, ended, waited_s)

    def _serve(self, ticket: Any) -> None:
        size = len(ticket.group)
        if isinstance(ticket, tickets.RunStep):
            self._step_together(size, ticket)
        elif isinstance(ticket, tickets.MigrateKV):
            self.moves.serve(ticket, time.monotonic())
            self._alone_at = 0.0
        elif isinstance(ticket, tickets.ReserveBlocks):
            self._want_back(self.members[size].offer(ticket), but=size)
        elif isinstance(ticket, tickets.LendBlocks):
            self.members[size].lent.commit(ticket.blocks)
        elif isinstance(ticket, tickets.ReturnBlocks):
            self.members[size].lent.take_back(ticket.blocks)
            self._alone_at = 0.0
        elif isinstance(ticket, tickets.BlocksReserved):
            self.leaders[size].granted(ticket, time.monotonic())
        elif isinstance(ticket, tickets.RecallBlocks):
            self.leaders[size].give_back(ticket.count)

    def _step_together(self, size: int, ticket: tickets.RunStep) -> None:
        started = time.monotonic()
        member = self.members[size]
        member.in_use = ticket.in_use
        plan = in_physical_blocks(ticket.plan, member.lent)
        output = self.model_executor.collective_rpc("execute_lane", args=(size, plan, ticket.grammar))[0]
        leader = self.leaders.get(size)
        if leader is not None:
            self._process_aborts_queue()
            self._emit(leader.finish(ticket.plan, output))
        elif stats := self.report.due(started, idle=not ticket.more):
            self._emit({0: EngineCoreOutputs(scheduler_stats=stats)})
        self._ran(size, started, more=ticket.more, led_here=leader is not None, plan=ticket.plan)

    def _emit(self, outputs: dict[int, Any] | None) -> None:
        for output in (outputs or {}).items():
            self.output_queue.put_nowait(output)

    def _reclaim_if_short(self) -> None:
        lending = any(member.lent.lent_count for member in self.members.values())
        waiting = self.scheduler.waiting or self.scheduler.kv_holding_waiting
        if lending and (waiting or self.own.free_count() < len(self.scheduler.running)):
            self._want_back(self.own.missing_for_next(), but=1)

    def _want_back(self, missing: int, *, but: int) -> None:
        """The lane of groups of size `but` misses blocks: ask those that are lent to other lanes back."""
        for size, member in self.members.items():
            if missing and size != but:
                member.want_back(missing, time.monotonic())

    def _lacks(self, size: int, missing: int) -> None:
        """Blocks are missing for KV that is to come to the lane of this size."""
        if size == 1:
            self._want_back(missing, but=1)
        else:
            self.leaders[size].lacks(missing, time.monotonic())

    def has_work(self) -> bool:
        """Whether any lane has requests or a ticket waits."""
        return (
            super().has_work()
            or self.channel.pending()
            or bool(self.moves)
            or any(leader.scheduler.has_requests() for leader in self.leaders.values())
        )

    def shutdown(self) -> None:
        """vLLM's, once the trace is written."""
        if self.trace is not None:
            self.trace.close()
        super().shutdown()

    def _led(self) -> dict[int, Led]:
        led = {size: Led(leader.scheduler, leader.pool) for size, leader in self.leaders.items()}
        return {1: Led(self.scheduler, self.own)} | led

    def reset_prefix_cache(self, reset_running_requests: bool = False, reset_connector: bool = False) -> bool:
        """vLLM's utility, in every lane; blocks that are lent stay so.

        Steps that are ordered run first: vLLM drops what they would give requests that are reset meanwhile, and in its
        own engine no step is under way here.
        """
        while reset_running_requests and any(leader.outstanding for leader in self.leaders.values()):
            self._serve(self.channel.receive())
        options = {"reset_running_requests": reset_running_requests, "reset_connector": reset_connector}
        lent = sum(len(member.lent.physical()) for member in self.members.values())
        return all([self.own.forget(lent, **options), *(leader.forget(**options) for leader in self.leaders.values())])
