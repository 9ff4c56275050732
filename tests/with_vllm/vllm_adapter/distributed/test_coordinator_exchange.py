"""exchange: with vLLM's own coordinators, over gloo, between processes."""

from datetime import timedelta
from multiprocessing import get_context
from multiprocessing.connection import Connection
from pathlib import Path

import pytest
import torch
from vllm.config import VllmConfig, set_current_vllm_config
from vllm.distributed import parallel_state

from flying_serving.config import Deployment, FlyingConfig
from flying_serving.vllm_adapter.distributed.coordinator import LaneCoordinator, exchange
from flying_serving.vllm_adapter.distributed.world import TorchWorld
from flying_serving.vllm_adapter.weights.trees import world_of_one

CONTEXT = get_context("forkserver")  # as spawn, but one process imports vLLM for all
CONTEXT.set_forkserver_preload(["flying_serving.vllm_adapter.distributed.world"])
ANSWER_S = 60.0
"""Longest wait for a process: no test takes as long."""
ENGINES = 2
DTYPES = (torch.float32, torch.bfloat16, torch.int64, torch.bool, torch.float8_e4m3fn)


def brought(rank: int, dtype: torch.dtype) -> list[torch.Tensor]:
    """Return tensors of a rank: whole, with parts apart, with elements apart, and empty."""
    whole = (torch.arange(ENGINES * 5 * 6).reshape(ENGINES, 5, 6) % 7 + 8 * rank).to(dtype)
    return [whole, whole[:, :3], whole[..., 1::2], whole[:, :0], whole[:, 0, 0]]


def work(run_dir: str, engine: int, end: Connection) -> None:
    """Exchange all tensors with the coordinator of a server with gloo; send what is wrong."""
    torch.set_num_threads(1)
    deployment = Deployment(
        run_dir=run_dir,
        engines=ENGINES,
        devices=1,
        group_sizes=(1, ENGINES),
        collectives="gloo",
        flying=FlyingConfig(),
    )
    world = TorchWorld(deployment, engine, 0)
    path, size, rank = world.address()
    with set_current_vllm_config(VllmConfig()):
        parallel_state.init_distributed_environment(
            size, rank, f"file://{path}", 0, "gloo", timedelta(seconds=ANSWER_S)
        )
        coordinator = world.coordinator([list(range(ENGINES))], "lane2")
    assert not isinstance(coordinator, LaneCoordinator)
    wrong = []
    for dtype in DTYPES:
        for of_all in zip(*(brought(r, dtype) for r in range(ENGINES)), strict=True):
            got = exchange(coordinator, of_all[rank])
            expected = torch.stack([x[rank].float() for x in of_all])
            if got.dtype != dtype or not torch.equal(got.float(), expected):
                wrong.append((dtype, of_all[rank].shape, got.tolist()))
    end.send(wrong)
    coordinator.destroy()


def test_groups_of_gloo_exchange_tensors_of_any_dtype(tmp_path: Path) -> None:
    """In processes, each an engine."""
    started = []
    for engine in range(ENGINES):
        here, there = CONTEXT.Pipe()
        process = CONTEXT.Process(target=work, args=(str(tmp_path), engine, there), daemon=True)
        process.start()
        there.close()
        started.append((process, here))
    for process, here in started:
        assert here.poll(ANSWER_S), "a process hangs"
        assert here.recv() == []
        process.join(ANSWER_S)


def test_rank_that_is_alone_keeps_its_tensor() -> None:
    with world_of_one(VllmConfig()):
        group = parallel_state.get_tp_group()
        x = torch.ones(1, 3)
        assert exchange(group, x) is x
        with pytest.raises(ValueError, match=r"^all_to_all of \(2, 3\): .* each of 1 ranks$"):
            exchange(group, torch.ones(2, 3))
