"""A lane on a device: a model runner of one degree over the engine's shared weights and KV
bytes.
"""

from __future__ import annotations

import copy
from collections import deque
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from enum import Enum, auto
from functools import partial
from typing import Any

import torch
from vllm.config import VllmConfig
from vllm.v1.core.kv_cache_utils import generate_scheduler_kv_cache_config
from vllm.v1.kv_cache_interface import KVCacheConfig

from flying_serving.comm.pool import CommunicatorPool
from flying_serving.errors import ConfigError, GroupBroken
from flying_serving.layout.parallelism import Parallelism
from flying_serving.vllm_adapter.kv.cache import follow_pages, in_blocks_of
from flying_serving.vllm_adapter.model_runner.compiled import keep_eager
from flying_serving.vllm_adapter.model_runner.graphs import (
    Captured,
    capture_nothing,
    limit_capture_sizes,
)
from flying_serving.vllm_adapter.model_runner.runner import Runner, resolved
from flying_serving.vllm_adapter.model_runner.token_parallel import TokenParallel, obstacle


class OutputUse(Enum):
    """The use of a step's output on a worker."""

    RETURNED = auto()
    """It is waited for, and returned."""
    KEPT = auto()
    """It is taken later, with `WorkerLane.take_output`."""


def without_layers(config: VllmConfig) -> VllmConfig:
    """Copy a configuration deeply, without the layers, with weights and KV memory, that vLLM keeps
    in it.
    """
    layers = config.compilation_config.static_forward_context
    copied = copy.deepcopy(config, {id(layers): {}})
    copied.compilation_config.static_all_moe_layers = []
    return copied


def lane_config(
    config: VllmConfig, size: int, block_tokens: int, *, captures: bool = True
) -> VllmConfig:
    """Return the VllmConfig of a lane for groups of `size` engines from lane 1's. Its blocks hold
    `block_tokens` tokens.

    `captures`: False if CUDA graphs cannot hold the lane's exchanges, even if lane 1 has graphs.
    """
    lane = without_layers(config)
    parallel = lane.parallel_config
    parallel.tensor_parallel_size *= size
    parallel.world_size = parallel.tensor_parallel_size
    lane.cache_config.block_size = block_tokens
    lane.cache_config.hash_block_size = None
    keep_eager(lane)
    if captures:
        limit_capture_sizes(lane)
    else:
        capture_nothing(lane)
    return lane


