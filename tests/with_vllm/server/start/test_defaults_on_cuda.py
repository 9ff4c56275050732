"""How lanes run on CUDA by the flags of `serve`: vLLM's own configuration, made for a platform that
says that it is CUDA.
"""

import json
import logging
import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
from vllm.config import CompilationMode, CUDAGraphMode, VllmConfig
from vllm.engine.arg_utils import AsyncEngineArgs
from vllm.platforms import current_platform
from vllm.platforms.interface import DeviceCapability

from flying_serving.cli.serve import _flying_settings, make_parser
from flying_serving.config import KEY, deployment_of, parse_flying
from flying_serving.errors import ConfigError
from flying_serving.log import logger
from flying_serving.server.start.defaults import choose_execution
from flying_serving.server.start.devices import collectives_of
from flying_serving.server.start.execution import settle_execution
from flying_serving.server.start.launch import prepare
from tests.with_vllm.worker.configurations import LLAMA

EAGER, COMPILED = CompilationMode.NONE, CompilationMode.VLLM_COMPILE
NO_GRAPHS, DECODES = CUDAGraphMode.NONE, CUDAGraphMode.FULL_DECODE_ONLY
ALL_STEPS = CUDAGraphMode.FULL_AND_PIECEWISE
Parsed = Callable[..., Any]


def _words(flags: Any) -> str | None:
    """The id of a case: its flags."""
    return " ".join(flags) or "none" if isinstance(flags, list) else None


@pytest.fixture
def on_cuda(monkeypatch: pytest.MonkeyPatch) -> None:
    """vLLM's platform is that of eight H100."""
    monkeypatch.setitem(sys.modules, "vllm._C_stable_libtorch", ModuleType("of CUDA's wheel"))
    from vllm.platforms.cuda import CudaPlatformBase

    class Hopper(CudaPlatformBase):
        """What vLLM asks of the devices."""

        @classmethod
        def get_device_capability(cls, device_id: int = 0) -> DeviceCapability:
            return DeviceCapability(9, 0)

        @classmethod
        def get_device_name(cls, device_id: int = 0) -> str:
            return "NVIDIA H100 80GB HBM3"

        @classmethod
        def get_device_total_memory(cls, device_id: int = 0) -> int:
            return 80 << 30

        @classmethod
        def device_count(cls) -> int:
            return 8

    monkeypatch.setattr(current_platform, "__class__", Hopper)


@pytest.fixture
def parsed(tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: Any) -> Parsed:
    """The flags of `serve MODEL`, with ours in `additional_config`."""
    monkeypatch.setattr(logger, "propagate", True)
    monkeypatch.setattr(logging.getLogger("vllm"), "propagate", True)
    caplog.set_level(logging.INFO)
    (tmp_path / "config.json").write_text(json.dumps(LLAMA))

    def parse(*flags: str) -> Any:
        args = make_parser("serve").parse_args([str(tmp_path), "--skip-tokenizer-init", *flags])
        args.model = args.model_tag
        args.additional_config = {KEY: _flying_settings(args)}
        choose_execution(args)
        return args

    return parse


def configured(args: Any) -> VllmConfig:
    """vLLM's configuration of a server with these flags, as a start leaves it."""
    config = AsyncEngineArgs.from_cli_args(args).create_engine_config()
    flying = parse_flying(args.additional_config[KEY])
    settle_execution(config, flying, collectives_of(flying, on_cpu=False))
    return config


