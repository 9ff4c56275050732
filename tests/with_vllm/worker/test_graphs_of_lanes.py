"""Which lanes of a worker capture CUDA graphs: all, or lane 1 alone where graphs cannot hold what
groups exchange.
"""

from pathlib import Path
from typing import Any

import pytest
import torch
from vllm.config import CUDAGraphMode, VllmConfig

from flying_serving.config import Collectives, Deployment, FlyingConfig
from flying_serving.errors import LaneError
from flying_serving.vllm_adapter.model_runner.configuration import lane_config
from flying_serving.vllm_adapter.model_runner.device_lane import DeviceLane
from flying_serving.vllm_adapter.model_runner.graphs import are_asked
from flying_serving.worker.graphs import LaneGraphs
from tests.with_vllm.worker.captured import CapturingV1, Groups, graph_configuration

pytestmark = pytest.mark.usefixtures("graph_pool", "scratch")
SIZES = (2, 4)
NO_GRAPHS = {"captured": [], "replayed": []}


class CapturingWorker:
    """The lanes of a worker whose groups exchange so. vLLM has captured lane 1. `goes_on`: a lane
    is eager whose graphs are refused.
    """

    def __init__(
        self, config: VllmConfig, collectives: Collectives, *, goes_on: bool = False
    ) -> None:
        deployment = Deployment(
            run_dir="",
            engines=4,
            devices=1,
            group_sizes=(1, *SIZES),
            collectives=collectives,
            survives=False,
            incarnations=(0,) * 4,
            flying=FlyingConfig(cuda_graphs=True),
        )
        self.said: list[str] = []
        groups: Any = Groups()
        self.runners = {1: CapturingV1(config)}
        lanes = [DeviceLane(self.runners[1], config, (0,), groups)]
        for size in deployment.wider_sizes:
            of_lane = lane_config(config, size, 32, captures=deployment.captures_groups)
            self.runners[size] = CapturingV1(of_lane, lambda x: x, lambda: groups.active)
            lanes.append(DeviceLane(self.runners[size], of_lane, tuple(range(size)), groups))
        self.graphs = LaneGraphs(lanes, self.said.append, eager_where_refused=goes_on)
        self.runners[1].is_captured = True

    def of_group(self, size: int) -> dict[str, list[int]]:
        runner = self.runners[size]
        return {"captured": runner.captured_under, "replayed": runner.replayed}


@pytest.fixture
def config(tmp_path: Path) -> VllmConfig:
    return graph_configuration(tmp_path)


@pytest.mark.parametrize("collectives", ["staged", "pynccl"])
def test_lane_1_alone_replays_where_graphs_cannot_hold_collectives(
    config: VllmConfig, collectives: Collectives
) -> None:
    worker = CapturingWorker(config, collectives)
    worker.graphs.capture(8)
    assert worker.runners[1].replayed == [1, 1, 3, 3, 8, 8]
    for size in SIZES:
        assert worker.of_group(size) == NO_GRAPHS
        assert worker.runners[size].mode_of(1) == CUDAGraphMode.NONE
    assert [line[:43] for line in worker.said] == ["group of 1: CUDA graphs equal eager steps w"]


def test_all_lanes_replay_with_nccl_in_one_world(config: VllmConfig) -> None:
    worker = CapturingWorker(config, "nccl")
    worker.graphs.capture(8)
    assert worker.runners[1].replayed == [1, 1, 3, 3, 8, 8]
    for size in SIZES:
        assert worker.of_group(size) == {"captured": [size], "replayed": [1, 1, 3, 3, 8, 8]}


def test_groups_without_graphs_take_no_memory_for_them(config: VllmConfig) -> None:
    assert CapturingWorker(config, "pynccl").graphs.bytes_of_groups(600) == 0
    assert CapturingWorker(config, "nccl").graphs.bytes_of_groups(600) > 0


@pytest.mark.parametrize("collectives", ["nccl", "staged"])
def test_every_group_makes_its_largest_step_before_lane_1_captures(
    config: VllmConfig, collectives: Collectives
) -> None:
    """Graphs hold the address of vLLM's scratch memory, whichever lanes have them."""
    worker = CapturingWorker(config, collectives)
    worker.graphs.prepare()
    most = config.scheduler_config.max_num_batched_tokens
    assert [worker.runners[size].warmed for size in SIZES] == [most, most]


def test_lane_1_of_an_engine_that_starts_again_is_checked_alone(config: VllmConfig) -> None:
    worker = CapturingWorker(config, "pynccl")
    worker.graphs.check_lane1(2)
    assert worker.runners[1].replayed == [1, 1, 2, 2]
    worker.runners[1]._spoil = torch.zeros_like
    with pytest.raises(LaneError, match="group size 1: a step of 1 decoding requests differs"):
        worker.graphs.check_lane1(2)


@pytest.mark.parametrize("wrong", [1, *SIZES])
def test_lane_with_a_wrong_graph_is_eager_and_the_others_replay(
    config: VllmConfig, wrong: int
) -> None:
    worker = CapturingWorker(config, "nccl", goes_on=True)
    worker.runners[wrong]._spoil = torch.zeros_like
    worker.graphs.capture(8)
    modes = {size: runner.mode_of(1) for size, runner in worker.runners.items()}
    assert modes.pop(wrong) == CUDAGraphMode.NONE
    assert set(modes.values()) == {CUDAGraphMode.FULL}
    (line,) = [line for line in worker.said if "differs" in line]
    assert line.startswith(f"group of {wrong}: steps have no CUDA graphs: ")
    assert line.endswith("of its logits (0.01 is allowed); please report this model")


def test_start_ends_at_a_wrong_graph_that_a_user_has_asked_for(config: VllmConfig) -> None:
    worker = CapturingWorker(config, "nccl")
    worker.runners[2]._spoil = torch.zeros_like
    says = r"^--cuda-graphs: group size 2: a step of 1 .* Start with --no-cuda-graphs$"
    with pytest.raises(LaneError, match=says):
        worker.graphs.capture(8)


def test_lane_1_is_eager_again_in_an_engine_that_starts_again(config: VllmConfig) -> None:
    worker = CapturingWorker(config, "pynccl", goes_on=True)
    worker.runners[1]._spoil = torch.zeros_like
    worker.graphs.check_lane1(2)
    assert worker.runners[1].mode_of(1) == CUDAGraphMode.NONE


def test_eager_engine_that_starts_again_has_no_graphs_to_check(config: VllmConfig) -> None:
    config.compilation_config.cudagraph_mode = CUDAGraphMode.NONE
    worker = CapturingWorker(config, "pynccl")
    worker.graphs.check_lane1(2)
    assert worker.runners[1].replayed == []
    assert worker.said == []


def test_lane_without_graphs_is_configured_as_vllms_own_mode(config: VllmConfig) -> None:
    lane = lane_config(config, 2, 32, captures=False).compilation_config
    assert lane.cudagraph_mode == CUDAGraphMode.NONE
    assert lane.cudagraph_capture_sizes == []
    assert lane.max_cudagraph_capture_size == 0
    assert are_asked(config), "lane 1 keeps its own"
