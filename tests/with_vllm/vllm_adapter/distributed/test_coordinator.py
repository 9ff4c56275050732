"""LaneCoordinator: all of vLLM's GroupCoordinator, over shared memory or refused by name."""

from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from tempfile import TemporaryDirectory
from typing import Any

import pytest
import torch
from vllm.config import VllmConfig
from vllm.distributed import parallel_state
from vllm.distributed.parallel_state import GroupCoordinator

from flying_serving.comm.shm import ShmGroup
from flying_serving.config import Collectives
from flying_serving.errors import NoProcessGroup
from flying_serving.vllm_adapter.distributed.coordinator import (
    REFUSED,
    REFUSED_ATTRIBUTES,
    LaneCoordinator,
    exchange,
)
from flying_serving.vllm_adapter.patches.tensor_parallel import activate
from flying_serving.vllm_adapter.weights.trees import world_of_one

PARTITION = [[0, 1, 4, 5], [2, 3, 6, 7]]
SERVED = {
    "__init__",
    "all_reduce",
    "_all_reduce_out_place",
    "all_gather",
    "_all_gather_out_place",
    "gather",
    "broadcast",
    "destroy",
}
OF_RANKS = {"first_rank", "last_rank", "is_first_rank", "is_last_rank", "next_rank", "prev_rank"}
PRIVATE = {"_should_use_all_gather", "_reap_completed_isends"}
"""Of operations that are refused."""


@pytest.fixture
def group() -> Iterator[LaneCoordinator]:
    """Rank 6 of eight: the third of its four, alone in its shared memory."""
    with TemporaryDirectory(dir="/dev/shm") as directory:
        made = LaneCoordinator(6, PARTITION, "lane2", 1)
        shm = ShmGroup(f"{directory}/group", 2, 4)
        made.device_communicator.use(shm)
        yield made
        shm.close()


def test_every_operation_is_served_or_refused() -> None:
    """No method of vLLM's class is left to work on process groups that are not there."""
    methods = {
        name
        for name, value in vars(GroupCoordinator).items()
        if callable(value) or isinstance(value, property)
    }
    assert methods == SERVED | OF_RANKS | PRIVATE | set(REFUSED)


@pytest.mark.parametrize("name", REFUSED)
def test_operation_that_needs_a_process_group_is_refused_by_name(
    group: LaneCoordinator, name: str
) -> None:
    with pytest.raises(NoProcessGroup, match=rf"^{name} of lane2:\d+: .*--cpu-collectives gloo"):
        getattr(group, name)(torch.ones(4))


def test_coordinator_of_a_device_has_that_device() -> None:
    device = torch.device("cuda", 1)
    made = LaneCoordinator(0, [[0, 1]], "lane2", 1, device=device, collectives="staged")
    assert made.device == device
    with pytest.raises(NoProcessGroup, match="--cuda-collectives nccl"):
        made.barrier()


@pytest.mark.parametrize("name", REFUSED_ATTRIBUTES)
def test_there_is_no_process_group_to_take(group: LaneCoordinator, name: str) -> None:
    """Also for those who ask first: without an error they would take the default group, of fewer
    ranks.
    """
    with pytest.raises(NoProcessGroup, match=f"^{name} of lane2"):
        getattr(group, name, None)


@pytest.mark.parametrize(
    "use",
    [
        lambda absent: absent.size(),
        lambda absent: torch.distributed.all_reduce(torch.ones(4), group=absent),
        lambda absent: torch.distributed.get_world_size(absent),
        lambda absent: torch.distributed.get_rank(absent),
        lambda absent: torch.distributed.get_backend(absent),
    ],
    ids=["size", "sum", "ranks", "rank", "backend"],
)
def test_group_of_the_device_may_be_kept_and_not_used(
    group: LaneCoordinator, use: Callable[[Any], Any]
) -> None:
    """openPangu's layers keep it."""
    absent = group.device_group
    with (
        world_of_one(VllmConfig()),
        pytest.raises(NoProcessGroup, match=r"^device_group of lane2"),
    ):
        use(absent)


def test_coordinator_has_every_attribute_of_vllms(group: LaneCoordinator) -> None:
    with world_of_one(VllmConfig()):
        stock = parallel_state.init_model_parallel_group([[0]], 0, "gloo", group_name="stock")
        assert vars(stock).keys() - {*REFUSED_ATTRIBUTES, "device_group"} == vars(group).keys()
        assert stock.use_custom_op_call == group.use_custom_op_call
        assert bool(stock.use_cpu_custom_send_recv) == group.use_cpu_custom_send_recv
        assert stock.device == group.device
        stock.destroy()


def test_ranks_are_those_of_the_group(group: LaneCoordinator) -> None:
    assert group.rank == 6
    assert group.rank_in_group == 2
    assert group.world_size == 4
    assert group.local_rank == 1
    assert group.ranks == PARTITION[1]
    assert group.group_ranks == PARTITION
    assert group.first_rank == 2
    assert group.last_rank == 7
    assert group.next_rank == 7
    assert group.prev_rank == 3
    assert not group.is_first_rank
    assert not group.is_last_rank


def test_vllm_finds_the_coordinator_by_name_and_as_tensor_parallel_group(
    group: LaneCoordinator,
) -> None:
    assert parallel_state._groups[group.unique_name]() is group
    other = LaneCoordinator(6, PARTITION, "lane2", 1)
    assert other.unique_name != group.unique_name
    with activate(group):
        assert parallel_state.get_tp_group() is group
        assert parallel_state.get_tensor_model_parallel_rank() == 2
        assert parallel_state.get_tensor_model_parallel_world_size() == 4
        parallel_state.get_tp_group().destroy()


CALLS: dict[str, tuple[Callable[[Any, torch.Tensor], Any], list[list[int] | None]]] = {
    "all_reduce": (lambda group, x: group.all_reduce(x), [[3, 5], [3, 5]]),
    "all_reduce as a custom operator": (
        lambda group, x: torch.ops.vllm.all_reduce(x, group_name=group.unique_name),
        [[3, 5], [3, 5]],
    ),
    "all_gather": (lambda group, x: group.all_gather(x), [[1, 2, 2, 3], [1, 2, 2, 3]]),
    "gather": (lambda group, x: group.gather(x, 1), [None, [1, 2, 2, 3]]),
    "broadcast": (lambda group, x: group.broadcast(x, 1), [[2, 3], [2, 3]]),
    "all_to_all": (lambda group, x: group.all_to_all(x), [[1, 2], [2, 3]]),
    "exchange": (exchange, [[1, 2], [2, 3]]),
}


@pytest.mark.parametrize("collectives", ["shm", "staged"])
@pytest.mark.parametrize("name", CALLS)
def test_all_ranks_of_a_group_get_tensors(name: str, collectives: Collectives) -> None:
    """Two ranks in two threads; rank r brings [r + 1, r + 2]."""
    call, expected = CALLS[name]
    with TemporaryDirectory(dir="/dev/shm") as directory, ThreadPoolExecutor(2) as threads:
        ranks = [
            LaneCoordinator(rank, [[0, 1]], "lane2", 0, collectives=collectives)
            for rank in range(2)
        ]
        ends = [ShmGroup(f"{directory}/group", rank, 2) for rank in range(2)]
        for rank, end in zip(ranks, ends, strict=True):
            rank.device_communicator.use(end)
        got = threads.map(
            lambda rank: call(rank, torch.tensor([rank.rank + 1, rank.rank + 2])), ranks
        )
        assert [None if x is None else x.tolist() for x in got] == expected
        for end in ends:
            end.close()
