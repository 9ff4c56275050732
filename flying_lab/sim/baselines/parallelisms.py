"""Steps of pipelines of engines."""

from flying_lab.sim.cost import LaneCost
from flying_lab.sim.hardware import RANKS
from flying_lab.sim.machine import DegreeTime, Modelled
from flying_lab.sim.models import ACTIVATION_BYTES
from flying_lab.sim.requests import Chunk, SimStep


def pipelined(machine: Modelled, base: int, stages: int) -> DegreeTime:
    """Return step times of a pipeline of `stages` engines of `base` devices, each with its share of
    the layers.

    The step's requests form as many microbatches as there are stages, and each prompt is cut into
    this number of pieces. No stage ever waits for another one (the best that a pipeline can do). So
    a token takes the time of its microbatch on one engine with all layers, and a message from stage
    to stage.
    """
    cost = LaneCost(machine.model, machine.kind.hardware, base)
    line, link = (
        machine.kind.hardware.all_reduce[RANKS[0]].large,
        machine.kind.hardware.spec.link_bandwidth.value,
    )

    def seconds(step: SimStep) -> float:
        decodes = min(step.sequences, max(1.0, step.sequences / stages))
        context = step.decode_context_tokens * decodes / max(1, step.sequences)
        pieces = []
        for new, before in step.chunks:
            piece = -(-new // stages)
            pieces.append(Chunk(piece, before + (new - piece) // 2))
        tokens = decodes + sum(piece.new_tokens for piece in pieces)
        message_s = line.latency_s.value
        message_s += (
            tokens * machine.model.hidden * ACTIVATION_BYTES / (link * line.efficiency.value)
        )
        return cost.step_s(decodes, context, pieces) + stages * message_s

    return seconds
