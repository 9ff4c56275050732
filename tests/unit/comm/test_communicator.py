"""Communicators in shared memory, by name: staged ones give the bits of direct ones."""

from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from tempfile import TemporaryDirectory
from typing import Any, get_args

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from flying_serving.comm.communicator import COMMUNICATORS, GroupCommunicator, HostStage
from flying_serving.comm.shm import ShmGroup
from flying_serving.config import ONE_WORLD, Collectives
from flying_serving.errors import EngineLost

CPU = torch.device("cpu")
WORLD = 3
CALLS: dict[str, Callable[[GroupCommunicator, torch.Tensor], Any]] = {
    "all_reduce": lambda communicator, x: communicator.all_reduce(x),
    "all_gather": lambda communicator, x: communicator.all_gather(x, 0),
    "all_gather of the last dimension": lambda communicator, x: communicator.all_gather(x),
    "gather": lambda communicator, x: communicator.gather(x, 1),
    "broadcast": lambda communicator, x: communicator.broadcast(x, 2),
    "all_to_all": lambda communicator, x: communicator.all_to_all(x[:WORLD]),
}


@contextmanager
def ranks_of(name: str) -> Iterator[list[GroupCommunicator]]:
    """Yield the communicators of a group's ranks."""
    with TemporaryDirectory(dir="/dev/shm") as directory, ExitStack() as stack:
        communicators = [COMMUNICATORS[name](f"group of {name}", CPU) for _ in range(WORLD)]
        for rank, communicator in enumerate(communicators):
            group = ShmGroup(f"{directory}/group", rank, WORLD)
            stack.callback(group.close)
            communicator.use(group)
        yield communicators


def results(
    name: str, call: Callable[[GroupCommunicator, torch.Tensor], Any], xs: Any
) -> list[Any]:
    """Return the ranks' results for their tensors, each followed by the tensor as it is then."""
    with ranks_of(name) as communicators, ThreadPoolExecutor(WORLD) as threads:
        tensors = [x.clone() for x in xs]
        return [*threads.map(call, communicators, tensors), *tensors]


def same_bits(left: torch.Tensor | None, right: torch.Tensor | None) -> bool:
    if left is None or right is None:
        return left is right
    return left.dtype == right.dtype and left.shape == right.shape and torch.equal(left, right)


def test_every_setting_without_one_torch_world_has_a_communicator() -> None:
    assert COMMUNICATORS.keys() == set(get_args(Collectives)) - ONE_WORLD


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.int64])
@pytest.mark.parametrize("call", CALLS.values(), ids=CALLS)
def test_staged_collective_gives_the_bits_of_the_direct_one(
    call: Callable[[GroupCommunicator, torch.Tensor], Any], dtype: torch.dtype
) -> None:
    generator = torch.Generator().manual_seed(0)
    xs = [(100 * torch.randn(5, 7, generator=generator)).to(dtype) for _ in range(WORLD)]
    direct, staged = results("shm", call, xs), results("staged", call, xs)
    assert all(map(same_bits, direct, staged))


def test_staged_sum_is_in_the_tensor_that_was_given() -> None:
    """Also one whose elements are apart in memory."""
    with ranks_of("staged") as communicators, ThreadPoolExecutor(WORLD) as threads:
        wholes = [torch.full((4, 6), float(rank)) for rank in range(WORLD)]
        parts = [whole[:, ::2] for whole in wholes]
        summed = list(threads.map(lambda rank, x: rank.all_reduce(x), communicators, parts))
    assert all(result is part for result, part in zip(summed, parts, strict=True))
    assert all(part.eq(3.0).all() for part in parts)
    assert all(whole[:, 1::2].eq(rank).all() for rank, whole in enumerate(wholes))


def test_staged_result_outlives_the_next_collective() -> None:
    with ranks_of("staged") as communicators, ThreadPoolExecutor(WORLD) as threads:
        first = list(threads.map(lambda rank: rank.all_gather(torch.ones(2)), communicators))
        list(threads.map(lambda rank: rank.all_gather(torch.zeros(2)), communicators))
    assert all(gathered.eq(1.0).all() for gathered in first)


@pytest.mark.parametrize("name", sorted(COMMUNICATORS))
@pytest.mark.parametrize("call", CALLS.values(), ids=CALLS)
def test_collective_of_a_group_without_memory_raises(
    call: Callable[[GroupCommunicator, torch.Tensor], Any], name: str
) -> None:
    communicator = COMMUNICATORS[name]("group of two", CPU)
    with pytest.raises(EngineLost, match="group of two is not whole"):
        call(communicator, torch.ones(2, 2))


@pytest.mark.parametrize("name", sorted(COMMUNICATORS))
def test_aborted_group_raises_until_it_has_other_memory(name: str) -> None:
    with ranks_of(name) as communicators, ThreadPoolExecutor(WORLD) as threads:
        communicators[0].use(None)
        with pytest.raises(EngineLost, match="not whole"):
            communicators[0].all_reduce(torch.ones(1))
        with TemporaryDirectory(dir="/dev/shm") as directory, ExitStack() as stack:
            for rank, communicator in enumerate(communicators):
                group = ShmGroup(f"{directory}/again", rank, WORLD)
                stack.callback(group.close)
                communicator.use(group)
            summed = threads.map(lambda rank: rank.all_reduce(torch.ones(1)), communicators)
            assert [x.item() for x in summed] == [WORLD] * WORLD


def test_tensors_of_a_device_need_staging() -> None:
    with pytest.raises(ValueError, match="takes no tensors of cuda:0"):
        COMMUNICATORS["shm"]("group", torch.device("cuda", 0))


@given(
    shapes=st.lists(st.lists(st.integers(0, 9), max_size=3), min_size=1, max_size=4),
    dtype=st.sampled_from([torch.float32, torch.bfloat16, torch.int64, torch.bool]),
)
def test_stage_copies_any_shape_after_any_other(
    shapes: list[list[int]], dtype: torch.dtype
) -> None:
    stage = HostStage(CPU)
    for shape in shapes:
        x = torch.randint(0, 2, shape).to(dtype)
        out = stage.copy_out(x)
        assert same_bits(out, x)
        assert x.numel() == 0 or out.data_ptr() != x.data_ptr()


def test_stage_made_in_inference_mode_works_outside_of_it() -> None:
    """Lanes are compared in inference mode, and communicators are warmed outside of it."""
    stage = HostStage(CPU)
    with torch.inference_mode():
        stage.copy_out(torch.ones(4))
    assert stage.copy_out(torch.zeros(2)).eq(0.0).all()
