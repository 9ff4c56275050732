"""Costs of a group's two ways to step, and what a server's start measures of them."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from flying_serving.parallelism import Parallelism
from flying_serving.predict.probes import probes
from flying_serving.predict.steps import Step, StepCost
from flying_serving.wire import CalibrationRow

TENSOR = StepCost(0.008, 4e-5, 6e-5, 2e-8, prefill_pair_s=2e-9)
TOKEN = StepCost(0.020, 2e-5, 3e-5, 2e-8, prefill_pair_s=2e-9)
"""Shorter from 600 prompt tokens on, or from 400 decoding requests."""
BOTH = {Parallelism.TENSOR: TENSOR, Parallelism.TOKEN: TOKEN}


def measured(
    size: int, costs: Mapping[Parallelism, StepCost] = BOTH, sequences: int = 256
) -> Iterator[CalibrationRow]:
    """Yield what the start of a server finds of a group with these costs."""
    for way, cost in costs.items():
        for probe in probes(sequences, 8192, 100_000):
            if probe.measures(size, way):
                batch = probe.tokens, probe.is_prefill, probe.context_tokens
                step = Step.of_probe(size, 1.0, *batch)
                contents = step.prefill_tokens, step.sequences, step.context_tokens
                seconds = cost.step_s(*contents, step.prefill_pairs)
                yield CalibrationRow(size, seconds, *batch, way)
