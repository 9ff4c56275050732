"""Logits processors whose state follows from a history, and those whose state does not."""

from collections.abc import Callable, Sequence
from itertools import count
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from vllm.sampling_params import SamplingParams
from vllm.v1.sample.logits_processor import (
    AdapterLogitsProcessor,
    BatchUpdate,
    LogitBiasLogitsProcessor,
    LogitsProcessor,
    MinPLogitsProcessor,
    MinTokensLogitsProcessor,
)
from vllm.v1.sample.thinking_budget_state import ThinkingBudgetStateHolder

from flying_serving.vllm_adapter.scheduler.history import stateful_processors, why_not_migratable
from tests.with_vllm.vllm_adapter.histories import VOCAB, model, source


class Counting(AdapterLogitsProcessor):
    """Counts how often it was asked, which is not in the tokens of a request."""

    def is_argmax_invariant(self) -> bool:
        return False

    def new_req_logits_processor(
        self, params: SamplingParams
    ) -> Callable[[list[int], torch.Tensor], torch.Tensor]:
        asked = count()

        def fall(output_ids: list[int], logits: torch.Tensor) -> torch.Tensor:
            return logits - next(asked)

        return fall


class Looking(Counting):
    """Says that it goes by the outputs alone."""

    follows_outputs = True


def test_a_request_stays_whose_logits_processor_may_hold_a_state() -> None:
    assert stateful_processors(model(Looking, Counting)) == ["Counting"]
    why = why_not_migratable(source(), model(Looking, Counting))
    assert why == "a logits processor may hold a state that is not in its tokens"


@pytest.mark.parametrize(
    "processors", [[], [Looking], ["harness.force:ForceTokens"]], ids=["none", "class", "name"]
)
def test_a_request_whose_logits_processors_follow_its_outputs_migrates(
    processors: list[Any],
) -> None:
    assert stateful_processors(model(*processors)) == []
    assert why_not_migratable(source(), model(*processors)) is None


def biases(
    processor: LogitsProcessor, params: SamplingParams, outputs: Sequence[int], begins_with: int
) -> list[list[float]]:
    """What a processor makes of zeros for each token after a history of the first `begins_with`
    outputs.
    """
    had = list(outputs[:begins_with])
    update: BatchUpdate | None = BatchUpdate(1, [], [(0, params, [1, 2, 3], had)], [])
    made = []
    for token in outputs[begins_with:]:
        processor.update_state(update)
        made.append(processor.apply(torch.zeros(1, VOCAB))[0].tolist())
        had.append(token)
        update = None
    return made


@pytest.mark.parametrize(
    "kind", [MinTokensLogitsProcessor, LogitBiasLogitsProcessor, MinPLogitsProcessor]
)
@pytest.mark.parametrize("kept", [1, 4, 5, 7])
def test_vllms_own_logits_processors_follow_a_history(
    kind: type[LogitsProcessor], kept: int
) -> None:
    """One of `min_tokens` that ends before the history does, in it, or after it."""
    params = SamplingParams(min_tokens=5, stop_token_ids=[6], logit_bias={3: 2.0}, min_p=0.5)
    config: Any = SimpleNamespace(scheduler_config=SimpleNamespace(max_num_seqs=4))

    def make() -> LogitsProcessor:
        return kind(config, torch.device("cpu"), False)

    outputs = range(10, 20)
    assert biases(make(), params, outputs, kept) == biases(make(), params, outputs, 0)[kept:]


def forced(outputs: Sequence[int], begins_with: int, ends: list[int]) -> list[int]:
    """Tokens under a thinking budget of four, behind the first `begins_with`: those of `outputs`,
    or what is forced.
    """
    reasoning: Any = SimpleNamespace(reasoning_start_token_ids=[4], reasoning_end_token_ids=ends)
    holder = ThinkingBudgetStateHolder(reasoning, 1, 0, torch.device("cpu"), False)
    had = list(outputs[:begins_with])
    params = SamplingParams(thinking_token_budget=4)
    holder.sync_batch(BatchUpdate(1, [], [(0, params, [1, 4], had)], []))
    for token in outputs[begins_with:]:
        holder.update_state([had], None)
        logits = torch.zeros(1, VOCAB)
        logits[0, token] = 1.0
        had.append(int(holder.apply_to_logits(logits, False, None)[0].argmax()))
    return had[begins_with:]


def test_remaining_thinking_budget_does_not_follow_from_a_history() -> None:
    """vLLM's holder begins with the prompt: it forces the end again that the history has begun. So
    they stay.
    """
    thoughts, ends = [5] * 12, [7, 8, 9]
    undisturbed = forced(thoughts, 0, ends)
    assert undisturbed[:8] == [5, 5, 5, 5, 7, 8, 9, 5]
    assert forced(undisturbed, 5, ends)[:3] != undisturbed[5:8]