@dataclass
class WorkerLane:
    """The lane of one worker for groups of `size` engines. `kv_config` is there once KV memory is
    bound.

    `divides_tokens`: the lane's token parallel steps, or the reason why it has none. `kept`:
    outputs of steps that the engine has not taken, the oldest first.
    """

    size: int
    communicators: CommunicatorPool
    runner: Runner
    divides_tokens: TokenParallel | str
    kv_config: KVCacheConfig | None = None
    kept: deque[Any] = field(default_factory=deque)

    @property
    def ways(self) -> tuple[Parallelism, ...]:
        """What the members of the group may divide in a step."""
        if isinstance(self.divides_tokens, TokenParallel):
            return Parallelism.TENSOR, Parallelism.TOKEN
        return (Parallelism.TENSOR,)

    @classmethod
    def build(
        cls,
        size: int,
        config: VllmConfig,
        communicators: CommunicatorPool,
        lane1: Runner,
        tensor_only: str | None = None,
    ) -> WorkerLane:
        """Build a lane that has no weights yet. `tensor_only`: why the server's steps are not to be
        token parallel; None if they may.
        """
        with communicators.activate(size):
            runner = Runner.build(config, lane1)
        divides_tokens: TokenParallel | str | None = tensor_only or obstacle(lane1, runner, size)
        if divides_tokens is None:
            group, alone = communicators.same_device(size), partial(communicators.activate, 1)
            divides_tokens = TokenParallel(runner, lane1, group, alone)
        return cls(size, communicators, runner, divides_tokens)

    def bind_kv(
        self, memory: torch.Tensor, lane1: KVCacheConfig, block_tokens: int
    ) -> KVCacheConfig:
        """Read lane 1's KV memory (int8, bytes) as this lane's blocks, of `block_tokens` tokens.
        Returns its configuration.

        Raises:
            ConfigError: if a block would not keep its bytes.
        """
        self.runner.config.cache_config.kv_cache_layout = lane1.kv_cache_layout
        follow_pages(self.runner.config, lane1, block_tokens)
        with self.communicators.activate(self.size):
            own = self.runner.kv_config(memory.numel())
            kv = in_blocks_of(own, lane1)
            layers, expected = (
                [group.layer_names for group in config.kv_cache_groups] for config in (own, lane1)
            )
            if kv is None or layers != expected:
                raise ConfigError(
                    f"group size {self.size}: {own.num_blocks} KV blocks in {len(layers)} cache "
                    f"groups, {lane1.num_blocks} in the {len(expected)} groups of lane 1 are "
                    "needed for blocks of constant bytes"
                )
            kv.kv_cache_layout = lane1.kv_cache_layout
            self.runner.bind_kv(kv, memory)
        self.kv_config = kv
        return kv

    def scheduler_config(self) -> tuple[VllmConfig, KVCacheConfig]:
        """Return the configurations that a leader's scheduler works with.

        They are sent to the engine's process, so no layer and no tensor is in them.
        """
        assert self.kv_config is not None
        kv_config = generate_scheduler_kv_cache_config([self.kv_config])
        return without_layers(self.runner.config), kv_config

    def warm(self) -> None:
        """Run the model once, all members together."""
        with self.communicators.activate(self.size):
            self.runner.warm()
        self.communicators.any_of(self.size, False)

    def warm_most(self) -> None:
        """Run the model once on as many tokens as a step may have, all members together."""
        with self.communicators.activate(self.size):
            self.runner.warm(self.runner.config.scheduler_config.max_num_batched_tokens)

    def capture(self) -> Captured:
        """Capture the CUDA graphs of decode steps, all members in lockstep. Raises LaneError."""
        with self.communicators.activate(self.size):
            return self.runner.capture()

    def execute(
        self,
        plan: Any,
        grammar: Any = None,
        use: OutputUse = OutputUse.RETURNED,
        parallelism: Parallelism = Parallelism.TENSOR,
    ) -> Any:
        """Run one step of the model, all members together, and all with the same `parallelism`.

        Returns vLLM's ModelRunnerOutput if the output is to be returned, otherwise None: the device
        may still compute then. Raises GroupBroken if a member was lost before the output was there.
        """
        with self.communicators.activate(self.size), self._divided(parallelism):
            output = self.runner.launch(plan, grammar)
        if use is OutputUse.RETURNED:
            return self._once_there(output)
        self.kept.append(output)
        return None

    def take_output(self) -> Any:
        """Return the oldest kept output, vLLM's ModelRunnerOutput, once it is there.

        Raises GroupBroken if a member was lost before. Then another device of the engine may have
        launched the step, and this one not.
        """
        if not self.kept:
            raise GroupBroken(f"group of {self.size} engines: the step was not launched here")
        return self._once_there(self.kept.popleft())

    def drop_requests(self) -> None:
        """Forget all requests and the outputs of their steps."""
        self.kept.clear()
        self.runner.drop_requests()

    def _divided(self, parallelism: Parallelism) -> AbstractContextManager[None]:
        """Return what makes the steps of a body divide this."""
        if parallelism is Parallelism.TENSOR:
            return nullcontext()
        assert isinstance(self.divides_tokens, TokenParallel), self.divides_tokens
        return self.divides_tokens.used()

    def _once_there(self, output: Any) -> Any:
        there = resolved(output)
        self.communicators.require_whole(self.size, goes_on=bool(self.kept))
        return there
