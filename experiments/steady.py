"""What a constant load does to one lane, from step times alone: no queue, no trace, averages
only.
"""

from __future__ import annotations

from dataclasses import dataclass

from flying_lab.sim.cost import LaneCost, Prefill
from flying_lab.sim.memory import MAX_BATCHED_TOKENS

_ITERATIONS = 200
_CHANGE = 1e-9


@dataclass(frozen=True)
class Load:
    """Requests of one shape, and how prompts are cut."""

    prompt_tokens: int
    output_tokens: int
    chunk_tokens: int = MAX_BATCHED_TOKENS
    """Tokens that a step computes at most."""

    @property
    def mean_context_tokens(self) -> float:
        """Tokens that a decoding request has in its KV cache, on average over its life."""
        return self.prompt_tokens + self.output_tokens / 2


@dataclass(frozen=True)
class Steady:
    """A full engine: a constant number of requests decode, with prompts of new ones in between."""

    requests_per_s: float
    tpot_s: float
    sequences: float


def prefill_s(cost: LaneCost, load: Load) -> float:
    """Seconds to compute a prompt alone, chunk after chunk."""
    seconds = 0.0
    for before in range(0, load.prompt_tokens, load.chunk_tokens):
        new = min(load.chunk_tokens, load.prompt_tokens - before)
        seconds += cost.step_s(0, 0, ((new, before),))
    return seconds


def tpot_s(cost: LaneCost, load: Load, rate_per_s: float) -> float:
    """Mean seconds per output token if requests come at a rate well below what the engine can do.

    A decoding request gets one token from each step; at this rate, some of the steps also compute a
    prompt. The number of decoding requests follows from Little's law, so the time per token is the
    fixed point of this function.
    """
    chunks = -(-load.prompt_tokens // load.chunk_tokens)
    prompt_s = prefill_s(cost, load)
    seconds = cost.step_s(1, load.mean_context_tokens)
    for _ in range(_ITERATIONS):
        decodes = max(1.0, rate_per_s * load.output_tokens * seconds)
        decode_s = cost.step_s(decodes, decodes * load.mean_context_tokens)
        left = max(0.01, 1.0 - rate_per_s * prompt_s)
        previous, seconds = seconds, 1.0 / (rate_per_s * chunks + left / decode_s)
        if abs(seconds - previous) < _CHANGE * seconds:
            break
    return seconds


def ttft_s(cost: LaneCost, load: Load, rate_per_s: float) -> float:
    """Mean seconds to the first token at light load.

    The server's part, waiting for prompts that came before (one server, constant service time,
    Poisson arrivals: Pollaczek-Khinchine), the rest of the step under way, and the prompt itself.
    """
    prompt_s = prefill_s(cost, load)
    busy = min(0.99, rate_per_s * prompt_s)
    wait_s = busy * prompt_s / (2.0 * (1.0 - busy))
    token_s = tpot_s(cost, load, rate_per_s)
    decodes = rate_per_s * load.output_tokens * token_s
    decode_s = cost.step_s(max(1.0, decodes), max(1.0, decodes) * load.mean_context_tokens)
    rest_s = (1.0 - busy) * min(1.0, decodes) * decode_s / 2.0
    return cost.hardware.coefficients.frontend_s.value + wait_s + rest_s + prompt_s


def full(cost: LaneCost, load: Load, sequences: float) -> Steady:
    """An engine with a constant number of decoding requests.

    Each finished request is replaced by a new one, so per step `sequences / output_tokens` prompts
    have to be computed. If these do not fit in the steps' tokens, fewer requests are decoding.
    """
    fitting = load.chunk_tokens * load.output_tokens / (load.prompt_tokens + load.output_tokens)
    decodes = min(sequences, fitting)
    context = decodes * load.mean_context_tokens
    prompt_per_step = load.prompt_tokens * decodes / load.output_tokens
    piece = min(float(load.prompt_tokens), load.chunk_tokens - decodes)
    share = min(1.0, prompt_per_step / piece)
    if share == 1.0:
        piece = prompt_per_step
    with_prompt_s = cost.step_s(decodes, context, _pieces(load, piece))
    token_s = share * with_prompt_s + (1.0 - share) * cost.step_s(decodes, context)
    return Steady(decodes / (load.output_tokens * token_s), token_s, decodes)


def _pieces(load: Load, tokens: float) -> list[Prefill]:
    """Prompt tokens of one step: a chunk from the middle of a prompt, or several whole prompts."""
    if tokens <= load.prompt_tokens:
        return [(int(tokens), int((load.prompt_tokens - tokens) / 2))]
    whole, rest = divmod(int(tokens), load.prompt_tokens)
    return [(load.prompt_tokens, 0)] * whole + ([(rest, 0)] if rest else [])
