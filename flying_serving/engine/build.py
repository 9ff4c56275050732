"""The parts of an engine, built over vLLM's scheduler and executor."""

import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from operator import attrgetter
from typing import Any

from msgspec.structs import astuple

from flying_serving.comm.board import StepBoard
from flying_serving.comm.pulse import Pulse
from flying_serving.config import Deployment, deployment_of
from flying_serving.engine.channel import Channel
from flying_serving.engine.host import Inbox
from flying_serving.engine.lane import EngineLane, EngineLanes, LaneFactory
from flying_serving.engine.lane_events import LaneEvents
from flying_serving.engine.loop import EngineLoop, Instruments
from flying_serving.engine.membership import Membership
from flying_serving.engine.report import Report
from flying_serving.engine.step_log import StepLog, divide_steps
from flying_serving.engine.tracing import EngineTrace
from flying_serving.engine.utilities import EngineUtilities
from flying_serving.layout.groups import aligned_group
from flying_serving.log import logger
from flying_serving.memory.arena import announce, announced
from flying_serving.memory.kv_groups import KVGroups
from flying_serving.memory.peers import announce_blocks, announce_groups
from flying_serving.migration import transfer
from flying_serving.migration.chunks import EXTRA_BYTES
from flying_serving.migration.offers import OfferTable, PeerOffers, make_table
from flying_serving.predict.migrations import fit_migrations
from flying_serving.scheduling.batches import Batches
from flying_serving.vllm_adapter.kv.blocks import SchedulerPool
from flying_serving.vllm_adapter.kv.cache import block_bytes, groups_of
from flying_serving.vllm_adapter.kv.engine_pool import EnginePool
from flying_serving.vllm_adapter.model_runner.device_lane import DeviceLane
from flying_serving.vllm_adapter.scheduler.scheduler import (
    block_hasher,
    make_scheduler,
    most_outstanding,
)
from flying_serving.weights.lending.engine_weights import EngineWeights
from flying_serving.wire import CalibrationRow, EngineMemory, Measured, MigrationRow


def build(core: Any) -> tuple[EngineLoop, EngineUtilities]:
    """Build the loop and the utilities of an engine; the host is `core`, vLLM's EngineCoreProc."""
    setup = EngineSetup(core, deployment_of(core.vllm_config.additional_config))
    channel = setup.channel()
    table = setup.offer_table()
    own = EnginePool(core.scheduler, groups_of(core.kv_config))
    announce_groups(setup.run_dir, setup.engine, own.groups)
    links = Links(channel, setup.board(), table, setup.peer_offers())
    loop = make_loop(setup, own, links)

    # durations of steps and of copies of KV on this machine
    steps, copies = measured(core, setup.deployment, setup.engine)
    _fit_chunks(setup, loop, copies)

    # parts that only some servers have
    flying = setup.deployment.flying
    if flying.tbt_slo_ms is not None:
        limit_batches(flying.tbt_slo_ms / 1000, loop.lanes, loop.instruments.steps, steps)
    divide_steps(loop.lanes, loop.instruments.steps, steps)
    if setup.deployment.lends:
        revoke = loop.migrations.source.revoke_all
        loop.weights = EngineWeights.of(loop.lanes, own, core.kv_config, core.call_workers, revoke)
        announce_blocks(setup.run_dir, setup.engine, loop.weights.blocks)

    # the utilities, which the API server calls
    weight_bytes = core.call_workers(attrgetter("weight_bytes"))
    memory = EngineMemory(weight_bytes, own.total * setup.block_bytes)
    utilities = EngineUtilities(loop.weights, memory, loop, setup.block_bytes, steps, copies)
    return loop, utilities


