"""Pulls between workers of four engines, over memory that they really map, and what is measured at
start.
"""

from itertools import product
from math import gcd
from pathlib import Path
from random import Random
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from msgspec.structs import astuple

from flying_serving.layout.groups import Group, aligned_group
from flying_serving.layout.shards import Segment
from flying_serving.memory.kv_groups import KVGroup, KVGroups
from flying_serving.memory.kv_view import KVView
from flying_serving.memory.peers import KVViews, PeerKV
from flying_serving.memory.states import StateCut
from flying_serving.migration.copy_plan import WorkerId, rank_of
from flying_serving.migration.transfer import REPETITIONS, measure, pull_beside_kv, pull_kv
from flying_serving.wire import MigrationRow
from tests.unit.memory.flat_memory import Kind, Model
from tests.unit.migration.workers import ENGINES, SIZES, Workers

GROUPS: list[Group] = [
    aligned_group(engine, size) for size in SIZES for engine in range(0, ENGINES, size)
]
BLOCKS = 40


def check_pull(workers: Workers, source: Group, target: Group, tokens: range, seed: int) -> None:
    """All devices of the target get their heads, and zeros behind the last token in blocks that the
    pull begins; all other memory stays as it is.
    """
    chance, model = Random(seed), workers.model
    completes = seed % 2 == 0  # of requests that have nothing beside their KV
    old_size, new_size = len(source), len(target)
    free = {engine: chance.sample(range(1, BLOCKS), BLOCKS - 1) for engine in range(ENGINES)}
    counts = [-(-tokens.stop // model.tokens(size)) for size in (old_size, new_size)]
    old = {engine: [free[engine].pop() for _ in range(counts[0])] for engine in source}
    new = {engine: [free[engine].pop() for _ in range(counts[1])] for engine in target}
    for worker in product(source, range(model.devices)):
        rank = workers.rank(old_size, worker)
        for memory in workers.kinds[worker]:
            memory.write(old_size, rank, old[worker[0]], range(counts[0] * model.tokens(old_size)))
    expected = {worker: memory.values.copy() for worker, memory in workers.memories.items()}
    tile = gcd(model.tokens(old_size), model.tokens(new_size))
    whole = range(tokens.start // tile * tile, -(-tokens.stop // tile) * tile)
    block = model.tokens(new_size)
    begun = -(-tokens.start // block) * block
    behind = range(max(begun, tokens.stop // block * block), counts[1] * block)
    for worker in product(target, range(model.devices)):
        rank = workers.rank(new_size, worker)
        for memory in workers.kinds[worker]:
            for at, _ in memory.places(new_size, rank, new[worker[0]], behind):
                expected[worker][at] = 0
            for at, value in memory.places(new_size, rank, new[worker[0]], whole):
                expected[worker][at] = value
        pull_kv(workers.workers[worker], old, target, new[worker[0]], tokens, completes)
    for worker, memory in workers.memories.items():
        np.testing.assert_array_equal(memory.values, expected[worker])


@pytest.mark.parametrize("devices", [1, 2])
@pytest.mark.parametrize("kv_heads", [1, 2, 4, 8])
@pytest.mark.parametrize(
    "kind", [Kind(), Kind(transposed=True, interleaved=True)], ids=["plain", "transposed"]
)
def test_every_pair_of_groups(tmp_path: Path, devices: int, kv_heads: int, kind: Kind) -> None:
    """Where they overlap, engines read what is theirs; each has its own blocks."""
    workers = Workers(
        str(tmp_path), Model(kv_heads, devices, layers=2, head_size=1, kind=kind), BLOCKS
    )
    for seed, (source, target) in enumerate(product(GROUPS, GROUPS)):
        start = Random(seed).choice([0, 3, 8])
        check_pull(workers, source, target, range(start, start + 1 + seed % 13), seed)


@pytest.mark.parametrize("devices", [1, 2])
@pytest.mark.parametrize("heads", [(4, 4), (8, 2), (4, 1)], ids=str)
def test_layers_of_other_sizes_are_pulled_by_their_own_heads(
    tmp_path: Path, devices: int, heads: tuple[int, int]
) -> None:
    local, full = (
        Model(count, devices, layers, size, kind=Kind(transposed=True), fewest_heads=min(heads))
        for count, layers, size in zip(heads, (2, 1), (1, 2), strict=True)
    )
    workers = Workers(str(tmp_path), local, BLOCKS, full)
    for seed, (source, target) in enumerate(product(GROUPS, GROUPS)):
        start = Random(seed).choice([0, 3, 8])
        check_pull(workers, source, target, range(start, start + 1 + seed % 13), seed)


HEADS = 8
"""Heads of a state."""
CUTS = [StateCut(0, 0, (Segment(HEADS, HEADS),))]


def state_lanes(devices: int) -> dict[WorkerId, KVViews]:
    """Return the lanes of all workers, which have a state of their heads in each block, and no
    KV.
    """
    return {
        worker: {
            size: [
                KVView([], range(0), 4, 1, [torch.zeros(BLOCKS, HEADS // (size * devices))], CUTS)
            ]
            for size in SIZES
        }
        for worker in product(range(ENGINES), range(devices))
    }


def state_of(group: Group, worker: WorkerId, devices: int) -> torch.Tensor:
    """Return a worker's part of a request's state: the numbers of its heads."""
    heads = torch.arange(1.0, HEADS + 1).chunk(len(group) * devices)
    return heads[rank_of(group, worker)]


def check_pull_of_state(
    lanes: dict[WorkerId, KVViews], peers: PeerKV, source: Group, target: Group, devices: int
) -> None:
    """All devices of the target get the state of their heads, and no other block changes."""
    for worker in product(source, range(devices)):
        (state,) = lanes[worker][len(source)][0].states
        state[worker[0] + 5] = state_of(source, worker, devices)
    old = {engine: [1, 2, engine + 5] for engine in source}
    for engine, device in product(target, range(devices)):
        puller: Any = SimpleNamespace(
            engine=engine,
            device=device,
            devices=devices,
            kv_views=lanes[engine, device],
            kv_groups=KVGroups((KVGroup(4), KVGroup(1000, has_state=True))),
            peers=peers,
        )
        (state,) = lanes[engine, device][len(target)][0].states
        state[20] = 0
        expected = state.clone()
        expected[20] = state_of(target, (engine, device), devices)
        pull_beside_kv(puller, old, target, [3, 4, 20])
        assert torch.equal(state, expected)


@pytest.mark.parametrize("devices", [1, 2])
def test_a_state_is_pulled_between_every_pair_of_groups(tmp_path: Path, devices: int) -> None:
    """Its block is the last of a request."""
    lanes, peers = state_lanes(devices), PeerKV(str(tmp_path))
    for (engine, device), own in lanes.items():
        peers.share(engine, device, b"", own)
    for source, target in product(GROUPS, GROUPS):
        check_pull_of_state(lanes, peers, source, target, devices)


class Clock:
    """Time of one worker: each copy takes what was said, and what is between them a second."""

    def __init__(self, seconds: list[float]) -> None:
        self._seconds = iter(seconds)
        self._under_way = False
        self.now = 0.0

    def __call__(self) -> float:
        """Look at it: before a copy, then after it."""
        self.now += next(self._seconds) if self._under_way else 1.0
        self._under_way = not self._under_way
        return self.now


@pytest.mark.parametrize("devices", [1, 2])
@pytest.mark.parametrize(("blocks", "counts"), [(300, [64, 1024]), (17, [64]), (5, [16]), (2, [4])])
def test_pulls_are_measured(tmp_path: Path, devices: int, blocks: int, counts: list[int]) -> None:
    """Into each lane, all workers at once, the fastest of three of each number of tokens; block 0
    is not written.
    """
    workers = Workers(str(tmp_path), Model(2, devices, layers=1, head_size=1), blocks)
    before = {worker: memory.values.copy() for worker, memory in workers.memories.items()}

    def measured(worker: Any) -> list[MigrationRow]:
        slower = 0.01 * worker.engine
        times = [[0.3, 0.1 + slower, 0.2], [0.5 + slower, 0.6, 0.7]][: len(counts)]
        return measure(
            worker, Clock([seconds for _ in SIZES for each in times for seconds in each])
        )

    found = workers.on_all(measured)
    for (engine, _), rows in zip(workers.ids, found, strict=True):
        best_s = [0.1 + 0.01 * engine, 0.5 + 0.01 * engine]
        expected = [(size, best_s[n], count) for size in SIZES for n, count in enumerate(counts)]
        assert [astuple(row) for row in rows] == [pytest.approx(row) for row in expected]
    assert workers.barriers == 2 * REPETITIONS * len(SIZES) * len(counts)
    for worker, memory in workers.memories.items():
        np.testing.assert_array_equal(memory.values[: memory.page], before[worker][: memory.page])
        # the first two may get back what was theirs
        assert worker[0] < 2 or (memory.values != before[worker]).any()


def test_migration_without_a_readable_source_is_not_measured(tmp_path: Path) -> None:
    """Where there is no other engine, or the backend's blocks cannot be read."""
    worker = Workers(str(tmp_path), Model(2), 5).workers[0, 0]
    worker.engines = 1
    assert measure(worker) == []
    worker.engines = ENGINES
    worker.kv_views = {}
    assert measure(worker) == []
