"""From where ranks read heads: every pair of groups of eight engines."""

from itertools import product

import pytest

from flying_serving.layout.groups import Group, aligned_group
from flying_serving.migration.copy_plan import WorkerId, copies, rank_of

GROUPS: list[Group] = [
    aligned_group(engine, size) for size in (1, 2, 4, 8) for engine in range(0, 8, size)
]


def heads(group: Group, worker: WorkerId, devices: int, kv_heads: int) -> set[int]:
    """Heads that a device of a group has, by going through all of them."""
    degree, rank = devices * len(group), worker[1] * len(group) + group.index(worker[0])
    if kv_heads < degree:
        return {rank * kv_heads // degree}
    return {head for head in range(kv_heads) if head * degree // kv_heads == rank}


def fits(group: Group, devices: int, kv_heads: int) -> bool:
    """Whether a model can be cut so."""
    degree = devices * len(group)
    return kv_heads % degree == 0 or degree % kv_heads == 0


@pytest.mark.parametrize("devices", [1, 2])
@pytest.mark.parametrize("kv_heads", range(1, 9))
def test_each_head_is_read_once_from_the_nearest(devices: int, kv_heads: int) -> None:
    """The own memory first if it has it; then that of the nearest engine, and of it the nearest
    device.
    """
    able = [group for group in GROUPS if fits(group, devices, kv_heads)]
    for source, target in product(able, able):
        holders = {
            worker: heads(source, worker, devices, kv_heads)
            for worker in product(source, range(devices))
        }
        for reader in product(target, range(devices)):
            found = list(copies(source, target, reader, devices, kv_heads))
            read = [head for _, run in found for head in run]
            assert sorted(read) == sorted(heads(target, reader, devices, kv_heads))
            for worker, run in found:
                assert set(run) <= holders[worker]
                for head in run:
                    assert far(worker, reader) == min(
                        far(p, reader) for p, has in holders.items() if head in has
                    )
            assert len({worker for worker, _ in found}) == len(found)


def far(worker: WorkerId, reader: WorkerId) -> tuple[int, int]:
    """How far one is from the other: engines, then devices."""
    return abs(worker[0] - reader[0]), abs(worker[1] - reader[1])


@pytest.mark.parametrize("group", GROUPS, ids=str)
def test_ranks_are_ordered_by_device_then_engine(group: Group) -> None:
    """As the communicators have them."""
    workers = [(engine, device) for device, engine in product(range(2), group)]
    assert [rank_of(group, worker) for worker in workers] == list(range(2 * len(group)))


def test_rank_that_stays_reads_its_own_kv() -> None:
    """In the same group nobody asks another."""
    for group, devices in product(GROUPS, (1, 2)):
        for reader in product(group, range(devices)):
            assert {worker for worker, _ in copies(group, group, reader, devices, 16)} == {reader}
