"""What an engine is built of, over vLLM's scheduler and executor."""

from functools import partial
from typing import Any

from msgspec.structs import astuple

from flying_serving.comm.board import StepBoard
from flying_serving.comm.pulse import Pulse
from flying_serving.config import Deployment, deployment_of
from flying_serving.engine.channel import Channel
from flying_serving.engine.group import Leader, Member
from flying_serving.engine.lane import Lane, Lanes
from flying_serving.engine.loop import EngineLoop, Instruments
from flying_serving.engine.membership import Membership
from flying_serving.engine.report import Report
from flying_serving.engine.residency import Residency
from flying_serving.engine.steps import StepLog
from flying_serving.engine.tracing import EngineTrace
from flying_serving.engine.utilities import EngineUtilities
from flying_serving.layout.groups import aligned_group
from flying_serving.memory.arena import announce, announced
from flying_serving.memory.ledger import ExtraKV, PageLedger
from flying_serving.memory.peers import announce_blocks
from flying_serving.migration import transfer
from flying_serving.migration.chunks import EXTRA_BYTES
from flying_serving.migration.offers import PeerOffers, make_table
from flying_serving.predict.migrations import fit_migrations
from flying_serving.scheduling.batches import Batches
from flying_serving.vllm_adapter.beginnings import tell_beginnings
from flying_serving.vllm_adapter.blocks import SchedulerPool
from flying_serving.vllm_adapter.engine_pool import EnginePool
from flying_serving.vllm_adapter.limits import limit_prompts
from flying_serving.vllm_adapter.schedulers import hash_blocks, make_scheduler
from flying_serving.wire import CalibrationRow, EngineMemory, Measured, MigrationRow
from flying_serving.worker import lent
from flying_serving.worker.lanes import WorkerLanes


