"""A lane on a device: vLLM's model runner of one group size, over the bytes that all lanes share.
`versions.py` has all in which V1 and V2 differ.
"""

from __future__ import annotations

import functools
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from dataclasses import dataclass
from enum import Enum, auto
from typing import Any, ParamSpec

import torch
from vllm.config import VllmConfig, set_current_vllm_config
from vllm.config.kernel import IrOpPriorityConfig
from vllm.v1.core.kv_cache_utils import generate_scheduler_kv_cache_config
from vllm.v1.core.sched.output import SchedulerOutput
from vllm.v1.kv_cache_interface import KVCacheConfig

from flying_serving.comm.pool import CommunicatorPool
from flying_serving.errors import CollectiveTimeout, GroupBroken
from flying_serving.layout.groups import Group
from flying_serving.parallelism import Parallelism
from flying_serving.vllm_adapter.kv.lane_kv import LaneKV
from flying_serving.vllm_adapter.lora.layers import wrap_layers
from flying_serving.vllm_adapter.model_runner.compiled import (
    eager_operations,
    eager_priorities,
    is_compiled,
    uncompiled,
)
from flying_serving.vllm_adapter.model_runner.configuration import without_layers
from flying_serving.vllm_adapter.model_runner.graphs import Captured, DecodeGraphs
from flying_serving.vllm_adapter.model_runner.made_up_steps import without_outputs
from flying_serving.vllm_adapter.model_runner.randomness import (
    LaneRandomness,
    seed_of,
    seed_process,
)
from flying_serving.vllm_adapter.model_runner.versions import unwrapped, version_of
from flying_serving.vllm_adapter.scheduler.history import users_processors
from flying_serving.vllm_adapter.weights.trees import module_tree

P = ParamSpec("P")
_WARM_TOKENS = 16


class OutputUse(Enum):
    """The use of a step's output on a worker."""

    RETURNED = auto()
    """It is waited for, and returned."""
    KEPT = auto()
    """It is taken later, with `DeviceLane.take_output`."""


@dataclass(frozen=True)
class VoidStep:
    """The output of a step of which a member is lost, with the reason."""

    why: str


def _unless_broken(part: Callable[P, Any]) -> Callable[P, Any]:
    """Let a part of a step return a VoidStep if a member is lost. If the member lives, the part
    raises CollectiveTimeout.
    """

    @functools.wraps(part)
    def run(*args: P.args, **options: P.kwargs) -> Any:
        try:
            return part(*args, **options)
        except CollectiveTimeout:
            raise
        except GroupBroken as error:
            return VoidStep(str(error))

    return run


