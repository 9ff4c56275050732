"""Disaggregated serving in the simulator: prompts in one engine of a pair, outputs in the other."""

import pytest

from flying_lab.sim import hardware, models
from flying_lab.sim.catalog import build
from flying_lab.sim.clock import Clock
from flying_lab.sim.cluster import Options
from flying_lab.sim.lanes import SimLane
from flying_lab.sim.machine import Modelled
from flying_lab.sim.node import SimNode
from flying_lab.sim.requests import SimStep
from flying_lab.workload.model import Request
from flying_lab.workload.synth import Poisson, synthesise
from tests.unit.lab.sim.small_nodes import check_over, run

MACHINE = Modelled(models.load("qwen2.5-14b"), hardware.parse_devices("a100x2"))
OPTIONS = Options(max_num_seqs=256, max_num_batched_tokens=2048)
MIXED = synthesise(
    Poisson(requests=150, rate_rps=4.0, prompt_tokens=(10, 6000), output_tokens=(1, 400)), 5
)


def paired() -> SimNode:
    """Return a pair of engines of one A100 each."""
    node = SimNode(build("pd-disagg", MACHINE, 1, OPTIONS), Clock())
    node.start()
    return node


def test_requests_get_each_token_once() -> None:
    node = run(paired(), MIXED.requests)
    check_over(node, MIXED.requests)
    assert len(node.outcome.ended) == 150


def test_prompts_and_outputs_are_on_different_engines() -> None:
    """The first engine has one token of each request, the second all others."""
    node = paired()
    steps: list[tuple[int, int, int]] = []
    before = node.cluster._on_step

    def see(lane: SimLane, took_s: float, step: SimStep) -> None:
        steps.append((lane.group[0], step.prefill_tokens, step.sequences))
        before(lane, took_s, step)

    node.cluster._on_step = see
    run(node, MIXED.requests)
    assert sum(tokens for engine, tokens, _ in steps if engine == 0) == MIXED.prompt_tokens
    assert all(sequences == 0 for engine, _, sequences in steps if engine == 0)
    assert sum(sequences for engine, _, sequences in steps if engine == 1) > 0


def test_only_the_last_chunk_is_waited_for() -> None:
    """The second token comes after the last chunk's KV, and a step of the second engine."""
    handoff = MACHINE.handoff(1)
    assert handoff is not None
    node = run(paired(), [Request(0, 0.0, 6000, 3)])
    (request,) = node.outcome.ended
    assert request.token_s is not None
    first, second, third = request.token_s
    waited_s = handoff.seconds(2048)
    assert second - first - waited_s == pytest.approx(third - second, rel=0.01)


def test_a_request_of_one_token_ends_in_the_first_engine() -> None:
    node = run(paired(), [Request(0, 0.0, 100, 1)])
    check_over(node, [Request(0, 0.0, 100, 1)])
