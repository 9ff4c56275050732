"""ShmGroup: the file of a group, who has a place in it, and who closes it."""

import os
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch

from flying_serving.comm.shm import ShmGroup
from flying_serving.errors import EngineLost


def test_a_place_is_taken_once(path: str) -> None:
    """Also after it was left: what a file holds cannot be begun again."""
    group = ShmGroup(path, 0, 2, names=["a", "b"])
    with pytest.raises(ValueError, match="attached to as a before"):
        ShmGroup(path, 0, 2, names=["a", "b"])
    group.close()
    with pytest.raises(ValueError, match="before"):
        ShmGroup(path, 0, 2)
    with pytest.raises(ValueError, match="not for 3 ranks"):
        ShmGroup(path, 0, 3)


def test_a_rank_that_is_not_needed_may_leave(path: str) -> None:
    """A broadcast goes on without a third rank that took part in the operation before."""
    groups = [ShmGroup(path, rank, 3) for rank in range(3)]
    for rank in (2, 1, 0):
        groups[rank].gather(torch.tensor([rank]), 0)
    groups[2].close()
    with ThreadPoolExecutor(1) as pool:
        got = pool.submit(groups[1].broadcast, torch.tensor([0]), 0)
        time.sleep(0.1)
        groups[0].broadcast(torch.tensor([7]), 0)
        assert got.result().item() == 7
    for group in groups:
        group.close()


@pytest.mark.parametrize(
    "options",
    [
        {"rank": 2},
        {"rank": -1},
        {"world": 512},
        {"slot_bytes": 100},
        {"slot_bytes": 0},
        {"slot_bytes": 128, "world": 200},
        {"names": ["a"]},
    ],
)
def test_settings_are_checked_before_a_file_is_made(path: str, options: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match=next(iter(options))):
        ShmGroup(path, **{"rank": 0, "world": 2, **options})
    assert not Path(path).exists()


def test_close(path: str) -> None:
    """It can be repeated; nothing is left open; a closed group refuses; a rank may leave what it
    has published.
    """
    before = len(os.listdir("/proc/self/fd"))
    groups = [ShmGroup(path, rank, 2) for rank in range(2)]
    groups[0].broadcast(torch.tensor([7]), 0)
    for _ in range(2):
        groups[0].close()
    assert groups[1].broadcast(torch.tensor([0]), 0).item() == 7
    with pytest.raises(EngineLost, match="exited or closed: rank 0"):
        groups[1].barrier()
    groups[1].close()
    with pytest.raises(ValueError, match="closed"):
        groups[1].barrier()
    assert len(os.listdir("/proc/self/fd")) == before
