"""Two engines whose group schedules asynchronously: loops and schedulers of production, and workers
that write down whose token is in which block.
"""

from collections import deque
from collections.abc import Callable, Sequence
from functools import partial
from tempfile import TemporaryDirectory
from types import SimpleNamespace
from typing import Any

from vllm.v1.core.sched.async_scheduler import AsyncScheduler
from vllm.v1.core.sched.scheduler import Scheduler
from vllm.v1.outputs import ModelRunnerOutput
from vllm.v1.request import Request

from flying_serving.comm.board import StepBoard
from flying_serving.config import FlyingConfig
from flying_serving.engine.lane import LaneFactory, Lanes
from flying_serving.engine.loop import EngineLoop, Instruments
from flying_serving.engine.membership import Membership
from flying_serving.engine.steps import StepLog
from flying_serving.layout.kv_source import KVSource
from flying_serving.migration.offers import Offer, OfferTable
from flying_serving.migration.transfer import map_peers, pull_kv, unmap_peers
from flying_serving.scheduling.arbiter import Wait
from flying_serving.vllm_adapter.blocks import SchedulerPool
from flying_serving.vllm_adapter.engine_pool import EnginePool
from flying_serving.vllm_adapter.failures import why_failed
from flying_serving.vllm_adapter.keys import LANE_KEY
from flying_serving.worker.lane import OutputUse
from flying_serving.worker.lanes import StepLost, WorkerLanes
from tests.with_vllm.engine.schedulers import Hooks
from tests.with_vllm.vllm_adapter.lanes import BLOCK, Lane, token

GROUP = (0, 1)


