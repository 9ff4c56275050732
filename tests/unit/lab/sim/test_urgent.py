"""What urgent requests cost the others, in the simulator, which runs the production controller."""

from collections.abc import Sequence
from statistics import fmean

import pytest

from flying_lab.sim import hardware, models
from flying_lab.sim.cluster import Options
from flying_lab.sim.machine import Modelled
from flying_lab.sim.node import System
from flying_lab.sim.requests import SimRequest
from flying_lab.sim.run import simulate
from flying_lab.sim.system import flying
from flying_lab.workload.model import Request
from flying_lab.workload.shape import with_priority
from flying_lab.workload.synth import Poisson, synthesise
from flying_serving.policy.policies import POLICIES

RATE_RPS = {"llama-3-70b": 10.2, "nemotron-8b": 121.0}
"""Of stock vLLM apart, while requests queue; on eight H200."""
REQUESTS, SHARE, MOST = 800, 0.1, 1.15
pytestmark = pytest.mark.deep


def system(model: str, policy: str) -> System:
    """Return our server on the paper's machine."""
    machine = Modelled(models.load(model), hardware.parse_devices("h200x8"), 0.8)
    return flying(machine, machine.smallest_engine, POLICIES[policy], Options(max_num_seqs=256))


def latencies_s(ended: Sequence[SimRequest], chosen: set[str]) -> tuple[float, float]:
    """Return the mean time to the first token, and to the end, of some requests."""
    mine = [one for one in ended if one.request_id in chosen]
    return (
        fmean(one.first_token_s - one.arrival_s for one in mine),
        fmean(one.end_s - one.arrival_s for one in mine),
    )


def served(one: System, requests: Sequence[Request]) -> list[SimRequest]:
    """Return what has ended; none is refused."""
    outcome = simulate(one, requests)
    assert not outcome.refused
    return outcome.ended


@pytest.mark.parametrize("seed", [1, 2, 3])
@pytest.mark.parametrize("load", [0.4, 0.7, 0.95])
@pytest.mark.parametrize("policy", ["static-dp", "auto"])
@pytest.mark.parametrize("model", RATE_RPS)
def test_the_others_lose_little_by_urgent_requests(
    model: str, policy: str, load: float, seed: int
) -> None:
    """Beside the same requests when nobody is urgent; and the urgent ones gain by it."""
    shape = Poisson(requests=REQUESTS, rate_rps=load * RATE_RPS[model], prompt_tokens=(128, 4000))
    usual = synthesise(shape, seed)
    pressed = with_priority(usual, SHARE, -1, seed=seed)
    urgent = {str(one.index) for one in pressed.requests if one.priority < 0}
    others = {str(one.index) for one in pressed.requests} - urgent
    one = system(model, policy)
    before, after = served(one, usual.requests), served(one, pressed.requests)
    for beside, without in zip(
        latencies_s(after, others), latencies_s(before, others), strict=True
    ):
        assert beside <= MOST * without
    assert latencies_s(after, urgent)[1] <= 1.02 * latencies_s(before, urgent)[1]
