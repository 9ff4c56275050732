"""StepModel: costs come out of noisy steps, whatever their mix; they are never negative."""

import random
from collections.abc import Iterable
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from flying_serving.predict.probes import probes
from flying_serving.predict.steps import FEW, SOME, Step, StepCost, StepModel
from harness.examples import examples
from tests.unit.policy.costs import ONE, costs, measured

TRUTHS = st.builds(
    StepCost,
    fixed_s=st.floats(0.001, 0.1),
    prefill_token_s=st.floats(1e-5, 2e-3),
    sequence_s=st.floats(1e-5, 5e-3),
    context_token_s=st.floats(0, 1e-6),
)
BATCHES = [(0, 1, 500), (0, 16, 8000), (0, 64, 60_000), (256, 4, 1000), (512, 8, 6000)]


def traffic(
    truth: StepCost, count: int, seed: int, *, prompts: bool = True, size: int = 1
) -> list[Step]:
    """Return steps as they come in serving, with a tenth of noise."""
    draw = random.Random(seed)
    steps = []
    for _ in range(count):
        sequences = draw.randint(1, 64)
        prefill = draw.randint(1, 512) if prompts and draw.random() < 0.3 else 0
        context = sequences * draw.randint(50, 1000)
        duration_s = truth.step_s(prefill, sequences, context) * draw.uniform(0.9, 1.1)
        steps.append(Step(size, duration_s, prefill, sequences, context))
    return steps


def started(truth: StepCost, longest_tokens: int = 4096) -> list[Step]:
    """Return what the start of a server measures."""
    probed = [
        Step.of_probe(1, 1.0, probe.tokens, probe.is_prefill, probe.context_tokens)
        for probe in probes(256, 4096, longest_tokens)
    ]
    return [
        replace(
            s,
            duration_s=truth.step_s(
                s.prefill_tokens, s.sequences, s.context_tokens, s.prefill_pairs
            ),
        )
        for s in probed
    ]


def model(steps: Iterable[Step], calibration: Iterable[Step] = ()) -> StepModel:
    """Return what was learned."""
    result = StepModel()
    result.calibrate(calibration)
    for step in steps:
        result.observe(step)
    return result


def assert_close(found: StepCost, truth: StepCost, share: float, least_sequences: int = 0) -> None:
    """Typical steps are predicted within that share; only those with prompts or so many requests,
    if asked for.
    """
    for batch in (b for b in BATCHES if b[0] or b[1] >= least_sequences):
        assert found.step_s(*batch) == pytest.approx(truth.step_s(*batch), rel=share), batch


@settings(max_examples=examples(30))
@given(truth=TRUTHS, seed=st.integers(0, 1000))
def test_known_costs_come_out_of_noisy_steps(truth: StepCost, seed: int) -> None:
    """From traffic alone; what counts is how well steps are predicted."""
    assert_close(model(traffic(truth, 600, seed)).cost(1), truth, 0.15)


@settings(max_examples=examples(30))
@given(truth=TRUTHS)
def test_the_calibration_of_a_start_is_enough(truth: StepCost) -> None:
    """Without noise it is met, but for what a few steps cannot tell apart."""
    found = model([], measured({1: truth})).cost(1)
    assert_close(found, truth, 0.05)
    assert found.fixed_s == pytest.approx(truth.fixed_s, rel=0.02)


@settings(max_examples=examples(30))
@given(few=st.floats(0, 5e-3), some=st.floats(0, 1e-3), seed=st.integers(0, 1000))
def test_the_first_tokens_of_a_step_may_cost_more(few: float, some: float, seed: int) -> None:
    """As where each needs experts of its own: of prompts as of decoding requests, up to so many."""
    truth = replace(ONE, few_token_s=few, some_token_s=some)
    assert truth.step_s(0, SOME, 0) == pytest.approx(
        ONE.step_s(0, SOME, 0) + FEW * few + SOME * some
    )
    assert truth.step_s(100, 0, 0) - truth.step_s(SOME, 0, 0) == pytest.approx(
        ONE.prefill_token_s * (100 - SOME)
    )
    assert_close(model([], started(truth)).cost(1), truth, 0.05)


def test_prompt_cost_stays_as_measured_while_steps_only_decode() -> None:
    """A thousand steps that only decode say nothing of prompts."""
    found = model(traffic(ONE, 3000, 1, prompts=False), measured({1: ONE})).cost(1)
    assert found.prefill_token_s == pytest.approx(ONE.prefill_token_s, rel=0.1)
    assert_close(found, ONE, 0.1)


@settings(max_examples=examples(30))
@given(truth=TRUTHS, pair_s=st.floats(0, 1e-8))
def test_start_measures_the_cost_of_long_prompts(truth: StepCost, pair_s: float) -> None:
    """One with 8,192 tokens before it is measured, so that one with a million before it is known as
    well.
    """
    truth = replace(truth, prefill_pair_s=pair_s)
    found = model([], started(truth, 9000)).cost(1)
    for before in (0, 10_000, 1_000_000):
        piece = (2048, 0, before, 2048 * before)
        assert found.step_s(*piece) == pytest.approx(truth.step_s(*piece), rel=0.05)