@dataclass(frozen=True)
class EngineSetup:
    """The setup of an engine: vLLM's core, with its scheduler and executor, and the deployment."""

    core: Any
    deployment: Deployment

    @property
    def engine(self) -> int:
        """The number of the engine."""
        return int(self.core.engine_index)

    @property
    def run_dir(self) -> str:
        """The run directory of the server."""
        return self.deployment.run_dir

    @property
    def block_bytes(self) -> int:
        """Bytes of one KV block, all layers, on one device."""
        return block_bytes(self.core.kv_config)

    def channel(self) -> Channel:
        """Open the engine's end of the channel."""
        timeout_s = self.deployment.flying.collective_timeout_s
        engines, wake = self.deployment.engines, self.core.wake
        return Channel(self.run_dir, self.engine, engines, wake, timeout_s)

    def board(self) -> StepBoard:
        """Map the board on which all engines note their steps and their loads."""
        return StepBoard(f"{self.run_dir}/steps", self.deployment.engines)

    def offer_table(self) -> OfferTable:
        """Make the table in which the engine offers KV.

        An offer has room for the longest request in lane 1, whose blocks hold the fewest tokens.
        """
        longest_tokens = self.core.vllm_config.model_config.max_model_len
        offer_blocks = groups_of(self.core.kv_config).most_blocks(longest_tokens)
        engine_blocks = self.core.kv_config.num_blocks
        shared_blocks = self.core.call_workers(attrgetter("blocks"))
        return make_table(self.run_dir, self.engine, offer_blocks, engine_blocks, shared_blocks)

    def peer_offers(self) -> PeerOffers:
        """Map the tables of all engines that are there."""
        pulse = Pulse(self.run_dir, self.deployment.engines, self.deployment.devices)
        offers = PeerOffers(self.run_dir, pulse.is_lost)
        offers.map(filter(self.deployment.is_there, range(self.deployment.engines)))
        return offers


@dataclass(frozen=True)
class Links:
    """The links of an engine to the other engines of its server.

    `table`: its offers of KV; `offers`: those of all engines.
    """

    channel: Inbox
    board: StepBoard
    table: OfferTable
    offers: PeerOffers


def make_loop(
    setup: EngineSetup, own: EnginePool, links: Links, clock: Callable[[], float] = time.monotonic
) -> EngineLoop:
    """Make the loop of an engine over its lanes; lane 1 has the pool `own`. `clock`: as of
    EngineLoop.
    """
    # the lanes, which step
    lanes = EngineLanes(_make_lanes(setup, own, links), links.board)

    # the instruments, which observe the steps
    instruments = _make_instruments(setup, lanes, links.board, clock)

    # the loop over both
    kv = links.table, links.offers
    flying = setup.deployment.flying
    loop = EngineLoop(
        setup.engine, lanes, links.channel, setup.core, flying, kv, instruments, clock
    )

    # the schedulers tell the parts above of their steps
    _connect(setup, loop)
    if setup.deployment.survives:
        loop.membership = _make_membership(setup, loop, links.offers)
    return loop


def _make_lanes(setup: EngineSetup, own: EnginePool, links: Links) -> list[EngineLane]:
    """Make lane 1, over vLLM's scheduler, and a lane for each wider group.

    Where the engine leads the group, the lane gets a scheduler.
    """
    core = setup.core
    lend_blocks = setup.deployment.flying.lend_blocks
    factory = LaneFactory(setup.engine, own, links.channel, links.table, lend_blocks)
    lanes = [factory.own_lane(own.groups.block_tokens, core.request_block_hasher)]
    for size in setup.deployment.wider_sizes:
        config, kv_config = core.call_lane(size, DeviceLane.scheduler_config)
        config.scheduler_config.async_scheduling |= setup.deployment.async_groups
        groups = groups_of(kv_config)
        has_prefix_cache = core.request_block_hasher is not None
        hash_blocks = block_hasher(config, kv_config) if has_prefix_cache else None
        make_pool = partial(_make_group_pool, core, config, kv_config, groups)
        group = aligned_group(setup.engine, size)
        lanes.append(factory.group_lane(group, groups.block_tokens, hash_blocks, make_pool))
    return lanes


