"""The adapter of vLLM's model runner, with all that lanes need of it. `model_runners.py` has all in
which V1 and V2 differ.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, nullcontext
from typing import Any

import torch
from vllm.config import VllmConfig, set_current_vllm_config
from vllm.config.kernel import IrOpPriorityConfig
from vllm.v1.core.kv_cache_utils import get_kv_cache_configs
from vllm.v1.core.sched.output import SchedulerOutput
from vllm.v1.kv_cache_interface import KVCacheConfig

from flying_serving.memory.kv_groups import one_group
from flying_serving.vllm_adapter.kv.cache import (
    groups_of,
    shared_kv_buffer,
    token_parts,
    with_sharing_layers,
)
from flying_serving.vllm_adapter.kv.windows import with_all_kv
from flying_serving.vllm_adapter.lora.layers import wrap_layers
from flying_serving.vllm_adapter.model_runner.batches import without_outputs
from flying_serving.vllm_adapter.model_runner.compiled import (
    eager_operations,
    eager_priorities,
    is_compiled,
    uncompiled,
)
from flying_serving.vllm_adapter.model_runner.graphs import Captured, DecodeGraphs
from flying_serving.vllm_adapter.model_runner.randomness import (
    LaneRandomness,
    seed_of,
    seed_process,
)
from flying_serving.vllm_adapter.model_runner.versions import unwrapped, version_of
from flying_serving.vllm_adapter.scheduler.history import users_processors
from flying_serving.vllm_adapter.weights.trees import module_tree

_WARM_TOKENS = 16


def resolved(output: Any) -> Any:
    """Return the ModelRunnerOutput of a step that was launched, once it is there."""
    return output.get_output() if hasattr(output, "get_output") else output


class Runner:
    """vLLM's model runner of one lane, V1 or V2.

    `randomness`: the lane's random numbers; None: the lane draws from the process's generators.
    `priorities`: its implementations of vLLM's IR operations; None: those of the process.
    `groups`: the KV groups, which are known once KV memory is bound.
    """

    def __init__(
        self,
        runner: Any,
        config: VllmConfig,
        randomness: LaneRandomness | None = None,
        priorities: IrOpPriorityConfig | None = None,
    ) -> None:
        self._runner = runner
        self._version = version_of(runner)
        self.config = config
        self._randomness = randomness
        self._priorities = priorities
        self._own_code = ExitStack()  # never closed: what it has entered holds for good
        self.groups = one_group(config.cache_config.block_size)
        self.graphs = DecodeGraphs(runner, self._version, config)

    @classmethod
    def build(cls, config: VllmConfig, lane1: Runner) -> Runner:
        """Build a runner of lane 1's class with the module tree of the active tensor-parallel
        group, its parameters on the meta device.
        """
        with set_current_vllm_config(config):
            runner = type(lane1._runner)(config, lane1._runner.device)
            model = module_tree(config, torch.device(runner.device))
            wrap_layers(runner, model, config, lane1._runner)
            version_of(runner).take_model(model, lane1._runner)
        randomness = LaneRandomness(
            torch.device(runner.device),
            config.model_config.seed,
            for_users_code=bool(users_processors(config.model_config)),
        )
        return cls(
            runner,
            config,
            randomness,
            config.kernel_config.ir_op_priority if is_compiled(lane1.config) else None,
        )

    @property
    def model(self) -> torch.nn.Module:
        """The model's modules, as vLLM's runner has them."""
        module: torch.nn.Module = unwrapped(self._runner.model)
        return module

    @property
    def vllm_runner(self) -> Any:
        """vLLM's runner itself."""
        return self._runner

    @property
    def layers(self) -> dict[str, Any]:
        """The layers with weights or KV memory that vLLM keeps in the configuration, by name."""
        layers: dict[str, Any] = self.config.compilation_config.static_forward_context
        return layers

    @property
    def device(self) -> torch.device:
        """The device on which the lane computes."""
        return torch.device(self._runner.device)

    @contextmanager
    def uncompiled(self) -> Iterator[None]:
        """While the body runs, steps run the model's own code, if vLLM has compiled it, with the
        kernels of an eager server.
        """
        priorities = eager_priorities(self.config) if is_compiled(self.config) else None
        with uncompiled(self.model), eager_operations(priorities):
            yield

    def stay_uncompiled(self) -> None:
        """From now on, run the model's own code, as `uncompiled` does for a while."""
        self._own_code.enter_context(self.uncompiled())

    def step(self, plan: Any, grammar: Any = None) -> Any:
        """Run one step, sampling included. Returns vLLM's ModelRunnerOutput, once it is there."""
        return resolved(self.launch(plan, grammar))

    def launch(self, plan: Any, grammar: Any = None) -> Any:
        """Begin a step, sampling included. With async scheduling the device may still compute it.

        Returns what `resolved` takes.
        """
        drawn = nullcontext() if self._randomness is None else self._randomness.used()
        with drawn, eager_operations(self._priorities):
            output = self._runner.execute_model(plan)
            if output is None:
                output = self._runner.sample_tokens(grammar)
        return output

    def pool(self, plan: Any) -> Any:
        """Run one step of made-up requests of a pooling model, each for the model's first task."""
        task = self._runner.get_supported_pooling_tasks()[0]
        return self._runner.execute_model(without_outputs(plan, task))

    def seed(self, group: Sequence[int], numbers: Sequence[int]) -> None:
        """From now on, draw the random numbers of the group of these engines that `numbers` tell
        apart: how often each member was started before, first of all.
        """
        seed = self.config.model_config.seed
        if self._randomness is None:
            seed_process(seed, group[0], numbers[0])
        else:
            self._randomness.seed(seed_of(seed, group, numbers))

    def drop_requests(self) -> None:
        """Drop all requests, and the state of a step that was not finished."""
        self._runner.execute_model_state = None
        ended = SchedulerOutput.make_empty()
        ended.finished_req_ids = self._version.request_ids()
        self._runner.execute_model(ended)

    def warm(self, tokens: int = _WARM_TOKENS) -> None:
        """Run the model once on a few made-up tokens, so that no request pays for work at first
        use.
        """
        most = self.config.scheduler_config.max_num_batched_tokens
        with set_current_vllm_config(self.config), eager_operations(self._priorities):
            self._runner._dummy_run(min(tokens, most))

    def capture(self) -> Captured:
        """Capture the CUDA graphs of a group's lane: see `DecodeGraphs.capture`."""
        with eager_operations(self._priorities):
            return self.graphs.capture()

    def kv_specs(self) -> dict[str, Any]:
        """Return vLLM's KVCacheSpec of each attention layer, with KV of all tokens."""
        specs: dict[str, Any] = self._runner.get_kv_cache_spec()
        return with_all_kv(specs, self.config.cache_config.block_size)

    def kv_bytes(self) -> torch.Tensor:
        """Return the KV memory, which is one allocation, as int8."""
        cache = self._runner.kv_caches[0]
        return torch.empty(0, dtype=torch.int8, device=cache.device).set_(cache.untyped_storage())

    def kv_config(self, kv_bytes: int) -> KVCacheConfig:
        """Return how the lane would use this much KV memory."""
        with set_current_vllm_config(self.config):
            return get_kv_cache_configs(self.config, [self.kv_specs()], [kv_bytes])[0]

    def bind_kv(self, kv: KVCacheConfig, memory: torch.Tensor) -> None:
        """Use `memory` (int8) as KV memory."""
        self.config.cache_config.num_gpu_blocks = kv.num_blocks
        self.groups = groups_of(kv)
        with set_current_vllm_config(self.config), shared_kv_buffer(memory):
            self._runner.initialize_kv_cache(self.with_sharing_layers(kv))
        # as vLLM's worker does for lane 1: a new block of KV may have been one of a state
        if kv.needs_kv_cache_zeroing and hasattr(self._runner, "_init_kv_zero_meta"):
            self._runner._init_kv_zero_meta()

    def with_sharing_layers(self, kv: KVCacheConfig) -> KVCacheConfig:
        """Return a KV cache as the runner takes it: see `kv.with_sharing_layers`."""
        return with_sharing_layers(kv, self.layers)

    def kv_parts(self, names: Sequence[str]) -> list[torch.Tensor] | None:
        """Return `token_parts` of layers whose KV has one size; None if it cannot be read."""
        return token_parts([self.layers[name] for name in names])

    def replace_blocks(self, copies: Mapping[int, int]) -> None:
        """Give requests other blocks between two steps (`copies`: new ones by old), to which their
        KV was copied.
        """
        self._version.replace_blocks(copies)

    def update_max_model_len(self, max_model_len: int) -> None:
        """Take over vLLM's fit of the longest request to the KV memory."""
        self.config.model_config.max_model_len = max_model_len
        self._runner.update_max_model_len(max_model_len)
