"""Steps of pipelines beside those of one engine."""

from __future__ import annotations

import pytest

from flying_lab.sim import hardware, models
from flying_lab.sim.baselines.parallelisms import pipelined
from flying_lab.sim.machine import Modelled
from flying_lab.sim.requests import Chunk, SimStep

MACHINE = Modelled(models.load("qwen2.5-32b"), hardware.parse_devices("h20x4"))
ALONE = MACHINE.step_time(1)
PIPELINE = pipelined(MACHINE, 1, 4)
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