def _make_group_pool(core: Any, config: Any, kv_config: Any, groups: KVGroups) -> SchedulerPool:
    scheduler = make_scheduler(core, config, kv_config)
    devices = config.parallel_config.tensor_parallel_size
    if most_outstanding(scheduler) > 1:
        logger.info("group of %d devices: a step is planned while one is computed", devices)
    return SchedulerPool(scheduler, groups)


def _make_instruments(
    setup: EngineSetup, lanes: EngineLanes, board: StepBoard, clock: Callable[[], float]
) -> Instruments:
    trace_out = setup.deployment.flying.trace_out
    trace = None if trace_out is None else EngineTrace(trace_out, setup.engine)
    return Instruments(board, Report(lanes, board), StepLog(board, clock), trace)


def _connect(setup: EngineSetup, loop: EngineLoop) -> None:
    """Let the schedulers of the lanes that the engine leads tell the loop what happens there."""
    instruments, source = loop.instruments, loop.migrations.source
    for size, scheduler in loop.lanes.schedulers.items():
        group = aligned_group(setup.engine, size)
        instruments.steps.follow(group)
        scheduler.hooks = LaneEvents(group, instruments, source, setup.core.emit)
        scheduler.group, scheduler.clock = group, loop.clock
    if instruments.trace is not None:
        blocks_in_use = instruments.report.blocks_in_use
        loop.migrations.observers.append(partial(instruments.trace.pulling, blocks_in_use))


def _fit_chunks(setup: EngineSetup, loop: EngineLoop, copies: list[MigrationRow]) -> None:
    """Bound the chunks in which KV is pulled: those to all groups have together at most EXTRA_BYTES
    of a device.

    `copies`: durations of copies, measured at the start.
    """
    chunks = loop.migrations.target.chunks
    chunks.blocks = max(1, EXTRA_BYTES // setup.deployment.engines // setup.block_bytes)
    costs = fit_migrations(map(astuple, copies))
    chunks.token_s = {size: cost.token_s for size, cost in costs.items()}


def _make_membership(setup: EngineSetup, loop: EngineLoop, offers: PeerOffers) -> Membership:
    deployment = setup.deployment
    return Membership(
        deployment.incarnations,
        loop.lanes,
        loop.arbiter,
        loop.migrations,
        offers,
        setup.core,
        loop.group_steps,
        deployment.told_in_s,
    )


def measured(
    core: Any, deployment: Deployment, engine: int
) -> tuple[list[CalibrationRow], list[MigrationRow]]:
    """Return the durations of steps and of copies of KV, as measured when the server started.

    An engine keeps them for its next start.
    """
    path = f"{deployment.run_dir}/measured-{engine}"
    if not deployment.starts_alone:
        # a collective: all engines come here at the same time, when vLLM has made their schedulers
        steps = core.call_workers(attrgetter("calibration"))
        copies = core.call_workers(transfer.measure)
        announce(path, Measured(steps, copies))
        return steps, copies
    core.call_workers(transfer.map_peers, [*filter(deployment.is_there, range(deployment.engines))])
    measured_before = announced(path, Measured, f"measurements of engine {engine}")
    return measured_before.steps, measured_before.migrations


def limit_batches(
    target_s: float, lanes: EngineLanes, steps: StepLog, measured: list[CalibrationRow]
) -> None:
    """Let the lanes that an engine leads keep to a target for the time between two tokens."""
    own = lanes.own_pool
    step_tokens = own.scheduler.max_num_scheduled_tokens
    batches = Batches(target_s, step_tokens, own.groups.block_tokens, lanes.active)
    batches.calibrate(measured)
    steps.listeners.append(batches.stepped)
    for size, scheduler in lanes.schedulers.items():
        scheduler.prompt_limit = partial(batches.prompt_tokens, size)
