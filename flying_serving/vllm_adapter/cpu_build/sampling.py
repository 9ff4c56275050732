"""Sampling of seeded requests with a prompt of several steps, on CPU; thinking budgets of requests
that move within a batch.
"""

from dataclasses import replace
from typing import Any

import numpy as np
import torch
from vllm.platforms import current_platform
from vllm.v1.sample.logits_processor import BatchUpdate, MoveDirectionality


class RewindingGenerator(torch.Generator):
    """A CPU generator that can take back its last draw, as vLLM asks of CUDA's by their offset."""

    _before: torch.Tensor

    def mark(self) -> None:
        """Remember where the next draw begins."""
        self._before = self.get_state()

    def get_offset(self) -> int:
        """Return one draw, in the units that vLLM subtracts."""
        return 4

    def set_offset(self, offset: int) -> None:
        """Go back to the marked draw."""
        self.set_state(self._before)


def sample_and_rewind(original: Any, self: Any, grammar_output: Any) -> Any:
    """Wrap `GPUModelRunner.sample_tokens`: on CPU vLLM dies when it discards a sample of a seeded
    request.
    """
    batch = self.input_batch
    if batch.generators and current_platform.is_cpu():
        for index in np.nonzero(self.discard_request_mask.np[: batch.num_reqs])[0].tolist():
            generator = batch.generators.get(index)
            if generator is None:
                continue
            if not isinstance(generator, RewindingGenerator):
                plain, generator = generator, RewindingGenerator()
                generator.set_state(plain.get_state())
                batch.generators[index] = self.requests[batch.req_ids[index]].generator = generator
            generator.mark()
    return original(self, grammar_output)


def sync_moves(original: Any, self: Any, batch_update: BatchUpdate | None) -> None:
    """Wrap `ThinkingBudgetStateHolder.sync_batch`: a request without a budget that moves to a row
    takes no state of the request that was there before.
    """
    if not batch_update or not batch_update.moved:
        original(self, batch_update)
        return
    original(self, replace(batch_update, moved=()))
    for move in batch_update.moved:
        source, target, direction = move
        if direction is MoveDirectionality.UNIDIRECTIONAL and source not in self._state:
            self._state.pop(target, None)
        else:
            original(self, replace(batch_update, removed=(), added=(), moved=(move,)))