@pytest.mark.usefixtures("on_cuda")
@pytest.mark.parametrize(
    ("flags", "mode", "graphs"),
    [
        ([], COMPILED, ALL_STEPS),
        (["--cuda-graphs"], COMPILED, ALL_STEPS),
        (["--no-enforce-eager", "--data-parallel-size=4"], COMPILED, ALL_STEPS),
        (["--no-cuda-graphs"], COMPILED, NO_GRAPHS),
        (["--enforce-eager"], EAGER, NO_GRAPHS),
        (["-cc.mode=0"], EAGER, DECODES),
        (["--cuda-graphs", "-cc.mode=0"], EAGER, DECODES),
        (["-cc.cudagraph_mode=FULL_DECODE_ONLY"], COMPILED, DECODES),
        (["--lend-weights"], EAGER, DECODES),
        (["--tensor-parallel-size=2"], COMPILED, ALL_STEPS),
        (["--tensor-parallel-size=2", "--cuda-collectives=pynccl"], EAGER, NO_GRAPHS),
        (["--data-parallel-size=2", "--cuda-collectives=pynccl"], COMPILED, ALL_STEPS),
    ],
    ids=_words,
)
def test_lanes_run_as_vllm_does_unless_flags_say_otherwise(
    parsed: Parsed, flags: list[str], mode: CompilationMode, graphs: CUDAGraphMode
) -> None:
    compilation = configured(parsed(*flags)).compilation_config
    assert (compilation.mode, compilation.cudagraph_mode) == (mode, graphs)
    assert bool(compilation.cudagraph_capture_sizes) == (graphs != NO_GRAPHS)


@pytest.mark.usefixtures("on_cuda")
@pytest.mark.parametrize(
    ("flags", "asked"),
    [
        ([], None),
        (["-cc.mode=3"], None),
        (["-cc.cudagraph_mode=FULL_DECODE_ONLY"], True),
        (["-cc.cudagraph_mode=NONE"], None),
        (["--no-cuda-graphs"], False),
    ],
    ids=_words,
)
def test_graphs_that_vllms_flag_names_are_asked_for(
    parsed: Parsed, flags: list[str], asked: bool | None
) -> None:
    assert parsed(*flags).additional_config[KEY]["cuda_graphs"] is asked


@pytest.mark.usefixtures("on_cuda")
@pytest.mark.parametrize(
    ("flags", "says"),
    [
        (["--lend-weights"], "-cc.mode=0: set, as compiled code does not see that a weight is"),
        (
            ["--tensor-parallel-size=2", "--cuda-collectives=staged"],
            "--enforce-eager: set, as neither compiled code nor CUDA graphs can hold "
            "--cuda-collectives=staged",
        ),
    ],
    ids=["lent weights", "several devices"],
)
def test_less_than_vllms_default_is_said_in_a_line(
    parsed: Parsed, flags: list[str], says: str, caplog: pytest.LogCaptureFixture
) -> None:
    parsed(*flags)
    assert [record.message for record in caplog.records if says in record.message]


@pytest.mark.usefixtures("on_cuda")
def test_graphs_are_refused_beside_enforce_eager(parsed: Parsed) -> None:
    with pytest.raises(ConfigError, match=r"^--cuda-graphs: not together with --enforce-eager$"):
        parsed("--cuda-graphs", "--enforce-eager")


def test_graphs_are_refused_without_cuda(parsed: Parsed) -> None:
    with pytest.raises(ConfigError, match=r"^--cuda-graphs: there is no CUDA device$"):
        parsed("--cuda-graphs")


def test_nothing_is_set_on_the_cpu(parsed: Parsed) -> None:
    args = parsed("--lend-weights")
    assert args.compilation_config.mode is None
    assert not args.enforce_eager


@pytest.mark.usefixtures("on_cuda")
@pytest.mark.parametrize(
    ("flags", "goes_on", "graphs"),
    [
        ([], True, ALL_STEPS),
        (["--cuda-graphs"], False, ALL_STEPS),
        (["--no-cuda-graphs"], True, CUDAGraphMode.NONE),
    ],
)
def test_start_goes_on_eagerly_unless_graphs_are_asked_for(
    parsed: Parsed,
    flags: list[str],
    goes_on: bool,
    graphs: CUDAGraphMode,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("VLLM_DISABLE_COMPILE_CACHE", "1")
    monkeypatch.setenv("VLLM_RPC_BASE_PATH", "/tmp")  # a start sets both
    config = AsyncEngineArgs.from_cli_args(parsed(*flags)).create_engine_config()
    prepare(config, 1)
    deployment = deployment_of(config.additional_config)
    assert deployment.eager_where_refused == goes_on
    assert config.compilation_config.cudagraph_mode == graphs
