"""CUDA graphs of lanes: captured with the lane's group active, and compared with eager steps. Of
both model runners.
"""

from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from vllm.config import CompilationMode, CUDAGraphMode, VllmConfig
from vllm.v1.worker.workspace import current_workspace_manager, lock_workspace

from flying_serving.errors import LaneError
from flying_serving.vllm_adapter.model_runner.device_lane import DeviceLane
from flying_serving.vllm_adapter.model_runner.graphs import Captured
from flying_serving.vllm_adapter.weights.trees import world_of_one
from flying_serving.worker.graphs import check_graphs, refusal, summary
from flying_serving.worker.selfcheck import Difference
from tests.with_vllm.worker.captured import CapturingV1, graph_configuration, graph_lane

pytestmark = pytest.mark.usefixtures("graph_pool", "scratch")


@pytest.fixture(params=["V1", "V2"])
def config(
    request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> Iterator[VllmConfig]:
    config = graph_configuration(tmp_path)
    # afterwards: vLLM makes no configuration for V2 without a driver of Triton
    monkeypatch.setenv("VLLM_USE_V2_MODEL_RUNNER", str(int(request.param == "V2")))
    with world_of_one(config):  # V2 asks for its place in a pipeline
        yield config


def checked(lane: DeviceLane, most: int = 8) -> float:
    """Capture a lane's graphs. Returns their largest difference."""
    lane.capture()
    with torch.inference_mode():
        return check_graphs(lane, most)


def zeroed(outputs: torch.Tensor, request: int) -> torch.Tensor:
    """A graph that computes one request wrongly, if its step has so many."""
    changed = outputs.clone()
    changed[request:] = 0.0
    return changed


def test_graphs_that_equal_eager_steps_pass(config: VllmConfig) -> None:
    lane, runner = graph_lane(config, 2)
    assert checked(lane) == 0.0
    assert runner.replayed == [1, 1, 3, 3, 8, 8]


def test_eager_steps_of_the_check_replay_no_graph(config: VllmConfig) -> None:
    lane, runner = graph_lane(config, 2)
    lane.capture()
    with lane.graphs.unused():
        assert not lane.graphs.replays(1)
        assert runner.mode_of(1) == CUDAGraphMode.NONE
    assert lane.graphs.replays(1)
    assert runner.mode_of(1) == CUDAGraphMode.FULL


@pytest.mark.parametrize(("request_number", "step"), [(0, 1), (1, 3), (7, 8)])
def test_graph_with_a_wrong_request_is_refused(
    config: VllmConfig, request_number: int, step: int
) -> None:
    lane, _ = graph_lane(config, 2, partial(zeroed, request=request_number))
    expected = f"group size 2: a step of {step} decoding requests differs from an eager one"
    with pytest.raises(LaneError, match=expected):
        checked(lane)


def test_graph_without_numbers_is_refused(config: VllmConfig) -> None:
    lane, _ = graph_lane(config, 2, lambda outputs: outputs * torch.nan)
    with pytest.raises(LaneError, match="differs from an eager one by inf"):
        checked(lane)


@pytest.mark.parametrize(
    ("dtype", "share", "refused"),
    [
        (torch.float32, 0.005, False),
        (torch.float32, 0.06, True),
        (torch.bfloat16, 0.06, False),  # as a padded step may round, through all layers
        (torch.bfloat16, 0.5, True),
    ],
)
def test_rounding_of_all_layers_is_allowed_and_no_more(
    config: VllmConfig, dtype: torch.dtype, share: float, refused: bool
) -> None:
    config.model_config.dtype = dtype
    lane, _ = graph_lane(config, 2)
    reason = refusal(lane, {3: [Difference("logits", share)]})
    assert (reason is not None) == refused
    assert not refused or f"by {share:.2g} of its logits" in str(reason)


def test_member_refuses_when_another_one_does(config: VllmConfig) -> None:
    lane, _ = graph_lane(config, 2)
    groups: Any = lane.communicators
    groups.others_refuse = True
    with pytest.raises(LaneError, match="another member of the group refuses its CUDA graphs"):
        checked(lane)


def test_lane_without_any_graph_is_refused(config: VllmConfig) -> None:
    config.compilation_config.cudagraph_mode = CUDAGraphMode.NONE  # vLLM's, if a backend has none
    lane, _ = graph_lane(config, 4)
    with pytest.raises(LaneError, match="no decode step of group size 4 has a CUDA graph"):
        checked(lane)


def test_fewer_requests_than_a_padded_step_are_checked(config: VllmConfig) -> None:
    lane, runner = graph_lane(config, 2)
    checked(lane, most=2)
    assert runner.replayed == [1, 1, 2, 2]


def test_capture_runs_with_the_group_of_the_lane_active(config: VllmConfig) -> None:
    lane, runner = graph_lane(config, 4)
    lane.capture()
    assert runner.captured_under == [4]


def test_capture_reports_sizes_and_memory(config: VllmConfig) -> None:
    captured = graph_lane(config, 2)[0].capture()
    assert captured.requests == (1, 2, 4, 8, 16, 24)
    assert captured.bytes == 3 << 20


def test_graphs_of_a_compiled_lanes_other_steps_are_not_those_of_decodes(
    config: VllmConfig,
) -> None:
    """vLLM's default for lane 1: graphs of all steps, of which the largest has prompts."""
    compilation = config.compilation_config
    compilation.mode = CompilationMode.VLLM_COMPILE
    compilation.cudagraph_mode = CUDAGraphMode.FULL_AND_PIECEWISE
    compilation.splitting_ops = list(compilation._attention_ops)
    config.scheduler_config.max_num_seqs = 24
    compilation.cudagraph_capture_sizes = [1, 2, 4, 8, 16, 24, 32]
    compilation.max_cudagraph_capture_size = 32
    lane, runner = graph_lane(config, 1)
    assert lane.graphs.requests == (1, 2, 4, 8, 16, 24)
    assert checked(lane) == 0.0
    assert runner.replayed == [1, 1, 3, 3, 8, 8]


def let_scratch_have(size_bytes: int) -> None:
    """As vLLM does when a kernel asks for more scratch memory than there is."""
    manager = current_workspace_manager()
    assert not manager.is_locked()
    manager._current_workspaces[0] = torch.empty(size_bytes, dtype=torch.uint8)


def test_capture_in_which_scratch_memory_grows_is_refused(config: VllmConfig) -> None:
    """Lane 1's graphs hold its address."""
    let_scratch_have(64)
    lock_workspace()
    lane, runner = graph_lane(config, 2)
    runner.while_capturing = partial(let_scratch_have, 128)
    with pytest.raises(LaneError, match="scratch memory grew while a group captured its graphs"):
        lane.capture()


def test_scratch_memory_is_locked_after_a_capture(config: VllmConfig) -> None:
    """It may begin in a capture, as a kernel of this lane alone may need it."""
    lock_workspace()
    lane, runner = graph_lane(config, 2)
    runner.while_capturing = partial(let_scratch_have, 128)
    lane.capture()
    assert current_workspace_manager().is_locked()


def test_made_up_step_has_as_many_tokens_as_a_step_may(config: VllmConfig) -> None:
    lane, runner = graph_lane(config, 2)
    lane.warm(1 << 20)
    assert runner.warmed == config.scheduler_config.max_num_batched_tokens


def test_summary_names_sizes_memory_and_time() -> None:
    captured = Captured((1, 2, 24), 3 << 20, 1.26)
    says = "group of 2: 3 CUDA graphs of 1 to 24 requests, 3 MiB, 1.3 s"
    assert summary(2, captured) == says


def test_model_of_a_lane_is_the_same_after_a_capture(config: VllmConfig) -> None:
    lane, runner = graph_lane(config, 2)
    before = lane.model
    lane.capture()
    assert lane.model is before
    is_wrapped = runner.model is not before
    assert is_wrapped == isinstance(runner, CapturingV1), "V1's graphs are in a wrapper of vLLM"
