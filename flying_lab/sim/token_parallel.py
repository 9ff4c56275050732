"""Steps of a group that divides the tokens: sequence parallelism, and a server's own groups."""

from __future__ import annotations

from collections.abc import Callable

from flying_lab.sim.cost import LaneCost
from flying_lab.sim.hardware import Hardware
from flying_lab.sim.models import ACTIVATION_BYTES, Model
from flying_lab.sim.requests import Chunk, SimStep

EXCHANGES_LAUNCH = 0.3
"""Launches of a layer's two exchanges and of the copies around them, as a share of an eager layer's
launches. Assumed, not measured.
"""


def sequence_parallel(
    model: Model, hardware: Hardware, base: int, degree: int
) -> Callable[[SimStep], float]:
    """Return step times that divide the tokens over `degree / base` parts, each with the weights of
    `base` devices.

    Attention is divided by heads, as in a tensor parallel step, with an exchange of activations
    before and after it.
    """
    tensor, part = LaneCost(model, hardware, degree), LaneCost(model, hardware, base)
    parts = degree // base
    # the share of an all-to-all that one part moves
    row_bytes = model.hidden * ACTIVATION_BYTES / (2 * parts)

    def seconds(step: SimStep) -> float:
        tokens = step.sequences + step.prefill_tokens
        all_to_all_s = 2 * model.layers * tensor.all_reduce_s(tokens * row_bytes)
        attention_s = tensor.attention_s(step.sequences, step.decode_context_tokens, step.chunks)
        return without_attention_s(part, -(-tokens // parts)) + attention_s + all_to_all_s

    return seconds


def without_attention_s(part: LaneCost, tokens: int) -> float:
    """Return the seconds of a step of one part, which computes these tokens of prompts, without its
    attention.
    """
    share = [Chunk(tokens, 0)]
    return part.step_s(0, 0, share) - part.attention_s(0, 0, share)


def launched(
    model: Model, hardware: Hardware, base: int, degree: int
) -> Callable[[SimStep], float]:
    """Return the same for a group of our server, whose token parallel steps are no CUDA graphs: at
    least the time to launch them.
    """
    divided, fitted = sequence_parallel(model, hardware, base, degree), hardware.coefficients
    launch_s = (1.0 + EXCHANGES_LAUNCH) * model.layers * fitted.eager_layer_s.value
    least_s = launch_s + fitted.step_overhead_s.value

    def seconds(step: SimStep) -> float:
        return max(divided(step), least_s)

    return seconds
