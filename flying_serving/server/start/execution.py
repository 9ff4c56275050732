"""How lanes run their steps: as they are, compiled, and as CUDA graphs. Refusals of the other ways
that vLLM has.

vLLM's flags say how lane 1 runs: --enforce-eager and --compilation-config. Lanes of groups are
never compiled. They replay graphs of decode steps where lane 1 does, if graphs can hold their
exchanges.
"""

import os
from typing import Any

from vllm.config import CompilationMode, CUDAGraphMode

from flying_serving.config import Collectives, FlyingConfig
from flying_serving.errors import ConfigError, Unsupported
from flying_serving.log import logger
from flying_serving.vllm_adapter.model_runner.compiled import is_compiled
from flying_serving.vllm_adapter.model_runner.graphs import are_asked, capture_nothing

_NO_CACHE = "VLLM_DISABLE_COMPILE_CACHE"
_GRAPHS_OF_DECODES = (CUDAGraphMode.FULL_DECODE_ONLY, CUDAGraphMode.FULL_AND_PIECEWISE)


def settle_execution(config: Any, flying: FlyingConfig, collectives: Collectives) -> None:
    """Refuse settings of vLLM under which a lane may compute wrongly, or not at all. Leave out CUDA
    graphs that no user has asked for, where lanes cannot have them.

    `config`: vLLM's VllmConfig. `collectives`: how devices exchange tensors.

    Raises:
        ConfigError: if two settings do not go together.
        Unsupported: for a way in which no lane runs yet.
    """
    if is_compiled(config):
        _refuse_uncompilable(config, collectives)
    _settle_graphs(config, flying)
    if are_asked(config) and collectives != "nccl":
        _keep_groups_eager(config.parallel_config, collectives)


def _keep_groups_eager(parallel: Any, collectives: Collectives) -> None:
    """Say that lane 1 has CUDA graphs and no group has: see `Deployment.captures_groups`."""
    devices = parallel.tensor_parallel_size
    if devices > 1:
        raise ConfigError(
            f"--cuda-graphs: with --tensor-parallel-size={devices} needs "
            f"--cuda-collectives=nccl, not {collectives}"
        )
    if parallel.data_parallel_size > 1:
        logger.info(
            "--cuda-graphs: for engines that serve alone; groups stay eager, as CUDA graphs cannot "
            "hold --cuda-collectives=%s",
            collectives,
        )


def keep_no_compiled_code(config: Any) -> None:
    """Let vLLM compile lane 1 anew at each start, unless a user says otherwise.

    Its cache is looked up by the whole configuration. That has the directory of this start, so
    nothing would be found again.
    """
    if is_compiled(config):
        os.environ.setdefault(_NO_CACHE, "1")


def _refuse_uncompilable(config: Any, collectives: Collectives) -> None:
    devices = config.parallel_config.tensor_parallel_size
    if config.compilation_config.mode == CompilationMode.STOCK_TORCH_COMPILE:
        raise Unsupported(
            "--compilation-config: mode STOCK_TORCH_COMPILE cannot be served by Flying Serving yet"
        )
    if devices > 1 and collectives != "nccl":
        raise ConfigError(
            f"--tensor-parallel-size={devices}: needs --enforce-eager, as torch.compile does not "
            f"know the collectives {collectives}"
        )


def _settle_graphs(config: Any, flying: FlyingConfig) -> None:
    mode = config.compilation_config.cudagraph_mode
    if config.model_config.enforce_eager or mode in (None, CUDAGraphMode.NONE):
        if flying.cuda_graphs:
            raise ConfigError(
                "--cuda-graphs: the cudagraph_mode of --compilation-config must be "
                "FULL_DECODE_ONLY, or FULL_AND_PIECEWISE with mode VLLM_COMPILE, and "
                "--enforce-eager must not be given"
            )
        return
    if flying.cuda_graphs is False:
        raise ConfigError(
            f"--no-cuda-graphs: not together with cudagraph_mode {mode.name} of "
            "--compilation-config"
        )
    piecewise = mode == CUDAGraphMode.FULL_AND_PIECEWISE
    if mode in _GRAPHS_OF_DECODES and (is_compiled(config) or not piecewise):
        return
    if flying.cuda_graphs:
        raise Unsupported(
            f"--compilation-config: cudagraph_mode {mode.name} cannot be served by Flying Serving "
            "yet"
        )
    logger.warning(
        "--compilation-config: no CUDA graphs, as lanes cannot replay those of cudagraph_mode %s",
        mode.name,
    )
    capture_nothing(config)