@pytest.mark.parametrize("more_s", [0.0, 0.0005, 0.002])
def test_small_served_steps_correct_the_cost_of_large_ones(more_s: float) -> None:
    """Each request that decodes takes so much more while serving; one to eight were seen at a
    time.
    """
    serving = replace(ONE, sequence_s=ONE.sequence_s + more_s)
    served = [s for s in traffic(serving, 8000, 1) if s.sequences <= FEW]
    assert_close(model(served, started(ONE)).cost(1), serving, 0.05)


@pytest.mark.parametrize("share", [0.0, 0.1, 0.3])
def test_few_dozen_prompts_show_the_overhead_of_serving(share: float) -> None:
    """Each token takes so much more than at the start."""
    serving = replace(ONE, prefill_token_s=ONE.prefill_token_s * (1 + share))
    served = [s for s in traffic(serving, 400, 1) if s.prefill_tokens]
    found = model(served, started(ONE)).cost(1)
    for batch in (b for b in BATCHES if b[0]):
        assert found.step_s(*batch) == pytest.approx(serving.step_s(*batch), rel=0.03), batch


def test_the_first_served_prompts_are_not_believed_yet() -> None:
    """Three short ones took a third more than the start says: a long one is predicted nearly as it
    was.
    """
    first = [Step(1, 1.33 * ONE.step_s(tokens, 0, 0), tokens, 0, 0) for tokens in (20, 30, 40)]
    found = model(first, started(ONE)).cost(1)
    assert found.step_s(512, 0, 0) == pytest.approx(ONE.step_s(512, 0, 0), rel=0.2)


def test_steps_that_were_delayed_weigh_little() -> None:
    """One in twenty takes ten times as long."""
    steps = enumerate(traffic(ONE, 2000, 1))
    delayed = [
        replace(step, duration_s=step.duration_s * (10 if n % 20 == 0 else 1)) for n, step in steps
    ]
    assert_close(model(delayed, measured({1: ONE})).cost(1), ONE, 0.15)


def test_old_steps_fade() -> None:
    """When a neighbour on the machine slows everything down, so do predictions, and back again."""
    slow = StepCost(
        *(
            2 * value
            for value in (ONE.fixed_s, ONE.prefill_token_s, ONE.sequence_s, ONE.context_token_s)
        )
    )
    learned = model(traffic(ONE, 1000, 1), measured({1: ONE}))
    for truth, seed in ((slow, 2), (ONE, 3)):
        for step in traffic(truth, 5000, seed):
            learned.observe(step)
        assert_close(learned.cost(1), truth, 0.15, least_sequences=16)


@pytest.mark.parametrize("share", [0.0, 0.1, 0.2])
def test_a_lane_that_has_not_served_is_held_near_the_others(share: float) -> None:
    """Else it would seem cheap beside those that have; once it has served, its own steps count."""
    lanes = costs((1, 2))
    more = 1 + share
    serving = {
        size: replace(
            cost, prefill_token_s=more * cost.prefill_token_s, sequence_s=more * cost.sequence_s
        )
        for size, cost in lanes.items()
    }
    starts = [replace(step, size=size) for size, cost in lanes.items() for step in started(cost)]
    learned = model(traffic(serving[2], 500, 1, size=2), starts)
    assert_close(learned.cost(1), serving[1], 0.05)
    for step in traffic(ONE, 500, 1):
        learned.observe(step)
    assert_close(learned.cost(1), ONE, 0.05)


def test_lanes_are_learned_apart() -> None:
    """Each by its own steps; one that was never measured is unknown."""
    lanes = costs((1, 2))
    learned = model(traffic(lanes[2], 500, 1, size=2), measured(lanes))
    assert_close(learned.cost(1), lanes[1], 0.02)
    assert_close(learned.cost(2), lanes[2], 0.1)
    assert [learned.known(size) for size in (1, 2, 4)] == [True, True, False]
    with pytest.raises(KeyError, match="no tensor parallel step of group size 4 was measured"):
        learned.cost(4)


@given(
    st.lists(
        st.builds(
            Step,
            size=st.just(1),
            duration_s=st.floats(1e-5, 100),
            prefill_tokens=st.integers(0, 100_000),
            sequences=st.integers(0, 1000),
            context_tokens=st.integers(0, 10**7),
        ),
        min_size=1,
        max_size=30,
    )
)
def test_costs_are_never_negative(steps: list[Step]) -> None:
    """Whatever was measured: more in a step never makes it shorter, and no step is free."""
    found = model(steps).cost(1)
    assert min(found.fixed_s, found.prefill_token_s, found.sequence_s, found.context_token_s) >= 0
    assert found.step_s(512, 8, 5000) > 0
