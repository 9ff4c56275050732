"""Which decode steps lanes capture as CUDA graphs, and how much memory is counted for them."""

from pathlib import Path

import pytest
from vllm.config import CUDAGraphMode, VllmConfig

from flying_serving.vllm_adapter.model_runner.configuration import lane_config
from flying_serving.vllm_adapter.model_runner.graphs import (
    are_asked,
    bytes_of_groups,
    group_capture_sizes,
)
from tests.with_vllm.worker.captured import graph_configuration
from tests.with_vllm.worker.configurations import LLAMA, configuration


@pytest.fixture
def config(tmp_path: Path) -> VllmConfig:
    return graph_configuration(tmp_path)


@pytest.mark.parametrize(
    ("own", "of_group"),
    [
        ([1, 2, 4, 8, 16, 24, 32, 40], [1, 2, 4, 8, 16, 32, 40]),
        ([1], [1]),
        ([3, 5, 6], [6]),
        ([], []),
    ],
)
def test_group_captures_powers_of_two_and_the_largest_size(
    own: list[int], of_group: list[int]
) -> None:
    assert group_capture_sizes(own) == of_group


def test_lane_of_a_group_has_fewer_sizes_than_lane_1(config: VllmConfig) -> None:
    config.compilation_config.cudagraph_capture_sizes = [1, 2, 4, 8, 12, 16, 20, 24]
    lane = lane_config(config, 2, 32)
    assert lane.compilation_config.cudagraph_capture_sizes == [1, 2, 4, 8, 16, 24]
    assert config.compilation_config.cudagraph_capture_sizes == [1, 2, 4, 8, 12, 16, 20, 24]


def test_eager_configuration_asks_for_no_graphs(tmp_path: Path) -> None:
    assert not are_asked(configuration(tmp_path, LLAMA))


@pytest.mark.parametrize(
    ("mode", "asked"),
    [
        (CUDAGraphMode.FULL_DECODE_ONLY, True),
        (CUDAGraphMode.FULL_AND_PIECEWISE, True),
        (CUDAGraphMode.PIECEWISE, False),
        (CUDAGraphMode.FULL, False),
        (CUDAGraphMode.NONE, False),
    ],
)
def test_lanes_capture_their_decode_steps_where_vllm_captures_them_apart(
    config: VllmConfig, mode: CUDAGraphMode, asked: bool
) -> None:
    config.compilation_config.cudagraph_mode = mode
    assert are_asked(config) == asked


def test_memory_of_groups_is_their_share_of_lane_1_graphs(config: VllmConfig) -> None:
    config.compilation_config.cudagraph_capture_sizes = [1, 2, 3, 4, 5, 6, 7, 8]
    groups = [lane_config(config, size, 32) for size in (2, 4)]
    assert bytes_of_groups(800, config, groups) == 2 * 400


def test_outputs_that_the_second_runner_keeps_take_memory(
    config: VllmConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    config.compilation_config.cudagraph_capture_sizes = [1, 2, 3, 4, 5, 6, 7, 8]
    monkeypatch.setenv("VLLM_USE_V2_MODEL_RUNNER", "1")
    groups = [lane_config(config, size, 32) for size in (2, 4)]
    assert bytes_of_groups(800, config, groups) == 2 * (400 + 8 * LLAMA["hidden_size"] * 4)


def test_sizes_beyond_the_scheduler_take_no_memory(config: VllmConfig) -> None:
    config.scheduler_config.max_num_seqs = 4
    config.compilation_config.cudagraph_capture_sizes = [1, 2, 3, 4, 8, 16]
    assert bytes_of_groups(400, config, [lane_config(config, 2, 32)]) == 300


def test_eager_lanes_take_no_memory(tmp_path: Path) -> None:
    eager = configuration(tmp_path, LLAMA)
    assert bytes_of_groups(0, eager, [lane_config(eager, 2, 32)]) == 0
