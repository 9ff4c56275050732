"""The planner of splits: where a request is divided between two groups, and when it stays whole."""

from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from flying_serving.policy.split import (
    MOST_PROBES,
    PROBES_AGAIN,
    TOLERANCE,
    PlannedLength,
    Rest,
    SplitCosts,
    VirtualBatch,
    is_better_elsewhere,
    plan,
)
from flying_serving.predict.migrations import MigrationCost
from flying_serving.predict.steps import StepCost
from flying_serving.predict.work import LaneFigures

BLOCK = 16
COST = StepCost(0.017, 1.3e-4, 1e-4, 1.7e-7, prefill_pair_s=1e-9)
LANE = LaneFigures(COST, max_num_seqs=256, kv_tokens=200_000, max_num_batched_tokens=2048)
CHEAP = MigrationCost(1e-4, 1e-6)
TERMS = SplitCosts(LANE, CHEAP, BLOCK, target_s=0.1)
BATCHES = st.builds(
    VirtualBatch,
    prefill_tokens=st.floats(0, 1e5),
    sequences=st.floats(0, 300),
    context_tokens=st.floats(0, 5000),
    tokens_left=st.floats(1, 2000),
)
LENGTHS = {"prompt_tokens": st.integers(1, 20_000), "output_tokens": st.integers(1, 4000)}
TARGETS = st.sampled_from([math.inf, 0.1, 0.02, 0.001])
BUSY = VirtualBatch(prefill_tokens=20_000, sequences=100, context_tokens=1000, tokens_left=200)


@given(**LENGTHS, a=BATCHES, b=BATCHES, target_s=TARGETS)
def test_a_split_is_a_token_of_the_request_found_in_four_probes(
    prompt_tokens: int, output_tokens: int, a: VirtualBatch, b: VirtualBatch, target_s: float
) -> None:
    """Inside the prompt it is on the edge of a block. Two probes of six are left."""
    found = plan(prompt_tokens, output_tokens, a, b, SplitCosts(LANE, CHEAP, BLOCK, target_s))
    assert 0 <= found.split <= prompt_tokens + output_tokens
    assert found.probes + PROBES_AGAIN <= MOST_PROBES == 6
    if found.split < prompt_tokens:
        assert found.split % BLOCK == 0


@given(**LENGTHS, a=BATCHES, b=BATCHES, target_s=TARGETS)
def test_a_split_is_predicted_to_gain_more_than_its_handoff(
    prompt_tokens: int, output_tokens: int, a: VirtualBatch, b: VirtualBatch, target_s: float
) -> None:
    costs = SplitCosts(LANE, CHEAP, BLOCK, target_s)
    found = plan(prompt_tokens, output_tokens, a, b, costs)
    if found.split in (0, prompt_tokens + output_tokens):
        assert found.finish_s == found.whole_s
    else:
        gain_s = found.whole_s - found.finish_s
        assert gain_s > costs.handoff_s(found.split, prompt_tokens)
        assert gain_s > TOLERANCE * found.whole_s


@given(**LENGTHS, both=BATCHES)
def test_equal_groups_do_not_split_if_the_handoff_is_dear(
    prompt_tokens: int, output_tokens: int, both: VirtualBatch
) -> None:
    dear = SplitCosts(LANE, MigrationCost(1e6, 1e-3), BLOCK, 0.1)
    found = plan(prompt_tokens, output_tokens, both, both, dear)
    assert found.split in (0, prompt_tokens + output_tokens)


@given(**LENGTHS, a=BATCHES, b=BATCHES)
def test_a_plan_is_no_worse_than_either_group_with_all_of_it(
    prompt_tokens: int, output_tokens: int, a: VirtualBatch, b: VirtualBatch
) -> None:
    found = plan(prompt_tokens, output_tokens, a, b, TERMS)
    all_on_a = a.with_prompt(prompt_tokens, 0).with_sequence(prompt_tokens, output_tokens)
    all_on_b = b.with_prompt(prompt_tokens, 0).with_sequence(prompt_tokens, output_tokens)
    assert found.finish_s <= found.whole_s
    assert found.whole_s >= min(TERMS.finish_s(all_on_a), TERMS.finish_s(all_on_b))


