"""A worker on the CPU takes its place before vLLM's worker is made."""

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from flying_serving.config import Deployment, FlyingConfig
from flying_serving.errors import ConfigError
from flying_serving.placement.plan import Placement
from flying_serving.start_error import start_error
from flying_serving.worker.worker import take_place


@pytest.fixture(autouse=True)
def restored(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """The threads of this process are restored in the end."""
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    before = torch.get_num_threads()
    yield
    torch.set_num_threads(before)


def deployment(run_dir: Path, *placements: Placement) -> Deployment:
    """Two engines with two devices each."""
    return Deployment(
        run_dir=str(run_dir),
        engines=2,
        devices=2,
        group_sizes=(1, 2),
        placements=placements,
        flying=FlyingConfig(),
    )


def test_torch_has_as_many_threads_as_placed(tmp_path: Path) -> None:
    """torch is loaded by then: OpenMP does not read the variable any more."""
    count = torch.get_num_threads()
    placements = [Placement(cpus=(), threads=count + index, node=0) for index in range(4)]
    take_place(deployment(tmp_path, *placements), 1, 1)
    assert torch.get_num_threads() == count + 3


def test_threads_are_left_where_no_device_is_placed(tmp_path: Path) -> None:
    count = torch.get_num_threads()
    take_place(deployment(tmp_path), 1, 1)
    assert torch.get_num_threads() == count


def test_the_server_is_told_of_cores_that_are_gone(tmp_path: Path) -> None:
    gone = Placement(cpus=(4000,), threads=1, node=0)
    with pytest.raises(ConfigError, match=r"^cores 4000 cannot be used: Invalid argument$"):
        take_place(deployment(tmp_path, *([gone] * 4)), 1, 1)
    assert start_error(str(tmp_path)) == "cores 4000 cannot be used: Invalid argument"
