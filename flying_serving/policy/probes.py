"""The steps that a server measures at its start, so that policies know what it can do before traffic shows it.

They reach from what is bound by reading weights to what is bound by arithmetic: a line through small steps alone says
nothing of what a device with much arithmetic does with large ones.
"""

from __future__ import annotations

from dataclasses import dataclass

ENOUGH_S = 0.5
"""A probe is not repeated any more after so long, and no larger one of its kind follows if this one took so long."""
_SEQUENCES = (1, 8, 64, 256)
_PROMPTS = (64, 256, 1024, 4096)


@dataclass(frozen=True)
class Probe:
    """A step with so many tokens: of one prompt, or one of each of so many decoding requests."""

    tokens: int
    is_prefill: bool


def probes(sequences: int, step_tokens: int, prompt_tokens: int) -> list[Probe]:
    """What to measure, the smallest of each kind first; the most that a step allows in place of what it does not.

    Args:
        sequences: requests of a step at most.
        step_tokens: its tokens at most.
        prompt_tokens: tokens of one prompt at most.
    """
    decode = sorted({min(count, sequences, step_tokens) for count in _SEQUENCES})
    prompts = sorted({min(count, step_tokens, prompt_tokens) for count in _PROMPTS})
    return [Probe(count, False) for count in decode] + [Probe(count, True) for count in prompts]
