"""The kernel of routed experts that vLLM is told to take, where lanes would have slices of them."""

import logging
from types import SimpleNamespace
from typing import Any

import pytest

from flying_serving.config import FlyingConfig
from flying_serving.log import logger
from flying_serving.server.start import experts
from flying_serving.server.start.experts import choose_expert_kernel


def chosen(
    *,
    moe_backend: str = "auto",
    quantization: str | None = None,
    is_moe: bool = True,
    engines: int = 2,
    experts: int = 8,
    runner_type: str = "generate",
    **flying: Any,
) -> str:
    """The kernel after the choice."""
    kernels = SimpleNamespace(moe_backend=moe_backend)
    config = SimpleNamespace(
        kernel_config=kernels,
        model_config=SimpleNamespace(
            is_moe=is_moe,
            quantization=quantization,
            runner_type=runner_type,
            get_num_experts=lambda: experts,
        ),
        parallel_config=SimpleNamespace(data_parallel_size=engines),
    )
    choose_expert_kernel(config, FlyingConfig(**flying))
    return kernels.moe_backend


def on_cpu(monkeypatch: pytest.MonkeyPatch, answer: bool, *, has_fp8: bool = True) -> None:
    platform = SimpleNamespace(is_cpu=lambda: answer, supports_fp8=lambda: has_fp8)
    monkeypatch.setattr(experts, "current_platform", platform)


@pytest.mark.parametrize("quantization", [None, "fp8"])
def test_the_kernel_that_takes_slices_is_set_and_logged(
    quantization: str | None, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(logger, "propagate", True)
    monkeypatch.setattr(logging.getLogger("vllm"), "propagate", True)
    caplog.set_level(logging.INFO)
    on_cpu(monkeypatch, False)
    assert chosen(quantization=quantization) == "triton"
    assert "--moe-backend=triton: set, as lanes share slices of its experts" in caplog.text


@pytest.mark.parametrize(
    "settings",
    [
        {"moe_backend": "cutlass"},
        {"quantization": "gpt_oss_mxfp4"},
        {"quantization": "compressed-tensors"},
        {"is_moe": False},
        {"engines": 1},
        {"group_sizes": (1,)},
        {"lend_weights": True},
        {"policy": "static-dp"},
        {"policy": "split"},
        {"runner_type": "pooling"},
        {"experts": 993},
    ],
    ids=str,
)
def test_the_kernel_is_left_open_or_as_a_user_set_it(
    settings: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A user's own, one that other formats have, and where no lane has slices."""
    on_cpu(monkeypatch, False)
    assert chosen(**settings) == settings.get("moe_backend", "auto")


def test_a_cpu_has_its_own_kernel(monkeypatch: pytest.MonkeyPatch) -> None:
    on_cpu(monkeypatch, True)
    assert chosen() == "auto"


def test_a_gpu_without_fp8_keeps_the_kernel_that_vllm_takes(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """An A100, where the Triton kernel has no FP8: vLLM would end the start."""
    on_cpu(monkeypatch, False, has_fp8=False)
    assert chosen(quantization="fp8") == "auto"
    assert chosen() == "triton"


@pytest.mark.parametrize("variable", ["VLLM_USE_DEEP_GEMM", "VLLM_MOE_USE_DEEP_GEMM"])
def test_a_users_variable_for_another_kernel_is_kept(
    variable: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    on_cpu(monkeypatch, False)
    monkeypatch.setenv(variable, "1")
    assert chosen(quantization="fp8") == "auto"
