"""A model's modules without its weights, as a rank of any degree would build them."""

from __future__ import annotations

import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta
from typing import Any

import torch
from vllm.config import VllmConfig, set_current_vllm_config
from vllm.distributed import parallel_state
from vllm.model_executor.model_loader.utils import initialize_model
from vllm.utils.torch_utils import set_default_torch_dtype

from flying_serving.vllm_hooks.distributed import activate
from flying_serving.vllm_hooks.loading import parameters_on_meta

_JOIN_S = 60


def module_tree(config: VllmConfig, device: torch.device) -> torch.nn.Module:
    """What a rank of the active tensor-parallel group builds for `config`, its parameters on the meta device.

    What a model computes itself (rotary tables, ALiBi slopes) is real, and of this rank, on `device`.
    """
    dtype = set_default_torch_dtype(config.model_config.dtype)
    with set_current_vllm_config(config), dtype, torch.random.fork_rng(devices=[]), device, parameters_on_meta():
        return initialize_model(config, model_config=config.model_config).eval()


@contextmanager
def world_of_one(config: VllmConfig) -> Iterator[None]:
    """While the body runs, this process, which must be in no other, is a torch world of its own."""
    with tempfile.TemporaryDirectory() as scratch, set_current_vllm_config(config):
        timeout = timedelta(seconds=_JOIN_S)
        parallel_state.init_distributed_environment(1, 0, f"file://{scratch}/world", 0, "gloo", timeout)
        parallel_state.initialize_model_parallel(1)
        try:
            yield
        finally:
            parallel_state.destroy_model_parallel()
            parallel_state.destroy_distributed_environment()


def first_of(degree: int) -> Any:
    """While the body runs, this process, a world of its own, is rank 0 of a tensor-parallel group of `degree`."""
    return activate(_FirstOf(parallel_state.get_tp_group(), degree))


class _FirstOf:
    """The group of one rank, but for its size: enough to build modules, and none of them is run."""

    def __init__(self, alone: Any, degree: int) -> None:
        self._alone = alone
        self.world_size = degree

    def __getattr__(self, name: str) -> Any:
        return getattr(self._alone, name)
