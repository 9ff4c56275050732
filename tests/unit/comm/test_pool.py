"""CommunicatorPool: with whom a device exchanges in a group of each size."""

from typing import Any

from hypothesis import given
from hypothesis import strategies as st

from flying_serving.comm.pool import CommunicatorPool
from flying_serving.config import Deployment, FlyingConfig
from flying_serving.layout.groups import aligned_group, world_rank

SIZES = (1, 2, 4)
ENGINES = 4


class Coordinator:
    """The members of one group of a partition."""

    def __init__(self, ranks: list[int]) -> None:
        self.ranks = ranks


@given(st.integers(0, ENGINES - 1), st.sampled_from([1, 2, 4]), st.data())
def test_a_device_exchanges_tokens_with_the_same_one_of_other_engines(
    engine: int, devices: int, data: st.DataObject
) -> None:
    """In the order of the engines. The partitions that are made have each device once."""
    device = data.draw(st.integers(0, devices - 1))
    own = world_rank(engine, device, ENGINES)

    def make(partition: list[list[int]], _name: str) -> Any:
        ranks = sorted(rank for group in partition for rank in group)
        assert ranks == list(range(ENGINES * devices))
        return Coordinator(next(group for group in partition if own in group))

    pool = CommunicatorPool(
        engine,
        device,
        engines=ENGINES,
        devices=devices,
        sizes=SIZES,
        make=make,
        activate=lambda coordinator: coordinator,
    )
    for size in SIZES:
        group = aligned_group(engine, size)
        if size > 1:
            alike = [world_rank(member, device, ENGINES) for member in group]
            assert pool.same_device(size).ranks == alike
        every = [world_rank(member, d, ENGINES) for d in range(devices) for member in group]
        assert pool.coordinator(size).ranks == every
        assert len(pool.coordinators(size)) == (2 if size > 1 and devices > 1 else 1)


@given(st.integers(0, ENGINES - 1))
def test_the_incarnations_of_whole_groups_are_known_until_a_member_is_lost(engine: int) -> None:
    """Also in one torch world, where nothing is opened."""
    pool = CommunicatorPool(
        engine,
        0,
        engines=ENGINES,
        devices=1,
        sizes=SIZES,
        make=lambda partition, _: Coordinator(partition[0]),
        activate=lambda coordinator: coordinator,
    )
    flying = FlyingConfig(group_sizes=SIZES)
    made = Deployment(run_dir="", engines=ENGINES, devices=1, group_sizes=SIZES, flying=flying)
    pool.open(made.model_copy(update={"incarnations": (0, 3, 1, 2)}))
    pair = [[0, 3], [1, 2]][engine // 2]
    assert pool.members == {1: [[0], [3], [1], [2]][engine], 2: pair, 4: [0, 3, 1, 2]}
    pool.leave(4)
    assert pool.members.keys() == {1, 2}
    pool.reopen(4, [0, 3, 2, 2])
    assert pool.members[4] == [0, 3, 2, 2]
