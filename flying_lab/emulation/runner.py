"""A model runner whose steps last as long as a profile says, and whose tokens mean
nothing.
"""

from __future__ import annotations

import time
import zlib
from dataclasses import dataclass
from typing import Any

import torch
from vllm.config import VllmConfig
from vllm.distributed.parallel_state import get_tp_group
from vllm.v1.outputs import (
    EMPTY_MODEL_RUNNER_OUTPUT,
    AsyncModelRunnerOutput,
    ModelRunnerOutput,
)
from vllm.v1.worker.cpu_model_runner import CPUModelRunner

from flying_lab.emulation.profile import profile_of
from flying_lab.emulation.step_contents import StepContents
from flying_lab.tiny_models.tokenizer import BOS, SPECIALS
from flying_serving.parallelism import Parallelism

FIRST_WORD = BOS + len(SPECIALS)
"""The first token of the stand-in's vocabulary that is a word, neither a byte nor a special."""


@dataclass(frozen=True)
class EmulatedOutput(AsyncModelRunnerOutput):
    """The output of a step that the emulated devices compute until `ends_s` (`time.monotonic`)."""

    output: ModelRunnerOutput
    ends_s: float

    def get_output(self) -> ModelRunnerOutput:
        """Return the output at the end of the step."""
        time.sleep(max(0.0, self.ends_s - time.monotonic()))
        return self.output


class EmulatedRunner(CPUModelRunner):
    """vLLM's CPU model runner, whose model and KV memory are there and are not computed with.

    One step follows the other, as on a device: a step begins when it is ordered and the one before
    has ended. The members of a group begin together, by an all-reduce of their communicator.
    """

    def __init__(self, vllm_config: VllmConfig, device: torch.device) -> None:
        super().__init__(vllm_config, device)
        parallel = vllm_config.parallel_config
        profile = profile_of(vllm_config.additional_config)
        self._lane = profile.lane(parallel.tensor_parallel_size)
        self._vocabulary = vllm_config.model_config.get_vocab_size()
        self._is_async = bool(vllm_config.scheduler_config.async_scheduling)
        self._seed = int(vllm_config.model_config.seed)
        self._contents = StepContents()
        self.requests: dict[str, int] = self._contents.known_tokens
        self.begins_s = self.ends_s = 0.0
        """When the devices begin and end the last step, by CLOCK_MONOTONIC."""
        self._output: ModelRunnerOutput | None = None

    def execute_model(self, scheduler_output: Any, intermediate_tensors: Any = None) -> Any:
        """Begin a step. Returns None, or an empty output if it computes nothing."""
        step = self._contents.take(scheduler_output)
        if not scheduler_output.num_scheduled_tokens:
            return EMPTY_MODEL_RUNNER_OUTPUT
        if "forward" in vars(self.model):  # as TokenParallel has the model compute a step
            step.parallelism = Parallelism.TOKEN
        group = get_tp_group()
        if group.world_size > 1:
            group.all_reduce(torch.zeros(1))

        self.begins_s = max(self.ends_s, time.monotonic())
        self.ends_s = self.begins_s + self._lane.step_s(step)
        self._output = self._drawn(scheduler_output)
        return None

    def sample_tokens(self, grammar_output: Any) -> Any:
        """Return the output of the step that was begun last, at its end or (async) at once."""
        assert self._output is not None
        output = EmulatedOutput(self._output, self.ends_s)
        return output if self._is_async else output.get_output()

    def _drawn(self, plan: Any) -> ModelRunnerOutput:
        names = list(plan.num_scheduled_tokens)
        drawn = set(self._contents.draw(plan))
        tokens = [self._token(name) for name in names]
        return ModelRunnerOutput(
            req_ids=names,
            req_id_to_index={name: index for index, name in enumerate(names)},
            sampled_token_ids=[
                [token] if name in drawn else [] for name, token in zip(names, tokens, strict=True)
            ],
        )

    def _token(self, name: str) -> int:
        """Return the next token of a request: the same on all members of its group."""
        place = f"{self._seed} {name} {self.requests[name]}".encode()
        return FIRST_WORD + zlib.crc32(place) % (self._vocabulary - FIRST_WORD)

    def _dummy_run(self, *_: Any, **__: Any) -> Any:
        """Do nothing: there is nothing to warm up."""
