"""Coordinators of lanes on CUDA: vLLM chooses its all-reduce by the group's name and the size."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from vllm.distributed.device_communicators import custom_all_reduce, pynccl
from vllm.distributed.device_communicators.cuda_communicator import CudaCommunicator
from vllm.distributed.device_communicators.custom_all_reduce import CustomAllreduce

from flying_serving.vllm_adapter.distributed.world import group_name

LIMIT_BYTES = 8192 * 1024
"""vLLM's own limit of its custom all-reduce."""
FLASHINFER = ("VLLM_ALLREDUCE_USE_FLASHINFER", "VLLM_ALLREDUCE_USE_FLASHINFER_PCIE_IPC")


class GroupOfTwo:
    """The part of a torch process group that vLLM's communicator reads."""

    def rank(self) -> int:
        return 0

    def size(self) -> int:
        return 2


class Kernel(CustomAllreduce):
    """vLLM's custom all-reduce with its own choice by size, on a machine without its kernels."""

    def __init__(self, **_: Any) -> None:
        self.disabled = self.batch_invariant = False
        self.world_size, self.fully_connected, self.max_size = 2, True, LIMIT_BYTES
        self._ptr = 0

    def custom_all_reduce(self, input: torch.Tensor) -> Any:
        return "custom"

    def close(self) -> None:
        """Free nothing."""


class Nccl:
    """The part of PyNcclCommunicator that is used."""

    disabled, world_size = False, 2

    def __init__(self, **_: Any) -> None:
        pass

    def all_reduce(self, x: torch.Tensor) -> Any:
        return "nccl"


@pytest.fixture
def communicator_of(monkeypatch: pytest.MonkeyPatch) -> Callable[[str], Any]:
    """Return vLLM's communicator of a group of two with a name."""
    monkeypatch.setattr(custom_all_reduce, "CustomAllreduce", Kernel)
    monkeypatch.setattr(pynccl, "PyNcclCommunicator", Nccl)
    for name in FLASHINFER:
        monkeypatch.setenv(name, "0")
    group: Any = GroupOfTwo()
    return lambda name: CudaCommunicator(
        group, torch.device("cpu"), group, name, global_ranks=[0, 1], global_world_size=2
    )


@pytest.mark.parametrize(
    ("nbytes", "expected"),
    [(16, "custom"), (8192, "custom"), (LIMIT_BYTES - 16, "custom"), (LIMIT_BYTES, "nccl")],
)
def test_lane_on_cuda_sums_short_tensors_by_the_custom_kernel(
    communicator_of: Callable[[str], Any], nbytes: int, expected: str
) -> None:
    communicator = communicator_of(f"{group_name('lane2', on_cpu=False)}:0")
    assert communicator.all_reduce(torch.ones(nbytes // 4)) == expected


@pytest.mark.parametrize("nbytes", [16, LIMIT_BYTES])
def test_group_of_another_name_sums_by_nccl(
    communicator_of: Callable[[str], Any], nbytes: int
) -> None:
    assert communicator_of("lane2:0").all_reduce(torch.ones(nbytes // 4)) == "nccl"


def test_lane_on_the_cpu_keeps_its_name() -> None:
    assert group_name("lane2", on_cpu=True) == "lane2"
