"""Copies of all workers at once, each a thread: what they share and copy, and what is measured at start."""

from collections.abc import Callable, Iterator
from itertools import product
from types import SimpleNamespace
from typing import Any, TypeVar

import pytest
import torch
from msgspec.structs import astuple

from flying_serving.layout.groups import Group, aligned_group
from flying_serving.layout.shards import lane_block_tokens
from flying_serving.memory.kv_view import KVView, Run, heads_of
from flying_serving.migration.transfer import REPETITIONS, copy_kv, measure, share_offers
from flying_serving.wire import MigrationRow
from tests.migration.ranks import Communicators, Ranks

ENGINES, HEADS, LAYERS, TOKENS = 4, 4, 2, 4
ALL: Group = (0, 1, 2, 3)
T = TypeVar("T")


class Node:
    """Four engines, whose workers copy between small KV memories. A block of lane 1 has four tokens."""

    def __init__(self, devices: int = 1, blocks: int = 9) -> None:
        self.blocks = blocks
        self.groups = {
            aligned_group(e, size): Ranks(size * devices) for size in (2, 4) for e in range(0, ENGINES, size)
        }
        self.workers = list(product(range(ENGINES), range(devices)))
        self.caches: dict[tuple[int, int], dict[int, KVView]] = {}
        self.lanes: dict[tuple[int, int], Any] = {}
        for engine, device in self.workers:
            memory = torch.full((LAYERS, blocks, HEADS // devices * TOKENS * 2), -1.0)
            caches = self.caches[engine, device] = dict(self._lanes(memory, engine, device, devices))
            communicators = Communicators(self.groups, engine, device)
            self.lanes[engine, device] = SimpleNamespace(
                engine=engine, device=device, devices=devices, kv_heads=HEADS, kv_views=caches, blocks=blocks,
                communicators=communicators,
            )  # fmt: skip

    def _lanes(self, memory: torch.Tensor, engine: int, device: int, devices: int) -> Iterator[tuple[int, KVView]]:
        for size in (1, 2, 4):
            heads = heads_of(device * size + engine % size, devices * size, HEADS)
            tokens = lane_block_tokens(TOKENS, size, devices, HEADS)
            parts = [layer[:, : len(heads) * tokens * 2].view(self.blocks, len(heads), tokens, 2) for layer in memory]
            yield size, KVView(parts, heads, tokens)

    def on_all(self, engines: Group, work: Callable[[int, int], T]) -> list[T]:
        """What each worker of these engines returns."""
        workers = [worker for worker in self.workers if worker[0] in engines]
        return Ranks(len(workers)).run(lambda number: work(*workers[number]))

    def fill(self, group: Group, runs: Callable[[int], list[Run]]) -> None:
        """Write tokens into a group's lane, of each the number of layer, request, token and head."""
        for (engine, _), caches in self.caches.items():
            if engine in group:
                cache = caches[len(group)]
                for layer, at, value in self._values(cache, runs(engine)):
                    cache.parts[layer][at] = value

    def check(self, group: Group, runs: Callable[[int], list[Run]]) -> None:
        """These are in a group's lane, and nothing else is."""
        for (engine, _), caches in self.caches.items():
            cache = caches[len(group)]
            expected = [torch.full_like(part, -1.0) for part in cache.parts]
            if engine in group:
                for layer, at, value in self._values(cache, runs(engine)):
                    expected[layer][at] = value
            assert all(torch.equal(part, then) for part, then in zip(cache.parts, expected, strict=True))

    @staticmethod
    def _values(cache: KVView, runs: list[Run]) -> Iterator[tuple[int, tuple[int, int, int], float]]:
        for (number, (blocks, tokens)), layer in product(enumerate(runs), range(LAYERS)):
            for token, (n, head) in product(tokens, enumerate(cache.heads)):
                at = (blocks[token // cache.block_tokens], n, token % cache.block_tokens)
                yield layer, at, 1.0 + ((number * LAYERS + layer) * 64 + token) * HEADS + head


@pytest.mark.parametrize("devices", [1, 2])
@pytest.mark.parametrize(("group", "sender"), [((0, 1), 1), ((2, 3), 2), (ALL, 0), (ALL, 3)])
def test_all_engines_of_the_group_get_the_offer(devices: int, group: Group, sender: int) -> None:
    """What one of them says; the others need to know only how much it is."""
    node = Node(devices)

    def share(engine: int, device: int) -> list[int]:
        numbers = [5, 0, 1 << 40] if engine == sender else None
        return share_offers(node.lanes[engine, device], group, sender, numbers, 3)

    assert node.on_all(group, share) == [[5, 0, 1 << 40]] * len(group) * devices


def test_neighbours_share_at_the_same_time() -> None:
    """Each pair hears its own."""
    node = Node()

    def share(engine: int, device: int) -> list[int]:
        group = aligned_group(engine, 2)
        return share_offers(node.lanes[engine, device], group, group[0], None if engine % 2 else [engine], 1)

    assert node.on_all(ALL, share) == [[0], [0], [2], [2]]


@pytest.mark.parametrize("devices", [1, 2])
@pytest.mark.parametrize(
    ("group", "source", "target"),
    [
        ((0, 1), (0,), (0, 1)),
        ((2, 3), (2, 3), (3,)),
        ((2, 3), (2,), (3,)),
        (ALL, ALL, (1,)),
        (ALL, (3,), ALL),
        (ALL, (2, 3), (1,)),
        (ALL, (0, 1), (2, 3)),
    ],
)
def test_tokens_are_copied_from_one_group_to_another(devices: int, group: Group, source: Group, target: Group) -> None:
    """Every engine has its own blocks for them; those that are in neither group help and keep nothing."""
    node = Node(devices, blocks=40)
    ranges = [range(3, 11), range(6)]

    def old(engine: int) -> list[Run]:
        return [([engine + 1, engine + 6, engine + 11], ranges[0]), ([engine + 16, engine + 21], ranges[1])]

    def new(engine: int) -> list[Run]:
        return [([30 - engine, 25, 35 - engine], ranges[0]), ([39, 36], ranges[1])]

    node.fill(source, old)

    def copy(engine: int, device: int) -> None:
        taken, put = (old(engine) if engine in source else None), (new(engine) if engine in target else None)
        worker, count = node.lanes[engine, device], sum(map(len, ranges))
        copy_kv(worker, group, (source, taken), (target, put), count)

    node.on_all(group, copy)
    for engine in source:  # what was read is still there; it would be in the way of the comparison
        for device in range(devices):
            for part in node.caches[engine, device][1].parts:
                part[[block for blocks, _ in old(engine) for block in blocks]] = -1.0
    node.check(target, new)


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
@pytest.mark.parametrize(("blocks", "counts"), [(500, [64, 1024]), (200, [64, 796]), (17, [64]), (5, [16]), (2, [4])])
def test_copies_are_measured(devices: int, blocks: int, counts: list[int]) -> None:
    """In pairs and in all four, the fastest of three of each number of tokens, at most what blocks hold but block 0."""
    node = Node(devices, blocks)
    for (engine, _), caches in node.caches.items():
        for part in caches[1].parts:
            part.fill_(engine)

    def measured(engine: int, device: int) -> list[MigrationRow]:
        slower = 0.01 * engine
        times = [[0.3, 0.1 + slower, 0.2], [0.5 + slower, 0.6, 0.7]][: len(counts)]
        clock = Clock([seconds for _ in (2, 4) for each in times for seconds in each])
        return measure(node.lanes[engine, device], clock)

    found = node.on_all(ALL, measured)
    best_s = [0.1, 0.5]
    for (engine, device), rows in zip(node.workers, found, strict=True):
        expected = [(size, best_s[n] + 0.01 * engine, count) for size in (2, 4) for n, count in enumerate(counts)]
        assert [astuple(row) for row in rows] == [pytest.approx(row) for row in expected]
        for view in node.caches[engine, device].values():
            assert all((part[0] == engine).all() for part in view.parts)
    for group in ((0, 1), (2, 3), ALL):
        copied = [shape[1] for _, shape in node.groups[group].sent if len(shape) == 4]
        assert copied == [count for count in counts for _ in range(REPETITIONS * devices)]
