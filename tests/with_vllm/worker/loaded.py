"""Module trees of small models with weights, in a process that is an engine by itself."""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import psutil
import torch
from torch.nn import Module, Parameter
from torch.utils import swap_tensors
from vllm.config import VllmConfig
from vllm.v1.worker.workspace import init_workspace_manager, is_workspace_manager_initialized

from flying_serving.vllm_adapter.model_runner.configuration import lane_config
from flying_serving.vllm_adapter.weights.trees import first_of, module_tree, world_of_one
from flying_serving.weights.lending.weight_file import WeightFile

CPU = torch.device("cpu")


@contextmanager
def alone(config: VllmConfig) -> Iterator[VllmConfig]:
    """While the body runs, this process is an engine by itself; yields its configuration."""
    if not is_workspace_manager_initialized():
        init_workspace_manager(CPU)
    config.parallel_config.data_parallel_size = 1
    with world_of_one(config):
        yield config


def tree(config: VllmConfig, size: int) -> Module:
    """The modules of a lane, those of the first rank, without weights."""
    with first_of(size):
        return module_tree(lane_config(config, size, config.cache_config.block_size), CPU)


def load(model: Module) -> None:
    """Give each parameter numbers, the same in each engine. Bytes are packed numbers in MXFP4, or
    exponents of scales from 1/128 to 1/32. Scales of other numbers are positive.
    """
    generator = torch.Generator().manual_seed(0)
    for name, parameter in list(model.named_parameters()):
        if parameter.is_floating_point():
            drawn = torch.float32 if parameter.element_size() == 1 else parameter.dtype
            data = torch.randn(parameter.shape, generator=generator, dtype=drawn)
            if name.endswith(("_scale", "_scale_inv")):
                data = data.abs() + 0.5
            data = data.to(parameter.dtype)
        else:
            limits = (120, 123) if name.endswith("_scale") else (0, 256)
            data = torch.empty(parameter.shape, dtype=parameter.dtype)
            data.random_(*limits, generator=generator)
        swap_tensors(parameter, Parameter(data, requires_grad=False))


def nested(**parts: Module) -> Module:
    module = Module()
    for name, part in parts.items():
        module.add_module(name, part)
    return module


def written(path: Path) -> WeightFile:
    return WeightFile(str(path), str(path), 0, writes=True)


def random(*shape: int) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(1))


def resident_bytes() -> int:
    """The resident memory of this process."""
    resident: int = psutil.Process().memory_info().rss
    return resident
