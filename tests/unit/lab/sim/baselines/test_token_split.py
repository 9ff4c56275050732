"""Prompts in a lane of all engines and outputs apart: its costs, and that no request is lost."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest

from flying_lab.sim import hardware, models
from flying_lab.sim.baselines.token_split import (
    TokenSplit,
    free_prompts,
    tensor_split,
    token_split,
    token_split_fused,
)
from flying_lab.sim.clock import Clock
from flying_lab.sim.cluster import Options
from flying_lab.sim.lanes import SimLane
from flying_lab.sim.machine import COLLECTIVE_S, Modelled
from flying_lab.sim.node import SimNode, System
from flying_lab.sim.requests import Chunk, SimStep
from flying_lab.workload.model import Request
from flying_lab.workload.synth import Poisson, synthesise
from flying_serving.errors import ConfigError
from tests.unit.lab.sim.small_nodes import check_over, run

MODELS = ("llama-3-70b", "gpt-oss-120b", "nemotron-8b")
OPTIONS = Options(max_num_seqs=256)
PROMPT = SimStep([Chunk(4096, 0)])
MIXED = synthesise(
    Poisson(requests=150, rate_rps=8.0, prompt_tokens=(10, 6000), output_tokens=(1, 400)), 5
)
Make = Callable[[Modelled, int, Options], System]
MAKE: tuple[Make, ...] = (token_split, tensor_split, token_split_fused, free_prompts)


def h200x8(model: str) -> Modelled:
    """A machine of the cost model."""
    return Modelled(models.load(model), hardware.parse_devices("h200x8"), 0.8)


def split_of(model: str) -> TokenSplit:
    """The lane of all of its devices, with the smallest engines."""
    machine = h200x8(model)
    return TokenSplit.of(machine, machine.smallest_engine)


# ---- costs


def test_every_engine_computes_its_share_of_the_tokens_with_all_weights() -> None:
    """Beside attention and all-to-alls, the step is that of one engine with a share of a prompt."""
    split = split_of("llama-3-70b")
    share = [Chunk(1024, 0)]
    computed_s = split.engine.step_s(0, 0, share) - split.engine.attention_s(0, 0, share)
    rest_s = split.prompt_s(PROMPT) - split.heads.attention_s(0, 0, PROMPT.chunks)
    assert rest_s - split.all_to_all_s(4096) == pytest.approx(computed_s)


def test_no_step_is_shorter_than_reading_all_weights_in_every_engine() -> None:
    for model in MODELS:
        split = split_of(model)
        spec = split.machine.kind.hardware.spec
        weight_bytes = split.machine.model.weight_bytes(split.base)
        embedding_bytes = 2.0 * split.machine.model.embedding_params / split.base
        least_s = (weight_bytes - embedding_bytes) / spec.memory_bandwidth.value
        assert split.prompt_s(PROMPT) > split.weights_s() > least_s


@pytest.mark.parametrize(
    ("model", "sent_bytes"),
    [
        # engines of two devices: 64 query and 8 KV heads of 128, of which a device has an eighth
        ("llama-3-70b", 80 * 4096 * 128 * 2 * (8 + 2 + 8) * 3 / 4),
        # heads of 64: wider than the residual, which has 2,880 values
        ("gpt-oss-120b", 36 * 4096 * 64 * 2 * (8 + 2 + 8) * 7 / 8),
        ("nemotron-8b", 32 * 4096 * 128 * 2 * (4 + 2 + 4) * 7 / 8),
    ],
)
def test_all_to_alls_send_queries_keys_values_and_outputs(model: str, sent_bytes: float) -> None:
    """At the rate of a large all-reduce, after its latency twice in each layer."""
    split = split_of(model)
    hardware_ = split.machine.kind.hardware
    line = hardware_.all_reduce[split.engines].large
    sent_s = sent_bytes / (hardware_.spec.link_bandwidth.value * line.efficiency.value)
    latency_s = 2 * split.machine.model.layers * line.latency_s.value
    assert split.all_to_all_s(4096) <= sent_s + latency_s
    assert split.all_to_all_s(4096) > sent_bytes / hardware_.spec.link_bandwidth.value
    more_s = split.all_to_all_s(409_600) - split.all_to_all_s(204_800)
    assert more_s == pytest.approx(50 * sent_s)


@pytest.mark.parametrize("model", MODELS)
def test_an_engine_pulls_the_heads_that_it_lacks(model: str) -> None:
    split = split_of(model)
    hardware_, kv = split.machine.kind.hardware, split.machine.model.kv_bytes_per_token(split.base)
    rate = hardware_.spec.link_bandwidth.value * hardware_.all_reduce[8].large.efficiency.value
    migration = split.migration()
    assert migration.token_s == pytest.approx(kv * (1 - 1 / split.engines) / rate)
    assert migration.fixed_s > COLLECTIVE_S


def test_no_step_is_shorter_than_the_hosts_work() -> None:
    split = split_of("nemotron-8b")
    decode = SimStep([], 16, 16_000)
    assert split.woven_s(PROMPT) == split.prompt_s(PROMPT)
    assert split.fused_s(decode) == pytest.approx(split.engine.step_s(2, 2000))
    machine = replace(split.machine, host_share=1000.0)
    slow, group = replace(split, machine=machine), machine.host(split.engines, 8).busy
    assert slow.woven_s(PROMPT) == slow.fused_s(PROMPT) == group.seconds(1)
    assert slow.fused_s(decode) == machine.host(1, split.base).busy.seconds(2)


def test_a_fused_step_reads_weights_once_for_prompts_and_outputs() -> None:
    split = split_of("gpt-oss-120b")
    both, decode = SimStep([Chunk(4096, 0)], 64, 64_000), SimStep([], 64, 64_000)
    longer_s = split.fused_s(both) - split.woven_s(PROMPT)
    assert 0.0 < longer_s < 0.5 * split.fused_s(decode)


def test_a_lane_needs_several_engines() -> None:
    with pytest.raises(ConfigError, match="several engines"):
        TokenSplit.of(h200x8("llama-3-70b"), 8)


# ---- the server


@pytest.mark.parametrize("make", MAKE, ids=lambda make: make.__name__)
def test_requests_get_each_token_once(make: Make) -> None:
    node = SimNode(make(h200x8("nemotron-8b"), 1, OPTIONS), Clock())
    node.start()
    run(node, MIXED.requests)
    check_over(node, MIXED.requests)
    assert len(node.outcome.ended) == 150


def test_prompts_are_in_the_lane_and_outputs_in_all_engines() -> None:
    node = SimNode(token_split(h200x8("nemotron-8b"), 1, OPTIONS), Clock())
    node.start()
    steps: list[tuple[int, int, int, int]] = []
    before = node.cluster._on_step

    def see(lane: SimLane, took_s: float, step: SimStep) -> None:
        steps.append((lane.size, lane.group[0], step.prefill_tokens, step.sequences))
        before(lane, took_s, step)

    node.cluster._on_step = see
    run(node, MIXED.requests)
    assert sum(tokens for size, _, tokens, _ in steps if size == 8) == MIXED.prompt_tokens
    assert all(sequences == 0 for size, _, _, sequences in steps if size == 8)
    assert {engine for size, engine, _, sequences in steps if size == 1 and sequences} == {
        *range(8)
    }


def test_no_engine_steps_while_the_lane_does() -> None:
    node = SimNode(token_split(h200x8("nemotron-8b"), 1, OPTIONS), Clock())
    node.start()
    until_s = [0.0] * 8
    before = node.cluster._on_step

    def see(lane: SimLane, took_s: float, step: SimStep) -> None:
        now_s = node.clock.now_s
        for engine in lane.group:
            assert until_s[engine] <= now_s + 1e-9
            until_s[engine] = now_s + took_s
        before(lane, took_s, step)

    node.cluster._on_step = see
    run(node, MIXED.requests)
    assert min(until_s) > 0.0


def test_the_second_token_waits_for_the_pull() -> None:
    machine = h200x8("llama-3-70b")
    split = TokenSplit.of(machine, 2)
    node = SimNode(token_split(machine, 2, OPTIONS), Clock())
    node.start()
    run(node, [Request(0, 0.0, 4096, 3)])
    (request,) = node.outcome.ended
    assert request.token_s is not None
    first, second, third = request.token_s
    pull_s = split.migration().seconds(4096)
    assert second - first - pull_s == pytest.approx(third - second, rel=0.01)
    decode_s = machine.step_time(2, size=1)(SimStep([], 1, 4098))
    assert third - second == pytest.approx(decode_s, rel=1e-6)
    prompt_s = split.woven_s(PROMPT)
    assert first - request.arrival_s == pytest.approx(prompt_s + machine.frontend_s, rel=0.01)


def test_the_fused_form_has_the_limits_and_the_memory_of_all_engines() -> None:
    machine = h200x8("nemotron-8b")
    fused, woven = (make(machine, 1, OPTIONS) for make in (token_split_fused, token_split))
    assert fused.settings.limits.max_num_seqs == 8 * woven.settings.limits.max_num_seqs
    tokens = woven.settings.capacity.kv_tokens
    assert fused.settings.capacity.kv_tokens[1] == pytest.approx(tokens[8], rel=1e-3)
    assert fused.settings.capacity.kv_tokens[1] == pytest.approx(8 * tokens[1], rel=1e-3)


def test_free_prompts_leave_the_time_of_outputs() -> None:
    machine = h200x8("llama-3-70b")
    node = SimNode(free_prompts(machine, 2, OPTIONS), Clock())
    node.start()
    run(node, [Request(0, 0.0, 4096, 3)])
    (request,) = node.outcome.ended
    assert request.first_token_s - request.arrival_s == pytest.approx(machine.frontend_s, rel=1e-3)
    decodes_s = sum(machine.step_time(2)(SimStep([], 1, 4096 + n)) for n in (0, 1))
    assert request.end_s - request.first_token_s == pytest.approx(decodes_s, rel=1e-3)


def test_the_lane_has_a_first_token_sooner_than_an_engine() -> None:
    """And the fused form has the same first token as the lane alone."""
    machine = h200x8("llama-3-70b")
    split = TokenSplit.of(machine, 2)
    assert split.woven_s(PROMPT) < 0.35 * machine.step_time(2)(PROMPT)
    assert split.fused_s(PROMPT) == pytest.approx(split.woven_s(PROMPT), rel=0.02)
