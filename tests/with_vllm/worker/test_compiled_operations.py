"""Beside a compiled lane 1, lanes of groups run vLLM's kernels of IR operations, as if eager.

The choice is CUDA's, by vLLM's own function. The kernel is a stand-in that counts its calls.
"""

import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from vllm import ir
from vllm.config import CompilationMode, VllmConfig
from vllm.ir import op
from vllm.ir.op import IrOp
from vllm.platforms import current_platform

from flying_serving.vllm_adapter.model_runner.configuration import lane_config
from flying_serving.vllm_adapter.model_runner.device_lane import DeviceLane
from flying_serving.vllm_adapter.weights.trees import first_of, world_of_one
from tests.with_vllm.worker.captured import CapturingV1, Groups, graph_configuration

pytestmark = pytest.mark.usefixtures("graph_pool", "scratch")
NORM = ir.ops.rms_norm


@pytest.fixture
def on_cuda(monkeypatch: pytest.MonkeyPatch) -> None:
    """vLLM chooses implementations as on CUDA, where its kernel of the norm is supported."""
    monkeypatch.setitem(sys.modules, "vllm._C_stable_libtorch", ModuleType("of CUDA's wheel"))
    from vllm.platforms.cuda import CudaPlatformBase

    choose = CudaPlatformBase.get_default_ir_op_priority
    monkeypatch.setattr(type(current_platform), "get_default_ir_op_priority", choose)
    current_platform.import_ir_kernels()
    for name in ("rms_norm", "fused_add_rms_norm"):
        monkeypatch.setattr(IrOp.registry[name].impls["vllm_c"], "supported", True)


@pytest.fixture
def kernel_calls(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The norms that vLLM's kernel has computed."""
    calls: list[str] = []

    def kernel(x: torch.Tensor, weight: Any, epsilon: float, size: Any = None) -> torch.Tensor:
        calls.append("norm")
        result: torch.Tensor = NORM.impls["native"].impl_fn(x, weight, epsilon)
        return result

    monkeypatch.setattr(NORM.impls["vllm_c"], "impl_fn", kernel)
    return calls


@pytest.fixture
def config(on_cuda: None, tmp_path: Path) -> VllmConfig:
    """Lane 1's: compiled, with graphs of decode steps."""
    config = graph_configuration(tmp_path)
    compilation = config.compilation_config
    config.model_config.enforce_eager = False
    compilation.mode = CompilationMode.VLLM_COMPILE
    compilation.backend = "inductor"
    set_priorities(config)
    return config


def set_priorities(config: VllmConfig, **of_user: list[str]) -> None:
    """Set what vLLM sets for a configuration: a user's choice, then the platform's."""
    config.kernel_config.ir_op_priority = type(config.kernel_config.ir_op_priority)(**of_user)
    config.kernel_config.set_platform_defaults(config)


@pytest.fixture
def lane1_in_process(config: VllmConfig) -> Iterator[None]:
    """vLLM's worker sets lane 1's choice for the whole process."""
    before = {name: known._priority_impls for name, known in IrOp.registry.items()}
    config.kernel_config.ir_op_priority.set_default()
    with ir.enable_torch_wrap(True):
        yield
    for name, priorities in before.items():
        IrOp.registry[name]._priority_impls = priorities


class Norms(CapturingV1):
    """A runner whose steps, made-up steps and captures compute one norm each, as a layer does."""

    device = torch.device("cpu")
    inputs_embeds = None

    def execute_model(self, plan: Any) -> Any:
        norm()
        return plan

    def _dummy_run(self, tokens: int) -> None:
        norm()

    def capture_model(self) -> int:
        norm()
        return super().capture_model()


def norm() -> None:
    NORM(torch.ones(2, 8), torch.ones(8), 1e-5)


def lanes(config: VllmConfig) -> tuple[DeviceLane, DeviceLane]:
    """Lane 1, and that of a group of two, which is built over lane 1's."""
    groups: Any = Groups()
    with world_of_one(config), first_of(2):
        lane1 = DeviceLane(Norms(config), config, (0,), groups)
        return lane1, DeviceLane.build(lane_config(config, 2, 32), (0, 1), lane1)


def run(lane: DeviceLane) -> None:
    """A step, the made-up one of the start, and a capture."""
    lane.launch("step")
    lane.warm()
    lane.capture()


@pytest.mark.usefixtures("lane1_in_process")
def test_group_takes_vllms_kernel_beside_a_compiled_lane_1(
    config: VllmConfig, kernel_calls: list[str]
) -> None:
    lane1, group = lanes(config)
    run(lane1)
    assert kernel_calls == [], "compiled code has torch's own"
    run(group)
    assert len(kernel_calls) == 3
    run(lane1)
    assert len(kernel_calls) == 3


@pytest.mark.usefixtures("lane1_in_process")
def test_operations_of_a_group_are_called_without_torchs_layer(config: VllmConfig) -> None:
    found = []
    lane1, group = lanes(config)
    for lane in (lane1, group):

        def execute(plan: Any) -> Any:
            found.append(op._ENABLE_TORCH_WRAP)
            return plan

        lane.vllm_runner.execute_model = execute
        lane.launch("step")
    assert found == [True, False]


@pytest.mark.usefixtures("lane1_in_process")
def test_lane_1_is_compared_with_vllms_kernel(config: VllmConfig, kernel_calls: list[str]) -> None:
    """Lanes and compiled steps are compared with the same eager code."""
    lane1, _ = lanes(config)
    with lane1.uncompiled():
        lane1.launch("step")
    assert kernel_calls == ["norm"]


@pytest.mark.usefixtures("lane1_in_process")
def test_choice_of_a_user_holds_in_groups_too(config: VllmConfig, kernel_calls: list[str]) -> None:
    set_priorities(config, rms_norm=["aiter"])  # not supported here, so the next one is taken
    of_lane = lane_config(config, 2, 32).kernel_config.ir_op_priority
    assert of_lane.rms_norm == ["aiter", "native"]
    assert of_lane.fused_add_rms_norm == ["vllm_c", "native"]
    run(lanes(config)[1])
    assert kernel_calls == []


def test_eager_server_keeps_the_choice_of_the_process(
    config: VllmConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nothing is set in each step."""
    config.compilation_config.mode = CompilationMode.NONE
    set_priorities(config)
    lane1, group = lanes(config)
    refuse = pytest.fail
    monkeypatch.setattr(IrOp, "set_priority", lambda *_: refuse("priorities were set"))
    run(lane1)
    run(group)
    assert group.config.kernel_config.ir_op_priority.rms_norm == ["vllm_c", "native"]