class DeviceLane:
    """The lane of one device for a group of engines. The group of lane 1 is one engine, and its
    runner is that of vLLM's worker.

    `vllm_runner`: vLLM's, V1 or V2. `randomness`: the lane's random numbers; None: it draws from
    the process's generators. `priorities`: its implementations of vLLM's IR operations; None: those
    of the process.

    `divides_tokens`: makes the steps of a body token parallel; or why it cannot. `kept`: outputs of
    steps that the engine has not taken, the oldest first.
    """

    def __init__(
        self,
        vllm_runner: Any,
        config: VllmConfig,
        group: Group,
        communicators: CommunicatorPool,
        randomness: LaneRandomness | None = None,
        priorities: IrOpPriorityConfig | None = None,
    ) -> None:
        self.vllm_runner = vllm_runner
        self._version = version_of(vllm_runner)
        self.config = config
        self.group, self.size = group, len(group)
        self.communicators = communicators
        self._randomness = randomness
        self._priorities = priorities
        self._own_code = ExitStack()  # never closed: what it has entered holds for good
        self.kv = LaneKV(vllm_runner, config, self.size)
        self.graphs = DecodeGraphs(vllm_runner, self._version, config)
        self.divides_tokens: Callable[[], AbstractContextManager[None]] | str = "it has one member"
        self.kept: deque[Any] = deque()

    @classmethod
    def build(cls, config: VllmConfig, group: Group, lane1: DeviceLane) -> DeviceLane:
        """Build a lane over a runner of lane 1's class. Its module tree is that of the group, with
        the parameters on the meta device.
        """
        with lane1.communicators.activate(len(group)), set_current_vllm_config(config):
            runner = type(lane1.vllm_runner)(config, lane1.vllm_runner.device)
            model = module_tree(config, torch.device(runner.device))
            wrap_layers(runner, model, config, lane1.vllm_runner)
            version_of(runner).take_model(model, lane1.vllm_runner)
        randomness = LaneRandomness(
            torch.device(runner.device),
            config.model_config.seed,
            for_users_code=bool(users_processors(config.model_config)),
        )
        priorities = config.kernel_config.ir_op_priority if is_compiled(lane1.config) else None
        return cls(runner, config, group, lane1.communicators, randomness, priorities)

    # ---- what it has

    @property
    def model(self) -> torch.nn.Module:
        """The model's modules, as vLLM's runner has them."""
        module: torch.nn.Module = unwrapped(self.vllm_runner.model)
        return module

    @property
    def device(self) -> torch.device:
        """The device on which the lane computes."""
        return torch.device(self.vllm_runner.device)

    @property
    def ways(self) -> tuple[Parallelism, ...]:
        """What the members of the group may divide in a step."""
        if isinstance(self.divides_tokens, str):
            return (Parallelism.TENSOR,)
        return Parallelism.TENSOR, Parallelism.TOKEN

    def scheduler_config(self) -> tuple[VllmConfig, KVCacheConfig]:
        """Return the configurations that a leader's scheduler works with.

        They are sent to the engine's process, so no layer and no tensor is in them.
        """
        assert self.kv.config is not None
        kv_config = generate_scheduler_kv_cache_config([self.kv.config])
        return without_layers(self.config), kv_config

    # ---- steps

    @torch.inference_mode()
    @_unless_broken
    def execute(
        self,
        plan: Any,
        grammar: Any,
        use: OutputUse,
        parallelism: Parallelism = Parallelism.TENSOR,
    ) -> Any:
        """Run one step in the group; every member calls it with the same plan (its own block ids)
        and `parallelism`.

        Returns vLLM's ModelRunnerOutput if the output is to be returned, otherwise None: the device
        may still compute then. A VoidStep if a member is lost before. Raises CollectiveTimeout if a
        member lives but does not take part.
        """
        output = self.launch(plan, grammar, parallelism)
        if use is OutputUse.RETURNED:
            return self._once_there(output)
        self.kept.append(output)
        return None

    @torch.inference_mode()
    @_unless_broken
    def take_output(self) -> Any:
        """Return the oldest kept output, vLLM's ModelRunnerOutput, once it is there.

        Returns a VoidStep, or raises CollectiveTimeout, as `execute`. Another device of the engine
        may have launched the step of a lost member, and this one not.
        """
        if not self.kept:
            raise GroupBroken(f"group of {self.size} engines: the step was not launched here")
        return self._once_there(self.kept.popleft())

    def step(self, plan: Any, parallelism: Parallelism = Parallelism.TENSOR) -> Any:
        """Run one step to its end. Returns vLLM's ModelRunnerOutput. Raises GroupBroken if a member
        is lost before.
        """
        return self._once_there(self.launch(plan, None, parallelism))

    def launch(
        self, plan: Any, grammar: Any = None, parallelism: Parallelism = Parallelism.TENSOR
    ) -> Any:
        """Begin a step, sampling included. With async scheduling the device may still compute it.

        Returns vLLM's ModelRunnerOutput, or what waits for it.
        """
        drawn = nullcontext() if self._randomness is None else self._randomness.used()
        divided = self._divided(parallelism)
        with self.active(), divided, drawn, eager_operations(self._priorities):
            output = self.vllm_runner.execute_model(plan)
            if output is None:
                output = self.vllm_runner.sample_tokens(grammar)
        return output

    def active(self) -> AbstractContextManager[None]:
        """While the body runs, the lane's group is vLLM's tensor-parallel group."""
        return self.communicators.activate(self.size)

    def _divided(self, parallelism: Parallelism) -> AbstractContextManager[None]:
        """Return what makes the steps of a body divide this."""
        if parallelism is Parallelism.TENSOR:
            return nullcontext()
        assert not isinstance(self.divides_tokens, str), self.divides_tokens
        return self.divides_tokens()

    def _once_there(self, output: Any) -> Any:
        there = output.get_output() if hasattr(output, "get_output") else output
        self.communicators.require_whole(self.size, goes_on=bool(self.kept))
        return there

    def pool(self, plan: Any) -> Any:
        """Run one step of made-up requests of a pooling model, each for the model's first task."""
        task = self.vllm_runner.get_supported_pooling_tasks()[0]
        return self.vllm_runner.execute_model(without_outputs(plan, task))

    # ---- requests and members

    def drop_requests(self) -> None:
        """Drop all requests, the outputs of their steps, and the state of a step that was not
        finished.
        """
        self.kept.clear()
        self.vllm_runner.execute_model_state = None
        ended = SchedulerOutput.make_empty()
        ended.finished_req_ids = self._version.request_ids()
        self.vllm_runner.execute_model(ended)

    def replace_blocks(self, copies: Mapping[int, int]) -> None:
        """Give requests other blocks between two steps (`copies`: new ones by old), to which their
        KV was copied.
        """
        self._version.replace_blocks(copies)

    def leave(self) -> None:
        """Leave the group, which has lost a member, and drop its requests."""
        self.communicators.leave(self.size)
        self.drop_requests()

    def rejoin(self, members: Sequence[int]) -> None:
        """Reopen the group, which is whole again. `members`: as of `CommunicatorPool`."""
        self.communicators.reopen(self.size, members)
        self.seed(members)

    def any_of(self, value: bool) -> bool:
        """Return whether `value` is true on any member of the group. All return at the same
        time.
        """
        return self.communicators.any_of(self.size, value)

    def seed(self, numbers: Sequence[int]) -> None:
        """From now on, draw the random numbers of the group that `numbers` tell apart: how often
        each member was started before, first of all.
        """
        seed = self.config.model_config.seed
        if self._randomness is None:
            seed_process(seed, self.group[0], numbers[0])
        else:
            self._randomness.seed(seed_of(seed, self.group, numbers))

    def begin_anew(self, times: int) -> None:
        """Draw other random numbers than since the start, or than after fewer `times`."""
        self.seed([*self.communicators.members[self.size], times])

    # ---- the start

    def warm(self, tokens: int = _WARM_TOKENS) -> None:
        """Run the model once on made-up tokens, as many as a step may have at most, all members
        together. So no request pays for work at first use.
        """
        most = self.config.scheduler_config.max_num_batched_tokens
        with (
            self.active(),
            set_current_vllm_config(self.config),
            eager_operations(self._priorities),
        ):
            self.vllm_runner._dummy_run(min(tokens, most))

    def capture(self) -> Captured:
        """Capture the CUDA graphs of decode steps, all members in lockstep: see
        `DecodeGraphs.capture`. Raises LaneError.
        """
        with self.active(), eager_operations(self._priorities):
            return self.graphs.capture()

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

    def update_max_model_len(self, max_model_len: int) -> None:
        """Take over vLLM's fit of the longest request to the KV memory."""
        self.config.model_config.max_model_len = max_model_len
        self.vllm_runner.update_max_model_len(max_model_len)
