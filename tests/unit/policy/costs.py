"""Step costs that tests start from: one engine, and groups that are worth forming or are not."""

from collections.abc import Mapping

from flying_serving.predict.steps import Step, StepCost

ONE = StepCost(0.025, 0.0012, 0.002, 5e-7)

Costs = Mapping[int, StepCost]


def costs(sizes: tuple[int, ...] = (1, 2), fixed: float = 0.7, rest: float = 0.6) -> Costs:
    """By group size: `fixed` times one engine's per step, and `rest` times for what is in it at
    each doubling.

    As they are, groups are faster for one request and do less per second than their engines apart.
    """
    result = {}
    for size in sizes:
        doublings = size.bit_length() - 1
        share = rest**doublings
        result[size] = StepCost(
            ONE.fixed_s * (fixed if doublings else 1.0),
            ONE.prefill_token_s * share,
            ONE.sequence_s * share,
            ONE.context_token_s * share,
        )
    return result


def measured(lanes: Costs) -> list[Step]:
    """What a server's calibration finds of these."""
    batches = [(0, 1, 16), (0, 8, 128), (64, 0, 0), (256, 0, 0), (0, 8, 8000)]
    return [
        Step(size, cost.step_s(prefill, sequences, context), prefill, sequences, context)
        for size, cost in lanes.items()
        for prefill, sequences, context in batches
    ]
