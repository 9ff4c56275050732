"""Random numbers of lanes: what other code draws does not change them, and no two groups have the
same.
"""

import random
from contextlib import nullcontext
from itertools import product
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from vllm.sampling_params import SamplingParams
from vllm.utils.torch_utils import set_random_seed
from vllm.v1.worker.gpu.sample.states import SamplingStates
from vllm.v1.worker.gpu_model_runner import GPUModelRunner

from flying_serving.comm.group_files import whole_groups
from flying_serving.layout.groups import aligned_group
from flying_serving.vllm_adapter.model_runner.device_lane import DeviceLane
from flying_serving.vllm_adapter.model_runner.randomness import (
    LaneRandomness,
    seed_of,
    seed_process,
)
from flying_serving.vllm_adapter.weights.trees import world_of_one
from flying_serving.worker.lanes import DeviceLanes
from tests.with_vllm.worker.configurations import LLAMA, configuration

CPU = torch.device("cpu")
CUDA = torch.device("cuda", 0)
ENGINES = 4


class Sampling:
    """In place of vLLM's runner: a step draws as vLLM's sampler on the CPU, and once from each
    other generator.
    """

    def execute_model(self, plan: Any) -> tuple[Any, ...]:
        return drawn()


class Unloaded(GPUModelRunner):  # type: ignore[misc]
    """vLLM's V1 runner without its parts; a step draws as code of users may."""

    inputs_embeds = None

    def __init__(self, config: Any, device: torch.device) -> None:
        self.device = device

    def execute_model(self, plan: Any) -> Any:
        return random.random()


class Processor:
    """Stands for a user's class of logits processors, which is only counted."""


class Alone:
    """In place of communicators, with nothing to exchange."""

    def __init__(self) -> None:
        self.members: dict[int, list[int]] = {}

    def activate(self, size: int) -> Any:
        return nullcontext()

    def require_whole(self, size: int, *, goes_on: bool) -> None:
        pass

    def reopen(self, size: int, members: list[int]) -> None:
        self.members[size] = members


def drawn() -> tuple[Any, ...]:
    """One draw from each generator that vLLM seeds, as with code of users."""
    return torch.randint(0, 2**31, (2,)).tolist(), int(np.random.randint(2**31)), random.random()


def seed_of_v2_request() -> int:
    """The seed that vLLM's V2 runner takes for a request without one (`SamplingStates`)."""
    vocabulary = 16
    states: Any = SimpleNamespace(vocab_size=vocabulary, num_logprobs=np.zeros(1, dtype=np.int64))
    for name in ("temperature", "top_p", "top_k", "min_p", "seeds"):
        setattr(states, name, SimpleNamespace(np=np.zeros(1, dtype=np.int64)))
    states.seeds_set = np.zeros(1, dtype=bool)
    SamplingStates.add_request(states, 0, SamplingParams())
    return int(states.seeds.np[0])


def lanes_of(engine: int, seed: int = 0) -> DeviceLanes:
    """An engine's lanes for 1, 2 and 4 engines, over a runner that only samples."""
    config: Any = SimpleNamespace(
        model_config=SimpleNamespace(seed=seed), cache_config=SimpleNamespace(block_size=16)
    )
    alone: Any = Alone()
    lanes = DeviceLanes.__new__(DeviceLanes)
    lanes.engine, lanes.communicators = engine, alone
    for size in (1, 2, 4):
        own = None if size == 1 else LaneRandomness(CPU, seed, for_users_code=True)
        lanes[size] = DeviceLane(Sampling(), config, aligned_group(engine, size), alone, own)
    return lanes


def seed(lanes: DeviceLanes, incarnations: tuple[int | None, ...] = (0,) * ENGINES) -> None:
    """Seed the lanes of the groups that are whole at a start."""
    for group, members in whole_groups(lanes.engine, lanes, incarnations):
        lanes.communicators.reopen(len(group), members)
    lanes.seed()


def step(lanes: DeviceLanes, size: int) -> Any:
    """What a step of the lane for groups of `size` draws."""
    return lanes[size].step(None)


@pytest.fixture(autouse=True)
def process_keeps_its_own() -> Any:
    """The generators of this process are afterwards what they were."""
    before = random.getstate(), np.random.get_state(), torch.get_rng_state()
    yield
    random.setstate(before[0])
    np.random.set_state(before[1])
    torch.set_rng_state(before[2])


def test_members_draw_alike_with_different_other_lanes() -> None:
    one, other = lanes_of(2), lanes_of(3)
    for lanes in (one, other):
        step(lanes, 4)  # of the start: there may be more of them on one member
        seed(lanes)
    found = []
    for lanes in (one, other):
        found.append([step(lanes, 2), step(lanes, 2), step(lanes, 4)])
        drawn()
        step(lanes, 1)
        found[-1].append(step(lanes, 2))
    assert found[0] == found[1]


def test_each_group_draws_differently() -> None:
    """Of all sizes, in all layouts: the first draw of each generator."""
    first = {}
    for engine, size in product(range(ENGINES), (1, 2, 4)):
        lanes = lanes_of(engine)
        seed(lanes)
        first[aligned_group(engine, size)] = step(lanes, size)
    assert len(first) == 7
    for values in zip(*first.values(), strict=True):
        assert len(set(map(str, values))) == 7


