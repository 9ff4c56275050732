"""Handles of a peer's CUDA memory: the device on which each is opened. None of CUDA is run."""

import pickle
from typing import Any

import pytest
import torch
from torch.multiprocessing import reductions

from flying_serving.errors import PeerMemory
from flying_serving.memory.cuda_ipc import map_cuda, reads_directly, share_cuda

OWN, PEER = torch.device("cuda", 1), torch.device("cuda", 3)


@pytest.fixture
def handle(monkeypatch: pytest.MonkeyPatch) -> bytes:
    """A handle of a tensor on PEER, as torch makes one. To open it returns torch's arguments."""

    def rebuild_cuda_tensor(*args: Any) -> Any:
        return args

    rebuild_cuda_tensor.__module__ = reductions.__name__
    rebuild_cuda_tensor.__qualname__ = "rebuild_cuda_tensor"
    monkeypatch.setattr(reductions, "rebuild_cuda_tensor", rebuild_cuda_tensor)
    shape = (torch.Tensor, (8,), (1,), 0, torch.UntypedStorage, torch.int8)
    counted = (b"counter", 0, b"event", True)
    made = (*shape, PEER.index, b"handle", 8, 0, False, *counted)
    return pickle.dumps((rebuild_cuda_tensor, made))


def opened(handle: bytes, reader: torch.device | None) -> tuple[Any, Any]:
    """The device that opens the handle, and whether it waits for the event of the owner."""
    args: Any = map_cuda(handle, "mine", reader)
    return args[6], args[14]


@pytest.mark.parametrize(
    ("reader", "reachable", "expected"),
    [
        (OWN, True, (1, False)),
        (OWN, False, (3, True)),
        (PEER, False, (3, True)),  # several engines on one GPU
        (None, True, (3, True)),
    ],
)
def test_handle_is_opened_on_the_device_whose_kernels_read(
    handle: bytes,
    monkeypatch: pytest.MonkeyPatch,
    reader: torch.device | None,
    reachable: bool,
    expected: tuple[int, bool],
) -> None:
    monkeypatch.setattr(torch.cuda, "can_device_access_peer", lambda own, other: reachable)
    assert opened(handle, reader) == expected


def test_arguments_are_those_of_this_torch() -> None:
    names = reductions.rebuild_cuda_tensor.__code__.co_varnames
    assert (names[6], names[14]) == ("storage_device", "event_sync_required")


def test_device_reads_its_own_memory_without_asking() -> None:
    assert reads_directly(OWN, OWN)


@pytest.mark.parametrize("reader", [None, OWN])
def test_memory_of_the_host_is_mapped_as_it_is(reader: torch.device | None) -> None:
    memory = torch.arange(8, dtype=torch.int8)
    assert map_cuda(share_cuda(memory), "mine", reader).tolist() == memory.tolist()


def test_handle_that_cannot_be_opened_is_named(handle: bytes) -> None:
    def refuse(*_: Any) -> Any:
        raise RuntimeError("invalid device context")

    refuse.__module__, refuse.__qualname__ = reductions.__name__, "rebuild_cuda_tensor"
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(reductions, "rebuild_cuda_tensor", refuse)
        with pytest.raises(PeerMemory, match=r"^mine: .* cannot be opened \(invalid device"):
            map_cuda(handle, "mine", None)
