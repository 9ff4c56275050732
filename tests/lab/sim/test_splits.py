"""Split requests in the simulator: all tokens once, KV handed over, steps that keep to a target."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest

from flying_lab.results.metrics import token_gaps
from flying_lab.sim import hardware, models
from flying_lab.sim.catalog import build
from flying_lab.sim.clock import Clock
from flying_lab.sim.cluster import Options
from flying_lab.sim.machine import Modelled
from flying_lab.sim.node import SimNode, System
from flying_lab.sim.run import results, simulate
from flying_lab.workload.model import Request, Workload
from flying_lab.workload.synth import Poisson, synthesise
from flying_serving.predict.migrations import MigrationCost
from tests.lab.sim.nodes import check_over, run

MACHINE = Modelled(models.load("qwen2.5-14b"), hardware.parse_devices("a100x2"))
OPTIONS = Options(max_num_seqs=256, max_num_batched_tokens=2048)
TARGET = replace(OPTIONS, tbt_slo_s=0.1)
MIXED = synthesise(
    Poisson(requests=150, rate_rps=4.0, prompt_tokens=(10, 6000), output_tokens=(1, 400)), 5
)


def system(name: str = "split", options: Options = TARGET) -> System:
    """Two engines of one A100 each."""
    return build(name, MACHINE, 1, options)


def served(one: System, workload: Workload) -> SimNode:
    """A node that has served a workload, with nothing left behind."""
    node = SimNode(one, Clock())
    node.start()
    run(node, workload.requests)
    check_over(node, workload.requests)
    return node


@pytest.mark.parametrize("name", ["split", "pd-disagg"])
def test_split_requests_get_each_token_once(name: str) -> None:
    node = served(system(name), MIXED)
    assert node.splits is not None
    assert len(node.splits.log.plans) == len(node.outcome.ended) == 150
    assert len(node.splits.log.waited_s) > 20


def test_requests_are_split_inside_prompts_and_inside_outputs() -> None:
    node = served(system(), MIXED)
    assert node.splits is not None
    lengths = [(r.prompt_tokens, r.output_tokens) for r in MIXED.requests]
    splits = [plan.split for plan in node.splits.log.plans]
    assert any(0 < split < prompt for split, (prompt, _) in zip(splits, lengths, strict=True))
    assert any(
        prompt < split < prompt + out for split, (prompt, out) in zip(splits, lengths, strict=True)
    )
    assert all(plan.probes <= 6 for plan in node.splits.log.plans)


def test_disaggregated_prompts_and_outputs_are_on_different_engines() -> None:
    """The first engine has one token of each request, the second all others."""
    node = SimNode(system("pd-disagg", OPTIONS), Clock())
    steps: list[tuple[int, int, int]] = []
    before = node.cluster._on_step

    def see(lane: object, took_s: float, step: object) -> None:
        steps.append((lane.group[0], step.prefill_tokens, step.sequences))  # type: ignore[attr-defined]
        before(lane, took_s, step)  # type: ignore[arg-type]

    node.cluster._on_step = see
    node.start()
    run(node, MIXED.requests)
    assert sum(tokens for engine, tokens, _ in steps if engine == 0) == MIXED.prompt_tokens
    assert all(sequences == 0 for engine, _, sequences in steps if engine == 0)
    assert sum(sequences for engine, _, sequences in steps if engine == 1) > 0


def test_only_the_last_chunk_is_waited_for() -> None:
    """KV that is pulled behind the computation; else all of it is pulled at the split."""
    waited_s = {}
    for behind in (True, False):
        one = system("pd-disagg", OPTIONS)
        assert one.splitting is not None
        handoff = MigrationCost(0.001, 1e-5)
        node = served(
            replace(one, splitting=replace(one.splitting, handoff=handoff, behind=behind)), MIXED
        )
        assert node.splits is not None
        waited_s[behind] = list(node.splits.log.waited_s)
    assert max(waited_s[True]) <= 0.001 + 2048e-5 + 1e-9
    assert max(waited_s[False]) == pytest.approx(
        0.001 + 1e-5 * max(r.prompt_tokens for r in MIXED.requests)
    )


def test_a_shorter_output_than_expected_ends_before_its_split() -> None:
    one = system()
    assert one.splitting is not None
    served(replace(one, splitting=replace(one.splitting, hint=lambda tokens: 20 * tokens)), MIXED)
    served(replace(one, splitting=replace(one.splitting, hint=lambda tokens: 1)), MIXED)


@pytest.mark.parametrize("name", ["split", "static-dp"])
def test_steps_keep_to_the_target_for_the_time_between_tokens(name: str) -> None:
    """In 98 % of gaps at a load at which they would not without it."""
    within = {}
    for options in (OPTIONS, TARGET):
        one = system(name, options)
        begin, end = token_gaps(results(one, MIXED, simulate(one, MIXED.requests), "a test"))
        within[options.tbt_slo_s] = float((end - begin <= 0.1).mean())
    assert within[math.inf] < 0.95
    assert within[0.1] > 0.98


def test_idle_server_splits_no_request() -> None:
    far = Workload(
        "far apart", 1, tuple(Request(index, 30.0 * index, 3000, 100) for index in range(5))
    )
    node = served(system(), far)
    assert node.splits is not None
    assert not node.splits.log.waited_s
