"""What a server learns at its start from the steps that it measures."""

import pytest

from flying_lab.sim.catalog import build
from flying_lab.sim.cluster import Options
from flying_lab.sim.run import simulate
from flying_lab.workload.model import Request, Workload
from flying_serving.predict.steps import StepModel
from tests.unit.lab.sim.machines import h200


@pytest.mark.parametrize("model", ["llama-3-8b", "nemotron-8b"])
def test_attention_to_earlier_tokens_of_a_prompt_divides_by_the_degree(model: str) -> None:
    """Its cost hides in steps that read all weights, unless many tokens are before a piece."""
    machine = h200(model, "h200x8")
    auto = build("auto", machine, machine.smallest_engine, Options(max_num_seqs=256))
    steps = StepModel()
    steps.calibrate(auto.calibration)
    whole = [steps.cost(size).prefill_pair_s * size for size in (1, 2, 4, 8)]
    assert max(whole) <= 1.25 * min(whole)


@pytest.mark.parametrize("prompt_tokens", [300_000, 700_000])
def test_the_widest_group_computes_a_long_prompt_that_is_alone(prompt_tokens: int) -> None:
    machine = h200("nemotron-8b", "h200x8")
    auto = build("auto", machine, machine.smallest_engine, Options(keep_times=False))
    alone = Workload("alone", 0, (Request(0, 0.0, prompt_tokens, 2),))
    outcome = simulate(auto, alone.requests)
    assert len(outcome.ended) == 1
    assert [change.layout.shape for change in outcome.layouts] == [(1,) * 8, (8,)]