class Worker:
    """A device of one engine: it computes a step when the step is launched.

    `kv`: by physical block and place in it, the token whose KV is there. `await_members`: called
    with the number of a group's step before its output is there.
    """

    def __init__(self, await_members: Callable[[int], None]) -> None:
        self._await_members = await_members
        self.kv: dict[tuple[int, int], int] = {}
        self.kept: deque[Any] = deque()
        self.most_kept = 0
        self.launched = 0
        self.loses_member = False
        self.token_offset = 0
        """Added to each token that is sampled from now on, until the members begin anew."""
        self.begun_anew: list[int] = []
        self._tables: dict[str, list[int]] = {}
        self._prompts: dict[str, list[int]] = {}

    def execute(self, size: int, plan: Any, grammar: Any, use: OutputUse) -> Any:
        """Compute a step, as `WorkerLanes.execute`."""
        if self.loses_member and size > 1:
            return StepLost("engine 1 is lost")
        self._update(plan)
        output = self._compute(plan)
        if size == 1:
            return output
        self.launched += 1
        if use is OutputUse.RETURNED:
            self._await_members(self.launched)
            return output
        self.kept.append((self.launched, output))
        self.most_kept = max(self.most_kept, len(self.kept))
        return None

    def take_output(self, size: int) -> Any:
        """Return the oldest kept output, as `WorkerLanes.take_output`."""
        step, output = self.kept.popleft()
        if self.loses_member:
            return StepLost("engine 1 is lost")
        self._await_members(step)
        return output

    def rejoin(self, size: int, incarnations: list[int]) -> None:
        """Step with members that are there again, as `WorkerLanes.rejoin`."""
        self.loses_member, self.launched = False, 0

    def begin_anew(self, size: int, times: int) -> None:
        """Sample right tokens again, as `WorkerLanes.begin_anew` draws other random numbers."""
        self.token_offset = 0
        self.begun_anew.append(times)

    def drop_requests(self, size: int) -> None:
        """Forget all requests, as `WorkerLanes.drop_requests`."""
        self.kept.clear()
        self._tables.clear()

    def has(self, blocks: Sequence[int], place: int) -> int | None:
        """Return the token whose KV is at a place of a request with these blocks."""
        return self.kv.get((blocks[place // BLOCK], place % BLOCK))

    def _update(self, plan: Any) -> None:
        self._computed: dict[str, tuple[int, int]] = {}
        for name in plan.finished_req_ids:
            self._tables.pop(name, None)
        for new in plan.scheduled_new_reqs:
            self._tables[new.req_id] = list(new.block_ids[0])
            self._prompts[new.req_id] = new.prompt_token_ids
            self._computed[new.req_id] = new.num_computed_tokens, 0
        cached = plan.scheduled_cached_reqs
        for place, name in enumerate(cached.req_ids):
            blocks = cached.new_block_ids[place]
            if name in cached.resumed_req_ids:
                self._tables[name] = []
            self._tables[name] += blocks[0] if blocks is not None else []
            computed, outputs = cached.num_computed_tokens[place], cached.num_output_tokens[place]
            self._computed[name] = computed, outputs

    def _compute(self, plan: Any) -> ModelRunnerOutput:
        names = list(plan.num_scheduled_tokens)
        sampled: list[list[int]] = []
        for name in names:
            (computed, outputs), prompt = self._computed[name], self._prompts[name]
            family, blocks = prompt[0] // 100, self._tables[name]
            for place in range(computed):
                assert self.has(blocks, place) == token(family, place), (name, place)
            stop = computed + plan.num_scheduled_tokens[name]
            for place in range(computed, stop):
                self.kv[blocks[place // BLOCK], place % BLOCK] = token(family, place)
            is_last = stop >= len(prompt) + outputs
            sampled.append([token(family, stop) + self.token_offset] if is_last else [])
        places = {name: row for row, name in enumerate(names)}
        return ModelRunnerOutput(names, places, sampled)


class Engine:
    """One engine with a loop over vLLM's schedulers; it is the loop's host, channel and peer."""

    def __init__(self, number: int, node: "Node", incarnation: int = 0) -> None:
        self.number, self.node = number, node
        self.worker = Worker(partial(node.bring_to_step, number))
        self.inbox: deque[Any] = deque()
        self.aborting: list[str] = []
        self.rounds = 0
        blocks = node.blocks
        own = Lane(overlaps=False, blocks=blocks)
        self.table = OfferTable(
            memoryview(bytearray(OfferTable.size_bytes(40, blocks))), 40, blocks
        )
        factory = LaneFactory(number, EnginePool(own.scheduler), self, self.table, 4)  # type: ignore[arg-type]
        group_lane = Lane(overlaps=True, blocks=blocks, kind=node.kind)

        def make_pool() -> SchedulerPool:
            return SchedulerPool(group_lane.scheduler)

        lanes = [factory.own_lane(BLOCK, None), factory.group_lane(GROUP, BLOCK, None, make_pool)]
        host: Any = self
        board = node.board
        report: Any = SimpleNamespace(
            stats_if_changed=lambda now_s: None, stats_if_due=lambda now_s, idle: None
        )
        self.steps = StepLog(board, self.clock)
        kv: Any = (self.table, self)
        self.loop = EngineLoop(
            number,
            Lanes(lanes, board),
            host,
            host,
            FlyingConfig(),
            kv,
            Instruments(board, report, self.steps, None),
            self.clock,
        )
        for size, scheduler in self.loop.lanes.schedulers.items():
            group = (number,) if size == 1 else GROUP
            self.steps.follow(group)
            scheduler.hooks = Hooks(
                step_planned=partial(self.steps.planned, group),
                output_received=partial(self.steps.received, group),
                blocks_freed=partial(self._freed, size),
            )

        peers: Any = SimpleNamespace(
            lost=set(), map=lambda engines: None, unmap=lambda engines: None
        )
        self.loop.membership = Membership(
            [incarnation if engine == number else 0 for engine in GROUP],
            self.loop.lanes,
            self.loop.arbiter,
            self.loop.migrations,
            peers,
            self.call_workers,
            self.loop.group_steps,
            told_in_s=10.0,
        )

    def run(self) -> None:
        """Make one round of the loop."""
        assert not self.rounds, "it is in a round already"
        self.rounds = 1
        self.loop.run()
        self.rounds = 0

    def _freed(self, size: int, request: Request) -> None:
        if not request.is_finished():
            self.node.preempted.append(request.request_id)
        self.loop.migrations.source.blocks_freed(size, request)

    def clock(self) -> float:
        """Return the time: a millisecond more at each look."""
        self.node.now_s += 0.001
        return self.node.now_s

    # ---- channel and peer

    def send(self, members: Sequence[int], message: Any) -> None:
        for member in members:
            self.node.engines[member].inbox.append(message)

    def pending(self) -> bool:
        return bool(self.inbox)

    def waiting(self) -> int:
        return len(self.inbox)

    def receive(self) -> Any:
        return self.inbox.popleft()

    def read(self, source: KVSource) -> Offer | None:
        return self.node.engines[source.group[0]].table.read(source.number)

    def is_mapped(self, group: tuple[int, ...]) -> bool:
        return True

    def physical(self, engine: int, size: int, blocks: Sequence[int]) -> list[int]:
        return self.node.engines[engine].loop.lanes.by_size[size].physical(list(blocks))

    # ---- host

    def serves_on(self) -> bool:
        goes_on, self.rounds = self.rounds == 1, 2
        return goes_on

    def take_messages(self, wait: Wait | None) -> bool:
        return False

    def has_own_steps(self) -> bool:
        return bool(self.loop.lanes.own.scheduler.has_requests())

    def step_own(self) -> bool:
        scheduler = self.loop.lanes.own.scheduler
        plan = scheduler.schedule()
        output = self.worker.execute(1, plan, None, OutputUse.RETURNED)
        self.emit(scheduler.update_from_output(plan, output))
        return bool(plan.total_num_scheduled_tokens)

    def add_own(self, request: Request, wave: int) -> None:
        self.loop.lanes.own.scheduler.add_request(request)

    def call_workers(self, function: Any, *args: Any) -> Any:
        if function is pull_kv:
            return self._pull(*args)
        names = {
            WorkerLanes.execute: self.worker.execute,
            WorkerLanes.take_output: self.worker.take_output,
            WorkerLanes.begin_anew: self.worker.begin_anew,
            WorkerLanes.drop_requests: self.worker.drop_requests,
            WorkerLanes.rejoin: self.worker.rejoin,
            unmap_peers: lambda engines: None,
            map_peers: lambda engines: None,
        }
        return names[function](*args)

    def _pull(
        self, group: Any, source_blocks: Any, target: Any, blocks: list[int], tokens: range
    ) -> None:
        for place in tokens:
            at = source_blocks[group[0]][place // BLOCK], place % BLOCK
            value = self.node.engines[group[0]].worker.kv[at]
            self.worker.kv[blocks[place // BLOCK], place % BLOCK] = value

    def process_aborts(self) -> None:
        names, self.aborting = self.aborting, []
        self.loop.abort(names)

    def emit(self, outputs: dict[int, Any] | None) -> None:
        for batch in (outputs or {}).values():
            for output in batch.outputs:
                self.node.tokens.setdefault(output.request_id, []).extend(output.new_token_ids)
                if output.finish_reason is not None:
                    self.node.ended[output.request_id] = str(output.finish_reason)
                if (why := why_failed(output)) is not None:
                    self.node.errors[output.request_id] = why


class Node:
    """Engines 0 and 1, and what their clients got. `kind`: of the group's scheduler."""

    SYNCHRONOUS = Scheduler

    def __init__(self, blocks: int = 40, kind: Any = AsyncScheduler) -> None:
        self.blocks, self.kind = blocks, kind
        self.now_s = 100.0
        self.tokens: dict[str, list[int]] = {}
        self.ended: dict[str, str] = {}
        self.errors: dict[str, str] = {}
        self.preempted: list[str] = []
        with TemporaryDirectory() as directory:  # the mapping stays
            self.board = StepBoard(f"{directory}/board", len(GROUP))
        self.engines: list[Engine] = []
        self.engines += [Engine(number, self) for number in GROUP]

    @property
    def leader(self) -> Any:
        return self.engines[0].loop.lanes.leaders[2]

    def add(self, request: Request, size: int, **notes: Any) -> None:
        """A request comes to engine 0, for its lane of this size."""
        request.sampling_params.extra_args = {LANE_KEY: size, **notes}
        self.engines[0].loop.add(request, 0)

    def run(self, rounds: int) -> None:
        """Let both loops make rounds in turn."""
        for _ in range(rounds):
            for engine in self.engines:
                engine.run()

    def bring_to_step(self, number: int, step: int) -> None:
        """Let the other engine come as far as this step of the group, in which both take part."""
        (other,) = (engine for engine in self.engines if engine.number != number)
        for _ in range(200):
            if other.worker.launched >= step:
                return
            other.run()
        raise AssertionError(f"engine {other.number} never launched step {step}")

    def lose_member(self) -> None:
        """Engine 1 is lost, and engine 0 is told so."""
        self.engines[0].worker.loses_member = True
        self.engines[0].loop.set_peers([0, None])

    def start_member(self) -> None:
        """Engine 1 is there again."""
        self.engines[1] = Engine(1, self, incarnation=1)
        self.engines[0].loop.set_peers([0, 1])

    def run_until_outstanding(self, steps: int) -> None:
        """Run until so many steps of the group are outstanding."""
        for _ in range(200):
            if self.leader.outstanding.count == steps:
                return
            self.run(1)
        raise AssertionError(f"{steps} steps were never outstanding")

    def run_until_tokens(self, name: str, count: int) -> None:
        """Run until a request has got so many tokens."""
        for _ in range(200):
            if len(self.tokens.get(name, ())) >= count:
                return
            self.run(1)
        raise AssertionError(f"{name} never got {count} tokens")

    def finish(self) -> None:
        """Run until nothing is left, and check that all blocks are free again."""
        for _ in range(2000):
            self.run(1)
            if not any(engine.loop.has_work() or engine.has_own_steps() for engine in self.engines):
                break
        else:
            raise AssertionError("there is still work")
        for engine in self.engines:
            engine.loop.lanes.check()
            assert engine.worker.kept == deque()
            assert not engine.loop.group_steps
        assert not self.leader.outstanding
        assert self.leader.scheduler.requests == {}


def outputs(family: int, prompt: int, count: int) -> list[int]:
    """Return the tokens that a request has to get."""
    return [token(family, prompt + place) for place in range(count)]