def test_a_long_prompt_is_divided_so_that_both_groups_finish_together() -> None:
    found = plan(8192, 32, BUSY, BUSY, TERMS)
    assert 3000 < found.split < 5500
    assert found.finish_s < 0.97 * found.whole_s


def test_the_group_that_has_more_to_do_gets_less() -> None:
    """As one has more prompts queued, or more requests that decode."""
    splits = [
        plan(8192, 32, VirtualBatch(queued, 100, 1000, 200), BUSY, TERMS).split
        for queued in (14_000, 20_000, 26_000)
    ]
    assert splits[0] > splits[1] > splits[2]
    splits = [
        plan(8192, 32, VirtualBatch(20_000, k, 1000, 200), BUSY, TERMS).split
        for k in (60, 100, 140)
    ]
    assert splits[0] > splits[1] > splits[2]


def test_an_idle_server_does_not_split() -> None:
    found = plan(2048, 512, VirtualBatch(), VirtualBatch(), TERMS)
    assert found.split in (0, 2560)


def test_group_with_full_kv_memory_gets_no_part() -> None:
    full = VirtualBatch(sequences=200, context_tokens=1000, tokens_left=500)
    assert plan(500, 500, full, VirtualBatch(2000, 20, 1000, 500), TERMS).split == 0
    assert plan(500, 500, VirtualBatch(2000, 20, 1000, 500), full, TERMS).split == 1000


def test_a_plan_tries_a_bounded_number_of_splits() -> None:
    for number in range(2000):
        batch = VirtualBatch(10.0 * number, number % 200, 1000, 200)
        made = plan(500 + number, 32 + number % 500, batch, BUSY, TERMS)
        assert made.probes <= MOST_PROBES - PROBES_AGAIN


def test_a_batch_has_the_sum_of_its_prompts_and_the_mean_of_its_requests() -> None:
    """Weighted by the share of their lives for which they are here; half a prompt is before each
    of its tokens, on average.
    """
    batch = VirtualBatch(100.0, 3.0, 50.0, 10.0, 7.0)
    longer = batch.with_prompt(40.0, 6.0)
    assert longer == VirtualBatch(140.0, 3.0, 50.0, 10.0, 7.0 + 40 * (6 + 20))
    more = batch.with_sequence(90.0, 20.0, 0.25)
    assert more == VirtualBatch(100.0, 3.25, (150 + 22.5) / 3.25, (30 + 5) / 3.25, 7.0)
    for tokens_left, share in ((0.0, 0.5), (5.0, 0.0)):
        assert batch.with_sequence(90.0, tokens_left, share) == batch
        assert VirtualBatch().with_sequence(90.0, tokens_left, share) == VirtualBatch()


FEW = StepCost(0.02, 1e-4, 2e-4, 1e-7, few_token_s=1e-3, prefill_pair_s=1e-9)


@pytest.mark.parametrize(
    ("batch", "target_s", "work_s", "passes"),
    [
        (VirtualBatch(5120.0, prefill_pairs=1e6), 0.03, 0.512 + 1e-3, 2.5),
        (VirtualBatch(0.0, 50, 1000.0, 9.0), math.inf, 3e-4 * 50 * 9, 9),
        (VirtualBatch(0.0, 50, 1000.0, 99.0), math.inf, 3e-4 * 50 * 16, 16),
        (VirtualBatch(40_960.0, 50, 1000.0, 9.0), math.inf, 4.096 + 3e-4 * 50 * 9, 20),
        (VirtualBatch(0.0, 320, 1000.0, 9.0), math.inf, 3e-4 * 320 * 9, 9 + 0.614_4 * 9),
        (VirtualBatch(0.0, 160, 1000.0, 900.0), math.inf, 3e-4 * 160 * 16, 16 + 0.52 * 900),
        (VirtualBatch(5120.0, 50, 1000.0, 9.0), 0.03, 0.512 + 0.135, 64.7),
        (VirtualBatch(5120.0, 50, 1000.0, 9.0), 0.021, 0.512 + 0.135, 323.5),
    ],
)
def test_a_batch_takes_its_work_and_a_fixed_time_for_each_pass(
    batch: VirtualBatch, target_s: float, work_s: float, passes: float
) -> None:
    """The passes are those of full prompts, of one block of tokens, of requests that wait for room,
    or of a target that leaves 10 ms of a pass, and a tenth of its fixed time at least.
    """
    lane = LaneFigures(FEW, max_num_seqs=200, kv_tokens=200_000, max_num_batched_tokens=2048)
    costs = SplitCosts(lane, CHEAP, BLOCK, target_s)
    assert costs.finish_s(batch) == pytest.approx(work_s + passes * (0.02 + 8e-3))