def build(core: Any) -> tuple[EngineLoop, EngineUtilities]:
    """The loop and the utilities of an engine: the host is `core`, vLLM's EngineCoreProc with its executor."""
    deployment = deployment_of(core.vllm_config.additional_config)
    engine, flying, run_dir = core.engine_index, deployment.flying, deployment.run_dir
    channel = Channel(run_dir, engine, deployment.engines, core.wake, flying.collective_timeout_s)
    own, table = EnginePool(core.scheduler), make_table(run_dir, engine, *_table_blocks(core))
    lanes = [Lane((engine,), core.scheduler.block_size, core.request_block_hasher, own)]
    for size in deployment.lanes:
        config, kv_config = core.call_workers(WorkerLanes.scheduler_config, size)
        group = aligned_group(engine, size)
        leads = group[0] == engine
        pool = SchedulerPool(make_scheduler(core, config, kv_config)) if leads else None
        lanes.append(
            Lane(
                group,
                kv_config.kv_cache_groups[0].kv_cache_spec.block_size,
                None if core.request_block_hasher is None else hash_blocks(config, kv_config),
                pool,
                Member(group, engine, own, channel, partial(table.lend, size)),
                None if pool is None else Leader(group, pool, channel, flying.lend_blocks),
            )
        )
    board = StepBoard(f"{run_dir}/steps", deployment.engines)
    all_lanes = Lanes(lanes, board)
    report, steps = Report(all_lanes, board), StepLog(board)
    _watch(core, all_lanes, steps)
    trace = None if flying.trace_out is None else EngineTrace(flying.trace_out, engine, core.scheduler)
    offers = PeerOffers(run_dir, Pulse(run_dir, deployment.engines, deployment.devices).is_lost)
    offers.map(filter(deployment.is_there, range(deployment.engines)))
    loop = EngineLoop(engine, all_lanes, channel, core, flying, (table, offers), Instruments(board, report, trace))
    if trace is not None:
        loop.migrations.observers.append(partial(trace.pulling, report.blocks_in_use))
    block_bytes = sum(tensor.size for tensor in core.kv_config.kv_cache_tensors) // core.kv_config.num_blocks
    steps_at_start, migrations = measured(core, deployment, engine)
    costs, chunks = fit_migrations(map(astuple, migrations)), loop.migrations.target.chunks
    chunks.blocks = max(1, EXTRA_BYTES // deployment.engines // block_bytes)
    chunks.token_s = {size: cost.token_s for size, cost in costs.items()}
    if flying.tbt_slo_ms is not None:
        limit_batches(flying.tbt_slo_ms / 1000, all_lanes, steps, steps_at_start)
    else:
        for scheduler in all_lanes.schedulers.values():
            limit_prompts(scheduler)
    if flying.lend_weights and deployment.lanes:
        loop.residency = _residency(core, own, loop)
        announce_blocks(run_dir, engine, loop.residency.blocks)
    if deployment.survives:
        loop.membership = _membership(core, deployment, loop, offers)
    memory = EngineMemory(core.call_workers(WorkerLanes.get_weight_bytes), own.total * block_bytes)
    return loop, EngineUtilities(loop, steps, block_bytes, memory, steps_at_start, migrations)


def _watch(core: Any, lanes: Lanes, steps: StepLog) -> None:
    """Follow the steps of all schedulers."""
    for size, scheduler in lanes.schedulers.items():
        steps.watch(aligned_group(core.engine_index, size), scheduler)
        tell_beginnings(scheduler, core.emit)


def _membership(core: Any, deployment: Deployment, loop: EngineLoop, offers: PeerOffers) -> Membership:
    of_loop = loop.lanes, loop.arbiter, loop.migrations
    return Membership(deployment.incarnations, *of_loop, offers, core.call_workers, deployment.told_in_s)


def measured(core: Any, deployment: Deployment, engine: int) -> tuple[list[CalibrationRow], list[MigrationRow]]:
    """What steps and copies of KV take, as measured when the server started; an engine keeps it for its next start."""
    path = f"{deployment.run_dir}/measured-{engine}"
    if not deployment.restarts:
        # a collective: all engines come here at the same time, when vLLM has made their schedulers
        found = core.call_workers(WorkerLanes.get_calibration), core.call_workers(transfer.measure)
        announce(path, Measured(*found))
        return found
    core.call_workers(transfer.map_peers, [*filter(deployment.is_there, range(deployment.engines))])
    kept = announced(path, Measured, f"measurements of engine {engine}")
    return kept.steps, kept.migrations


def _residency(core: Any, own: EnginePool, loop: EngineLoop) -> Residency:
    """What the engine has of its weights: all, at first; and its extra blocks, whose pages go back to the system."""
    pieces, own_blocks = core.call_workers(lent.lendable)
    extra = range(own_blocks, core.kv_config.num_blocks)
    core.call_workers(lent.release_blocks, extra)
    regions = lent.extents(core.kv_config, range(1))
    ledger = PageLedger(pieces, ExtraKV(len(extra), len(regions), regions[0][1]))
    return Residency(loop.lanes, own, ledger, extra, core.call_workers, loop.migrations.source.revoke_all)


def _table_blocks(core: Any) -> tuple[int, int]:
    """Blocks of the longest request, and of the engine: lane 1's, whose blocks hold the fewest tokens."""
    longest = core.vllm_config.model_config.max_model_len
    return longest // core.scheduler.block_size + 2, core.kv_config.num_blocks


def limit_batches(target_s: float, lanes: Lanes, steps: StepLog, measured: list[CalibrationRow]) -> None:
    """Let the lanes that an engine leads keep to a target for the time between two tokens."""
    own = lanes.own.scheduler
    batches = Batches(target_s, own.max_num_scheduled_tokens, own.block_size, lanes.active)
    batches.calibrate(measured)
    steps.listeners.append(batches.stepped)
    for size, scheduler in lanes.schedulers.items():
        limit_prompts(scheduler, partial(batches.prompt_tokens, size))
