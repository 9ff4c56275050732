"""Steps of pipelines and of sequence parallel groups beside those of one engine."""

from __future__ import annotations

import pytest

from flying_lab.sim import hardware, models
from flying_lab.sim.baselines.parallelisms import pipelined, sequence_parallel
from flying_lab.sim.baselines.shift_parallel import shifting
from flying_lab.sim.baselines.token_split import TokenSplit
from flying_lab.sim.cost import LaneCost
from flying_lab.sim.machine import DegreeTime, Modelled
from flying_lab.sim.requests import Chunk, SimStep

MACHINE = Modelled(models.load("qwen2.5-32b"), hardware.parse_devices("h20x4"))
ALONE = MACHINE.step_time(1)
PIPELINE, SEQUENCE = pipelined(MACHINE, 1, 4), sequence_parallel(MACHINE, 1, 4)
ONE = SimStep([], 1, 4000)


def test_a_single_request_decodes_no_faster_in_a_pipeline() -> None:
    assert ALONE(ONE) < PIPELINE(ONE) < 1.02 * ALONE(ONE)


def test_a_full_pipeline_does_the_work_of_four_engines() -> None:
    """Each microbatch has a quarter of the requests, and all stages are busy."""
    many, quarter = SimStep([], 64, 64_000), SimStep([], 16, 16_000)
    assert PIPELINE(many) == pytest.approx(ALONE(quarter), rel=0.02)


def test_a_prompt_passes_through_a_pipeline_in_pieces() -> None:
    whole = SimStep([Chunk(2048, 4096)])
    assert ALONE(whole) / 4 < PIPELINE(whole) < ALONE(whole) / 3


def test_each_sequence_parallel_part_reads_all_weights() -> None:
    """So decoding is as slow as alone, and a prompt almost four times as fast."""
    prompt = SimStep([Chunk(8192, 0)])
    assert 0.9 * ALONE(ONE) < SEQUENCE(ONE) < 1.2 * ALONE(ONE)
    assert ALONE(prompt) / 4 < SEQUENCE(prompt) < ALONE(prompt) / 3


def all_to_alls_s(machine: Modelled, base: int, degree: int, time: DegreeTime) -> float:
    """The seconds of a step of 8,192 tokens beside its products and attention."""
    engine, heads = (LaneCost(machine.model, machine.kind.hardware, n) for n in (base, degree))
    step, share = SimStep([Chunk(8192, 0)]), [Chunk(8192 * base // degree, 0)]
    products_s = engine.step_s(0, 0, share) - engine.attention_s(0, 0, share)
    return time(step) - products_s - heads.attention_s(0, 0, step.chunks)


@pytest.mark.parametrize(
    ("model", "devices", "base"), [("qwen2.5-32b", "h20x4", 1), ("llama-3-70b", "h200x8", 2)]
)
def test_sequence_parallel_and_shift_steps_pay_for_their_all_to_alls(
    model: str, devices: str, base: int
) -> None:
    """Two in each layer, of a share of the activations; nothing is faster than the data sheet."""
    machine = Modelled(models.load(model), hardware.parse_devices(devices))
    degree, spec = machine.devices, machine.kind.hardware.spec
    sent_bytes = 2 * machine.model.layers * 8192 * machine.model.hidden * 2 / degree
    sent_bytes *= (degree - 1) / degree
    for time in (sequence_parallel(machine, base, degree), shifting(machine, base, degree)):
        assert all_to_alls_s(machine, base, degree, time) > sent_bytes / spec.link_bandwidth.value


@pytest.mark.parametrize("model", ["llama-3-70b", "gpt-oss-120b", "nemotron-8b"])
def test_shift_all_to_alls_are_near_the_ones_that_count_heads(model: str) -> None:
    """Shift's count the residual's width for the heads, and no keys and values."""
    machine = Modelled(models.load(model), hardware.parse_devices("h200x8"), 0.8)
    split = TokenSplit.of(machine, machine.smallest_engine)
    shift = sequence_parallel(machine, split.base, split.degree)
    for tokens in (2048, 8192):
        step = SimStep([Chunk(tokens, 0)])
        assert shift(step) == pytest.approx(split.prompt_s(step), rel=0.05)