def test_groups_that_differ_by_less_than_a_second_are_balanced() -> None:
    found = plan(
        2048, 32, VirtualBatch(4000, 50, 500, 100), VirtualBatch(4500, 50, 500, 100), TERMS
    )
    assert 0 < found.split < 2048


# ---- what a plan costs


def batches_asked(monkeypatch: pytest.MonkeyPatch) -> list[VirtualBatch]:
    """Return a list that gets each batch whose time is predicted from now on."""
    asked: list[VirtualBatch] = []
    predict = SplitCosts.finish_s

    def finish_s(costs: SplitCosts, batch: VirtualBatch) -> float:
        asked.append(batch)
        return predict(costs, batch)

    monkeypatch.setattr(SplitCosts, "finish_s", finish_s)
    return asked


def test_a_plan_predicts_two_batches_a_probe_and_the_request_alone(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A closed form each: a plan takes no longer in a full server than in an idle one."""
    asked = batches_asked(monkeypatch)
    for number in range(300):
        batch = VirtualBatch(300.0 * number, number, 1000, 200)
        asked.clear()
        made = plan(500 + 20 * number, 32 + number, batch, BUSY, TERMS)
        assert len(asked) == 2 * made.probes + 2 <= 10


def test_planning_again_predicts_two_batches_a_probe(monkeypatch: pytest.MonkeyPatch) -> None:
    asked = batches_asked(monkeypatch)
    is_better_elsewhere(Rest(500, 100), BUSY, VirtualBatch(), TERMS)
    assert len(asked) == 2 * PROBES_AGAIN


# ---- requests that are planned again

RESTS = st.builds(Rest, st.integers(1, 20_000), st.floats(1, 4000))


@given(rest=RESTS, a=BATCHES, b=BATCHES, target_s=TARGETS)
def test_a_rest_is_better_in_one_of_two_groups_at_most(
    rest: Rest, a: VirtualBatch, b: VirtualBatch, target_s: float
) -> None:
    """It would go to and fro otherwise."""
    costs = SplitCosts(LANE, CHEAP, BLOCK, target_s)
    to_b, to_a = (is_better_elsewhere(rest, *both, costs) for both in ((a, b), (b, a)))
    assert not (to_a and to_b)


@given(rest=RESTS, both=BATCHES)
def test_a_rest_stays_between_groups_that_are_alike(rest: Rest, both: VirtualBatch) -> None:
    assert not is_better_elsewhere(rest, both, both, TERMS)


def test_a_rest_leaves_a_group_whose_kv_memory_is_full() -> None:
    """Unless its KV takes longer to pull than that gains."""
    full = VirtualBatch(sequences=40, context_tokens=5000, tokens_left=2000)
    half = VirtualBatch(sequences=15, context_tokens=5000, tokens_left=2000)
    rest = Rest(5000, 2000)
    assert is_better_elsewhere(rest, full, half, TERMS)
    assert not is_better_elsewhere(rest, half, full, TERMS)
    dear = SplitCosts(LANE, MigrationCost(1e3, 1e-6), BLOCK, 0.1)
    assert not is_better_elsewhere(rest, full, half, dear)


def test_a_request_is_planned_again_as_often_as_its_probes_allow() -> None:
    made = PlannedLength(100, MOST_PROBES - PROBES_AGAIN)
    assert made.may_change
    again = made.again(300)
    assert (again.output_tokens, again.probes, again.is_revised) == (300, MOST_PROBES, True)
    assert not again.may_change


@pytest.mark.parametrize(
    ("output_tokens", "differs"), [(74, True), (75, False), (125, False), (126, True)]
)
def test_an_expected_length_differs_by_more_than_a_quarter(
    output_tokens: int, differs: bool
) -> None:
    assert PlannedLength(100).differs_from(output_tokens) == differs
