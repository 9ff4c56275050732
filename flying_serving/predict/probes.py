"""The steps that a server measures at its start, so that policies know its speed before traffic
shows it.

They reach from steps bound by reading weights to steps bound by arithmetic. A line through small
steps alone says nothing of large steps on a device with much arithmetic. Decoding is measured with
little context and with much, prompts also with much before them. Otherwise lanes that have not
served yet would seem not to mind context.
"""

from dataclasses import dataclass

from flying_serving.parallelism import Parallelism

ENOUGH_S = 0.5
"""Seconds of a probe after which no larger one of its kind follows."""
SHORT_TOKENS, LONG_TOKENS = 16, 1024
_SEQUENCES = (1, 8, 64, 256)
_PROMPTS = (64, 256, 1024, 4096)
_DIVIDED = 64
"""Tokens of a probe from which groups of several engines measure it token parallel too. Smaller
steps are bound by reading weights, of which tensor parallel ones read less.
"""
_PIECE = 256
"""Tokens of a piece of a long prompt."""
_BEFORE = (8192, 32_768, 131_072, 524_288)
"""Tokens before it. Where reading weights takes most of a step, few tokens before it hide what each
of them costs.
"""


@dataclass(frozen=True)
class Probe:
    """A step of `tokens` tokens: of one prompt, or one of each decoding request. Each has a
    context.
    """

    tokens: int
    is_prefill: bool
    context_tokens: int = 0

    @property
    def kind(self) -> tuple[bool, int]:
        """The part that the probe has in common with smaller and larger ones. Pieces of long
        prompts have their tokens in common.
        """
        if self.is_prefill and self.context_tokens:
            return True, self.tokens
        return self.is_prefill, self.context_tokens

    def measures(self, size: int, parallelism: Parallelism) -> bool:
        """Return whether groups of `size` engines measure this probe so."""
        return parallelism is Parallelism.TENSOR or (size > 1 and self.tokens >= _DIVIDED)


def probes(sequences: int, step_tokens: int, prompt_tokens: int) -> list[Probe]:
    """Return the probes to measure, the smallest of each kind first; larger ones are cut to the
    limits.

    A step has at most `sequences` requests and `step_tokens` tokens, a prompt at most
    `prompt_tokens`.
    """
    decode = sorted({min(count, sequences, step_tokens) for count in _SEQUENCES})
    prompts = sorted({min(count, step_tokens, prompt_tokens) for count in _PROMPTS})
    contexts = sorted({min(count, prompt_tokens) for count in (SHORT_TOKENS, LONG_TOKENS)})
    short_first = [Probe(count, False, context) for context in contexts for count in decode]
    piece = min(_PIECE, step_tokens, prompt_tokens // 2)
    room = prompt_tokens - piece
    before = [count for count in _BEFORE if count <= room] or [room]
    later = [Probe(piece, True, count) for count in before] if piece else []
    return short_first + [Probe(count, True) for count in prompts] + later