def test_a_group_that_was_broken_draws_differently_from_before() -> None:
    """Also on a member that was in the middle of a step when the other was lost."""
    one, other = lanes_of(0), lanes_of(1)
    for lanes in (one, other):
        seed(lanes)
    before = step(one, 2)
    seed(other, (0, 1, 0, 0))
    one[2].rejoin([0, 1])
    after = step(one, 2)
    assert after != before
    assert step(other, 2) == after


def test_members_that_begin_anew_draw_alike_and_differently_from_before() -> None:
    """Each time, also after the group was broken, and whatever they have drawn until then."""
    one, other = lanes_of(0), lanes_of(1)
    for lanes in (one, other):
        seed(lanes)
    found = [step(one, 2)]  # which the other member has drawn otherwise, or not at all
    for times in (1, 2, 1):
        if len(found) == 3:
            for lanes in (one, other):
                lanes[2].rejoin([0, 1])
        for lanes in (one, other):
            lanes[2].begin_anew(times)
        found.append(step(one, 2))
        assert step(other, 2) == found[-1]
    for values in zip(*found, strict=True):
        assert len(set(map(str, values))) == len(found)


def test_seeds_of_requests_under_the_v2_runner_are_equal_on_members() -> None:
    """That runner gives a request without a seed one from numpy's generator when it comes."""
    found = []
    for engine in (2, 3):
        lanes = lanes_of(engine)
        seed(lanes)
        np.random.randint(2**31, size=engine)  # of lane 1, or of other code of the process
        randomness = lanes[2]._randomness
        assert randomness is not None
        with randomness.used():
            found.append([seed_of_v2_request() for _ in range(3)])
    assert found[0] == found[1]
    assert len(set(found[0])) == 3


def test_a_group_that_lacks_a_member_is_seeded_when_it_is_whole() -> None:
    one, other = lanes_of(2), lanes_of(3)
    seed(one, (0, None, 0, 1))
    seed(other, (0, None, 0, 1))
    for lanes in (one, other):
        lanes[4].rejoin([0, 1, 0, 1])
    assert step(one, 4) == step(other, 4)


@pytest.mark.parametrize("engine", [0, 1, 3])
def test_lane_1_draws_as_vllms_replica_of_its_number(engine: int) -> None:
    set_random_seed(11, engine)
    expected = drawn()
    lanes = lanes_of(engine, seed=11)
    step(lanes, 1)
    seed(lanes)
    assert step(lanes, 1) == expected


def test_an_engine_that_is_started_again_draws_differently_each_time() -> None:
    found = []
    for incarnation in range(3):
        seed_process(0, 2, incarnation)
        found.append(str(drawn()))
    assert len(set(found)) == 3


def test_other_seeds_are_other_numbers() -> None:
    """--seed; and no group begins as one of vLLM's replicas, or as an engine that was started
    again.
    """
    groups = [aligned_group(first, size) for size in (2, 4, 8) for first in range(0, 8, size)]
    started = list(product(range(3), repeat=2))
    seeds = [
        seed_of(seed, group, incarnations * (len(group) // 2))
        for seed in (0, 1)
        for group in groups
        for incarnations in started
    ]
    seeds += [
        seed_of(seed, [engine], [incarnation])
        for seed in (0, 1)
        for engine in range(8)
        for incarnation in (1, 2)
    ]
    seeds += [
        int(np.random.SeedSequence((seed, replica)).generate_state(1)[0])
        for seed in (0, 1)
        for replica in range(8)
    ]
    assert len(set(seeds)) == len(seeds)


def test_the_generator_of_the_device_is_the_lanes_too(monkeypatch: pytest.MonkeyPatch) -> None:
    """With a stand-in for a device's generator: none of CUDA was run."""
    device = SimpleNamespace(state=1, get_rng_state=None, set_rng_state=None)
    device.get_rng_state = lambda at: device.state
    device.set_rng_state = lambda state, device: vars(of_device).update(state=state)
    of_device = device
    monkeypatch.setattr(torch, "get_device_module", lambda at: of_device)
    lane = LaneRandomness(CUDA, 0)
    with lane.used():
        of_device.state = 5
    assert of_device.state == 1
    of_device.state = 2
    with lane.used():
        assert of_device.state == 5
    assert of_device.state == 2


def test_pythons_generator_stays_the_processs_where_no_code_of_users_runs() -> None:
    """Its state takes longer to keep than all others, and vLLM's runners do not draw from it."""
    random.seed(3)
    expected = [random.random() for _ in range(3)]
    random.seed(3)
    lane = LaneRandomness(CPU, 0)
    found = [random.random()]
    with lane.used():
        found.append(random.random())
    lane.seed(1)
    found.append(random.random())
    assert found == expected


@pytest.mark.parametrize("processors", [None, [Processor]])
def test_lane_keeps_pythons_generator_for_processors_of_users(
    processors: list[type] | None, tmp_path: Path
) -> None:
    config = configuration(tmp_path, LLAMA)
    config.model_config.logits_processors = processors
    alone: Any = Alone()
    lane1 = DeviceLane(Unloaded(config, CPU), config, (0,), alone)
    with world_of_one(config):
        lane = DeviceLane.build(config, (0, 1), lane1)
    random.seed(3)
    before = random.getstate()
    lane.launch(None)
    assert (random.getstate() == before) == (processors is not None)
