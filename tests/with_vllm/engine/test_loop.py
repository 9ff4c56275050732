"""EngineLoop: what it does beside steps and messages, which the protocol's exploration covers."""

from collections import deque
from collections.abc import Iterator, Sequence
from functools import partial
from types import SimpleNamespace
from typing import Any

import pytest
from vllm.v1.request import Request

from flying_serving.config import FlyingConfig
from flying_serving.engine.caches import reset_prefix_caches
from flying_serving.engine.lane import Lane, Lanes
from flying_serving.engine.loop import EngineLoop, Instruments
from flying_serving.engine.steps import StepLog
from flying_serving.layout.kv_source import KVSource
from flying_serving.migration.messages import ReleaseKV
from flying_serving.migration.migrations import OFFER_POLL_S
from flying_serving.migration.offers import Offer, OfferTable
from flying_serving.migration.source import RETAIN_S
from flying_serving.scheduling.arbiter import Wait
from flying_serving.vllm_adapter.keys import AHEAD_KEY, MIGRATED_FROM_KEY, OFFER_KEY
from tests.with_vllm.engine.schedulers import Hooks
from tests.with_vllm.vllm_adapter import lanes
from tests.with_vllm.vllm_adapter.lanes import BLOCK, make


@pytest.fixture(autouse=True)
def quiet(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """vLLM reads a machine's cores when it makes a configuration."""
    monkeypatch.setenv("VLLM_CPU_OMP_THREADS_BIND", "nobind")
    yield


class Engine:
    """A loop over one of vLLM's schedulers; it is host and channel, and the only peer."""

    def __init__(self, blocks: int = 20) -> None:
        self.now_s = 100.0
        self.lane = lanes.Lane(overlaps=False, blocks=blocks)
        self.sent: deque[Any] = deque()
        self.tokens: list[range] = []
        self.table = OfferTable(
            memoryview(bytearray(OfferTable.size_bytes(20, blocks))), 20, blocks
        )
        board: Any = SimpleNamespace(
            ended=lambda *args: None, together_since=lambda group, size, began_s: began_s
        )
        kv: Any = self.table, self
        host: Any = self
        own = Lanes([Lane((0,), BLOCK, None, self.lane.pool)], board)
        report: Any = SimpleNamespace()
        instruments = Instruments(board, report, StepLog(board), None)
        self.loop = EngineLoop(
            0, own, host, host, FlyingConfig(), kv, instruments, lambda: self.now_s
        )
        source = self.loop.migrations.source
        self.lane.scheduler.hooks = Hooks(blocks_freed=partial(source.blocks_freed, 1))

    # ---- host, channel and peer

    def send(self, members: Sequence[int], message: Any) -> None:
        assert tuple(members) == (0,)
        self.sent.append(message)

    def pending(self) -> bool:
        return bool(self.sent)

    def receive(self) -> Any:
        return self.sent.popleft()

    def read(self, source: KVSource) -> Offer | None:
        return self.table.read(source.number)

    def is_mapped(self, group: tuple[int, ...]) -> bool:
        return True

    def physical(self, engine: int, size: int, blocks: Sequence[int]) -> list[int]:
        return list(blocks)

    def call_workers(
        self, function: Any, source: Any, theirs: Any, target: Any, mine: Any, tokens: range
    ) -> None:
        self.tokens.append(tokens)
        for place in tokens:
            at, to = (
                BLOCK * blocks[place // BLOCK] + place % BLOCK for blocks in (theirs[0], mine)
            )
            self.lane.kv[to] = self.lane.kv[at]

    def add_own(self, request: Request, wave: int) -> None:
        self.lane.scheduler.add_request(request)

    def has_own_steps(self) -> bool:
        return bool(self.lane.scheduler.has_requests())

    def step_own(self) -> bool:
        self.lane.step()
        return True

    # ---- what tests do

    def add(self, request: Request, **notes: Any) -> None:
        """A request comes, with notes of the API server."""
        request.sampling_params.extra_args = notes
        self.loop.add(request, 0)

    def run(self, steps: int) -> None:
        """Rounds of the loop, each with a step."""
        for _ in range(steps):
            self.loop._advance_migrations()
            self.loop._step_own()


def test_offers_grow_with_steps_and_outlive_their_request() -> None:
    """Those that are asked for early; others are made at the end. What nobody fetches goes."""
    engine = Engine()
    engine.add(make("a", 3, 10, 2), **{OFFER_KEY: [1, True]})
    engine.add(make("b", 5, 3, 4), **{OFFER_KEY: [2, False]})
    found = []
    for _ in range(5):
        engine.run(1)
        found.append(
            tuple(
                None if o is None else (o.tokens, o.is_final)
                for o in map(engine.table.read, (1, 2))
            )
        )
    assert found == [
        ((8, False), None),
        ((10, False), None),
        ((11, True), None),
        ((11, True), None),
        ((11, True), (6, True)),
    ]
    assert engine.lane.scheduler.requests == {}
    assert sorted(engine.loop.migrations.source.retained) == [1, 2]
    engine.run(1)
    assert isinstance(engine.loop._choose(), Wait)
    engine.now_s += RETAIN_S + 0.1
    engine.run(1)
    assert engine.loop.migrations.source.retained == {}
    assert engine.lane.free() == engine.lane.pool.total
    assert [engine.table.read(number) for number in (1, 2)] == [
        Offer(0, is_final=True, blocks=[])
    ] * 2


def test_kv_that_ends_after_a_long_idle_time_is_kept() -> None:
    """Its time begins when it is there, not when something was offered before."""
    engine = Engine()
    engine.run(1)
    engine.now_s += 1000.0
    engine.add(make("a", 3, 6, 1), **{OFFER_KEY: [1, True]})
    engine.run(1)
    engine.now_s += 0.9 * RETAIN_S  # the step took long
    engine.run(1)
    engine.now_s += 0.9 * RETAIN_S
    engine.run(1)
    assert list(engine.loop.migrations.source.retained) == [1]
    assert engine.loop.migrations.retry_in_s(engine.now_s) == pytest.approx(0.1 * RETAIN_S)


def test_a_request_is_pulled_ahead_then_runs_then_is_released() -> None:
    """While it waits the engine looks again soon, and has work."""
    engine = Engine()
    engine.add(make("a", 3, 9, 3), **{OFFER_KEY: [7, True]})
    engine.add(make("b", 3, 9, 20), **{MIGRATED_FROM_KEY: [0, 1, 7], AHEAD_KEY: 11})
    assert engine.loop.has_work()
    engine.run(5)
    # the prefix cache has the rest
    assert engine.tokens == [
        range(8, 9),
        range(9, 10),
        range(10, 11),
    ]
    assert engine.lane.scheduler.requests == {}
    assert engine.loop._choose() == Wait(OFFER_POLL_S)
    engine.add(make("b", 3, 9, 5, had=3), **{MIGRATED_FROM_KEY: [0, 1, 7]})
    engine.loop._advance_migrations()
    assert list(engine.lane.scheduler.requests) == ["b"]
    assert [type(message) for message in engine.sent] == [ReleaseKV]
    engine.loop.handle(engine.receive())
    assert engine.loop.migrations.source.retained == {}
    assert (
        engine.loop.migrations.incoming.counts().migrated_tokens
        == engine.tokens[-1].stop - engine.tokens[0].start
    )
    engine.run(3)
    assert engine.lane.scheduler.requests == {}
    assert engine.lane.free() == engine.lane.pool.total


def test_a_reset_of_running_requests_releases_all_kv() -> None:
    """vLLM raises if a block is in use then, and a pause would never be over."""
    engine = Engine(blocks=40)
    engine.add(make("a", 1, 9, 4))
    engine.add(make("b", 2, 9, 9), **{OFFER_KEY: [2, True]})
    engine.run(4)
    engine.loop.migrations.retain("a", 1)
    engine.add(make("c", 1, 12, 4), **{MIGRATED_FROM_KEY: [0, 1, 9]})
    engine.add(make("d", 2, 9, 20), **{MIGRATED_FROM_KEY: [0, 1, 2], AHEAD_KEY: 14})
    engine.loop._advance_migrations()
    assert set(engine.loop.migrations.incoming.by_id) == {"c", "d"}
    assert not reset_prefix_caches(engine.loop, reset_running_requests=False, reset_connector=False)
    assert reset_prefix_caches(engine.loop, reset_running_requests=True, reset_connector=False)
    assert engine.lane.free() == engine.lane.pool.total
    assert engine.loop.migrations.source.retained == {}
    assert engine.loop.migrations.incoming.by_id == {}
    assert engine.table.read(2) == Offer(0, is_final=True, blocks=[])
    assert sorted(engine.lane.scheduler.requests) == ["b", "c"]
