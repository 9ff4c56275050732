"""Shift Parallelism (Arctic Inference): each step is tensor parallel or sequence parallel, as is
faster.
"""

from flying_lab.sim.cost import LaneCost
from flying_lab.sim.machine import DegreeTime, Modelled
from flying_lab.sim.requests import SimStep
from flying_lab.sim.token_parallel import sequence_parallel


def shifting(machine: Modelled, base: int, degree: int) -> DegreeTime:
    """Return step times of Shift Parallelism: the faster of tensor parallel over all and sequence
    parallel over `degree / base`.
    """
    tensor = LaneCost(machine.model, machine.kind.hardware, degree)
    sequence = sequence_parallel(machine.model, machine.kind.hardware, base, degree)
    parts = degree // base

    def seconds(step: SimStep) -> float:
        whole_s = tensor.step_s(step.sequences, step.decode_context_tokens, step.chunks)
        if parts == 1 or step.sequences + step.prefill_tokens < parts:
            return whole_s
        return min(whole_s, sequence(step))

    return seconds
