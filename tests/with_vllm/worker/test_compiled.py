"""Compiled steps of lane 1 are compared with its own code at every start."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from vllm.compilation.wrapper import TorchCompileWithNoGuardsWrapper
from vllm.config import CompilationMode, VllmConfig

from flying_serving.errors import LaneError
from flying_serving.vllm_adapter.model_runner.device_lane import DeviceLane
from flying_serving.worker.checks import LaneChecks
from flying_serving.worker.compiled import allowed, check_compiled, refusal
from flying_serving.worker.selfcheck import Difference
from tests.with_vllm.worker.captured import CapturingV1, Groups, graph_configuration

REQUESTS = 3


class CompiledPart(nn.Module, TorchCompileWithNoGuardsWrapper):
    """The part of a model that vLLM compiles. `spoil`: what its compiled code makes of the right
    outputs.
    """

    def __init__(self, spoil: Callable[[torch.Tensor], torch.Tensor]) -> None:
        nn.Module.__init__(self)
        self.do_not_compile = False
        self._spoil = spoil

    def __call__(self, x: torch.Tensor) -> torch.Tensor:  # type: ignore[override]
        return x if self.do_not_compile else self._spoil(x)


@pytest.fixture
def config(tmp_path: Path) -> VllmConfig:
    config = graph_configuration(tmp_path)
    config.compilation_config.mode = CompilationMode.DYNAMO_TRACE_ONCE
    return config


def compiled_lane(config: VllmConfig, spoil: Callable[[torch.Tensor], torch.Tensor]) -> DeviceLane:
    """Lane 1 over a small model whose logits come from a part that is compiled."""
    runner = CapturingV1(config)
    model = runner.model
    model.part = CompiledPart(spoil)
    whole: Any = model.compute_logits
    model.compute_logits = lambda x: whole(model.part(x))
    devices: Any = Groups()
    return DeviceLane(runner, config, (0,), devices)


def checked(lane1: DeviceLane) -> float:
    with torch.inference_mode():
        return check_compiled(lane1, REQUESTS)


def test_compiled_steps_that_equal_eager_ones_pass(config: VllmConfig) -> None:
    assert checked(compiled_lane(config, lambda x: x)) == 0.0


@pytest.mark.parametrize("request_number", range(REQUESTS))
def test_compiled_step_with_a_wrong_request_is_refused(
    config: VllmConfig, request_number: int
) -> None:
    def spoil(outputs: torch.Tensor) -> torch.Tensor:
        changed = outputs.clone()
        changed[request_number] *= 1.5
        return changed

    with pytest.raises(LaneError, match=r"the compiled model differs from the eager one by 0\.5"):
        checked(compiled_lane(config, spoil))


def test_compiled_step_without_numbers_is_refused(config: VllmConfig) -> None:
    lane1 = compiled_lane(config, lambda x: x * torch.nan)
    with pytest.raises(LaneError, match="differs from the eager one by inf"):
        checked(lane1)


@pytest.mark.parametrize(
    ("dtype", "share", "refused"),
    [
        (torch.float32, 0.005, False),
        (torch.float32, 0.06, True),
        (torch.bfloat16, 0.06, False),  # as of a correct tiny model
        (torch.bfloat16, 0.5, True),
    ],
)
def test_rounding_of_all_layers_is_allowed_and_no_more(
    dtype: torch.dtype, share: float, refused: bool
) -> None:
    differences = [Difference("logits", share)]
    assert (refusal(differences, allowed(dtype)) is not None) == refused


def test_device_refuses_when_another_one_does(config: VllmConfig) -> None:
    lane1 = compiled_lane(config, lambda x: x)
    devices: Any = lane1.communicators
    devices.others_refuse = True
    with pytest.raises(LaneError, match="another device of the engine refuses"):
        checked(lane1)


def test_model_is_compiled_again_after_the_check(config: VllmConfig) -> None:
    lane1 = compiled_lane(config, lambda x: x)
    checked(lane1)
    assert not lane1.model.part.do_not_compile  # type: ignore[union-attr]


@contextmanager
def started(config: VllmConfig, *, goes_on: bool) -> Iterator[tuple[DeviceLane, list[str]]]:
    """A start whose compiled code is wrong: lane 1 after the check, and what was logged."""
    config.model_config.enforce_eager = False
    lane1, said = compiled_lane(config, torch.zeros_like), list[str]()
    checks = LaneChecks([lane1], said.append, 0.0, eager_where_refused=goes_on)
    try:
        checks.compare_compiled(64)
        yield lane1, said
    finally:
        lane1._own_code.close()  # it holds for the process


def test_lane_1_runs_its_own_code_where_the_compiled_one_is_wrong(config: VllmConfig) -> None:
    with started(config, goes_on=True) as (lane1, said):
        assert lane1.model.part.do_not_compile  # type: ignore[union-attr]
        assert len(said) == 1
        assert said[0].startswith("lane 1: steps run the model's own code: the compiled model diff")
        assert checked(lane1) == 0.0


def test_start_ends_at_wrong_compiled_code_that_a_user_has_asked_for(config: VllmConfig) -> None:
    says = "^--enforce-eager=False: the compiled model differs .* Start with --enforce-eager$"
    with pytest.raises(LaneError, match=says), started(config, goes_on=False):
        pass
