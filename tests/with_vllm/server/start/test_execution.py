"""Which of vLLM's ways to run steps lanes have: eager, compiled, and with CUDA graphs."""

import logging
import os
from types import SimpleNamespace
from typing import Any

import pytest
from vllm.config import CompilationMode, CUDAGraphMode

from flying_serving.config import Collectives, FlyingConfig
from flying_serving.errors import ConfigError, Unsupported
from flying_serving.log import logger
from flying_serving.server.start.execution import keep_no_compiled_code, settle_execution

EAGER, COMPILED = CompilationMode.NONE, CompilationMode.VLLM_COMPILE
DECODES, ALL_STEPS = CUDAGraphMode.FULL_DECODE_ONLY, CUDAGraphMode.FULL_AND_PIECEWISE
NO_GRAPHS = CUDAGraphMode.NONE
OTHERS = [
    (EAGER, ALL_STEPS),
    (EAGER, CUDAGraphMode.FULL),
    (COMPILED, CUDAGraphMode.PIECEWISE),
    (COMPILED, CUDAGraphMode.FULL),
]
"""Graphs of vLLM that no lane has."""


@pytest.fixture
def info(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> pytest.LogCaptureFixture:
    """What the server logs."""
    monkeypatch.setattr(logger, "propagate", True)
    monkeypatch.setattr(logging.getLogger("vllm"), "propagate", True)
    caplog.set_level(logging.INFO)
    return caplog


def execution(
    mode: CompilationMode, graphs: CUDAGraphMode, devices: int = 1, engines: int = 2
) -> Any:
    """The part of vLLM's configuration that says how steps run."""
    return SimpleNamespace(
        model_config=SimpleNamespace(enforce_eager=mode == EAGER and graphs == NO_GRAPHS),
        parallel_config=SimpleNamespace(tensor_parallel_size=devices, data_parallel_size=engines),
        compilation_config=SimpleNamespace(mode=mode, cudagraph_mode=graphs),
    )


@pytest.mark.parametrize(
    ("mode", "graphs", "asked"),
    [
        (EAGER, NO_GRAPHS, False),
        (EAGER, DECODES, True),
        (COMPILED, NO_GRAPHS, False),
        (COMPILED, DECODES, True),
        (COMPILED, ALL_STEPS, True),
        (CompilationMode.DYNAMO_TRACE_ONCE, NO_GRAPHS, False),
    ],
)
def test_ways_that_lanes_have_are_taken(
    mode: CompilationMode, graphs: CUDAGraphMode, asked: bool
) -> None:
    settle_execution(execution(mode, graphs), FlyingConfig(cuda_graphs=asked), "nccl")


@pytest.mark.parametrize(
    ("mode", "graphs"),
    [(EAGER, NO_GRAPHS), (EAGER, DECODES), (COMPILED, NO_GRAPHS), (COMPILED, ALL_STEPS)],
)
def test_graphs_are_as_vllm_has_them_if_a_user_does_not_say(
    mode: CompilationMode, graphs: CUDAGraphMode
) -> None:
    config = execution(mode, graphs)
    settle_execution(config, FlyingConfig(), "nccl")
    assert config.compilation_config.cudagraph_mode == graphs


@pytest.mark.parametrize(
    ("mode", "graphs", "asked", "says"),
    [
        (EAGER, NO_GRAPHS, True, "--cuda-graphs: the cudagraph_mode of --compilation-config must"),
        (EAGER, DECODES, False, "--no-cuda-graphs: not together with cudagraph_mode FULL_DECODE"),
        (COMPILED, ALL_STEPS, False, "--no-cuda-graphs: not together with .* FULL_AND_PIECEWISE"),
        (COMPILED, NO_GRAPHS, True, "--cuda-graphs: the cudagraph_mode of --compilation-config"),
    ],
)
def test_our_flag_and_graphs_of_vllm_go_together(
    mode: CompilationMode, graphs: CUDAGraphMode, asked: bool, says: str
) -> None:
    config = execution(mode, graphs)
    with pytest.raises(ConfigError, match=says):
        settle_execution(config, FlyingConfig(cuda_graphs=asked), "nccl")


@pytest.mark.parametrize(("mode", "graphs"), OTHERS)
def test_other_graphs_are_refused_to_who_asks(mode: CompilationMode, graphs: CUDAGraphMode) -> None:
    says = f"^--compilation-config: cudagraph_mode {graphs.name} cannot be served"
    with pytest.raises(Unsupported, match=says):
        settle_execution(execution(mode, graphs), FlyingConfig(cuda_graphs=True), "nccl")


@pytest.mark.parametrize(("mode", "graphs"), OTHERS)
def test_other_graphs_are_left_out_if_nobody_asks(
    mode: CompilationMode, graphs: CUDAGraphMode, info: pytest.LogCaptureFixture
) -> None:
    """vLLM has others for some models: for those that pool, graphs of parts."""
    config = execution(mode, graphs)
    settle_execution(config, FlyingConfig(), "nccl")
    assert config.compilation_config.cudagraph_mode == NO_GRAPHS
    assert config.compilation_config.cudagraph_capture_sizes == []
    assert f"lanes cannot replay those of cudagraph_mode {graphs.name}" in info.text


@pytest.mark.parametrize("collectives", ["shm", "gloo", "staged", "pynccl"])
def test_compiled_engine_of_several_devices_needs_nccl(collectives: Collectives) -> None:
    config = execution(COMPILED, NO_GRAPHS, devices=2)
    settle_execution(config, FlyingConfig(), "nccl")
    says = f"--tensor-parallel-size=2: needs --enforce-eager, .* the collectives {collectives}$"
    with pytest.raises(ConfigError, match=says):
        settle_execution(config, FlyingConfig(), collectives)


def test_compiled_code_is_kept_for_no_other_start(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("VLLM_DISABLE_COMPILE_CACHE", "0")
    keep_no_compiled_code(execution(COMPILED, NO_GRAPHS))
    assert os.environ["VLLM_DISABLE_COMPILE_CACHE"] == "0", "a user's own choice stays"

    monkeypatch.delenv("VLLM_DISABLE_COMPILE_CACHE")
    keep_no_compiled_code(execution(EAGER, NO_GRAPHS))
    assert "VLLM_DISABLE_COMPILE_CACHE" not in os.environ

    keep_no_compiled_code(execution(COMPILED, NO_GRAPHS))
    assert os.environ["VLLM_DISABLE_COMPILE_CACHE"] == "1"
    monkeypatch.delenv("VLLM_DISABLE_COMPILE_CACHE")


@pytest.mark.parametrize("asked", [True, None])
@pytest.mark.parametrize(
    ("collectives", "engines", "said"),
    [("staged", 2, True), ("pynccl", 4, True), ("nccl", 4, False), ("pynccl", 1, False)],
)
def test_start_says_where_groups_stay_eager_beside_graphs(
    collectives: Collectives,
    engines: int,
    said: bool,
    asked: bool | None,
    info: pytest.LogCaptureFixture,
) -> None:
    config = execution(EAGER, DECODES, engines=engines)
    settle_execution(config, FlyingConfig(cuda_graphs=asked), collectives)
    line = f"groups stay eager, as CUDA graphs cannot hold --cuda-collectives={collectives}"
    assert (line in info.text) == said


@pytest.mark.parametrize("collectives", ["staged", "pynccl"])
def test_graphs_of_engines_of_several_devices_need_nccl(collectives: Collectives) -> None:
    """There lane 1 exchanges too."""
    config = execution(EAGER, DECODES, devices=2)
    flying = FlyingConfig(cuda_graphs=True)
    settle_execution(config, flying, "nccl")
    says = f"^--cuda-graphs: with --tensor-parallel-size=2 needs .*=nccl, not {collectives}$"
    with pytest.raises(ConfigError, match=says):
        settle_execution(config, flying, collectives)
