"""Profiles of emulated devices: their blocks and step times are those of the simulated machine."""

import pytest

from flying_lab.emulation.command import profile
from flying_lab.emulation.profile import KEY, Profile, profile_of
from flying_lab.emulation.stand_in import BLOCK_TOKENS, kv_heads
from flying_lab.sim import machine
from flying_lab.sim.requests import Chunk, SimStep
from flying_serving.errors import ConfigError
from flying_serving.layout.shards import lane_block_tokens
from flying_serving.parallelism import Parallelism

LLAMA = {"hardware": "h200x8", "model": "llama-3-70b"}


def emulated(**fields: object) -> Profile:
    return Profile.model_validate(LLAMA | {"devices_per_engine": 2} | fields)


def test_an_engine_has_the_fewest_devices_that_hold_the_model() -> None:
    found = profile(LLAMA | {"devices_per_engine": None})
    assert (found.devices_per_engine, found.engines) == (2, 4)


def test_a_number_of_devices_that_does_not_hold_the_model_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"--devices-per-engine=1: must be one of 2, 4, 8"):
        profile(LLAMA | {"devices_per_engine": 1})


@pytest.mark.parametrize("execution", ["graph", "eager"])
@pytest.mark.parametrize("size", [1, 2, 4])
def test_a_step_lasts_as_long_as_that_of_the_machine(execution: str, size: int) -> None:
    made = emulated(execution=execution, slowdown=3.0)
    step = SimStep([Chunk(512, 1024)], 16, 16 * 700)
    expected_s = made.machine.step_time(2 * size, made.execution)(step)
    assert made.lane(size).step_s(step) == pytest.approx(3.0 * expected_s)


@pytest.mark.parametrize("size", [2, 4])
def test_a_token_parallel_step_lasts_as_long_as_that_of_the_machine(size: int) -> None:
    made = emulated(slowdown=3.0)
    step = SimStep([Chunk(4096, 0)], parallelism=Parallelism.TOKEN)
    expected_s = made.machine.step_time(2 * size, made.execution, size)(step)
    assert made.lane(size).step_s(step) == pytest.approx(3.0 * expected_s)
    step.parallelism = Parallelism.TENSOR
    assert made.lane(size).step_s(step) > 3.0 * expected_s


@pytest.mark.parametrize("model", ["llama-3-70b", "nemotron-8b", "gpt-oss-120b"])
@pytest.mark.parametrize("size", [1, 2, 4])
def test_blocks_of_the_stand_in_grow_with_the_group_as_those_of_the_model(
    model: str, size: int
) -> None:
    made = emulated(model=model)
    growth = made.machine.engine(2, (1, size), 2).block_tokens[size] // machine.BLOCK_TOKENS
    assert lane_block_tokens(BLOCK_TOKENS, size, 1, kv_heads(made)) == growth * BLOCK_TOKENS


def test_a_worker_without_a_profile_says_what_is_missing() -> None:
    with pytest.raises(ConfigError, match=KEY):
        profile_of({})
