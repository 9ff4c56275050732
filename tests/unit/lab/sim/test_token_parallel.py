"""Steps that divide tokens: beside those of one engine, and in the groups of a simulated server."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from flying_lab.sim import hardware, models
from flying_lab.sim.baselines.shift_parallel import shifting
from flying_lab.sim.baselines.token_split import TokenSplit
from flying_lab.sim.clock import Clock
from flying_lab.sim.cluster import Options
from flying_lab.sim.cost import LaneCost
from flying_lab.sim.machine import DegreeTime, Modelled, load_measured
from flying_lab.sim.node import SimNode, System
from flying_lab.sim.requests import Chunk, SimStep
from flying_lab.sim.run import simulate
from flying_lab.sim.system import flying
from flying_lab.sim.token_parallel import EXCHANGES_LAUNCH, sequence_parallel
from flying_lab.workload.model import Request
from flying_serving.parallelism import Parallelism
from flying_serving.policy.policies import POLICIES
from flying_serving.predict.parallelism import ParallelismChoice
from flying_serving.predict.steps import Step
from tests.unit.lab.sim.machines import machine_file
from tests.unit.lab.sim.small_nodes import run


def divided(machine: Modelled, base: int, degree: int) -> DegreeTime:
    """Steps that divide the tokens over engines of `base` devices."""
    return sequence_parallel(machine.model, machine.kind.hardware, base, degree)


MACHINE = Modelled(models.load("qwen2.5-32b"), hardware.parse_devices("h20x4"))
ALONE, SEQUENCE = MACHINE.step_time(1), divided(MACHINE, 1, 4)
ONE = SimStep([], 1, 4000)
LLAMA = Modelled(models.load("llama-3-70b"), hardware.parse_devices("h200x8"))
TENSOR, TOKEN = Options(token_parallel=False), Options()


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
    for time in (divided(machine, base, degree), shifting(machine, base, degree)):
        assert all_to_alls_s(machine, base, degree, time) > sent_bytes / spec.link_bandwidth.value


@pytest.mark.parametrize("model", ["llama-3-70b", "gpt-oss-120b", "nemotron-8b"])
def test_shift_all_to_alls_are_near_the_ones_that_count_heads(model: str) -> None:
    """Shift's count the residual's width for the heads, and no keys and values."""
    machine = Modelled(models.load(model), hardware.parse_devices("h200x8"), 0.8)
    split = TokenSplit.of(machine, machine.smallest_engine)
    shift = divided(machine, split.base, split.degree)
    for tokens in (2048, 8192):
        step = SimStep([Chunk(tokens, 0)])
        assert shift(step) == pytest.approx(split.prompt_s(step), rel=0.05)


def as_token(step: SimStep) -> SimStep:
    """The same step, token parallel."""
    return replace(step, parallelism=Parallelism.TOKEN)


def test_a_group_that_divides_tokens_is_slower_for_few_and_faster_for_many() -> None:
    time, alone = LLAMA.step_time(8, size=4), divided(LLAMA, 2, 8)
    few, many = SimStep([Chunk(100, 0)], 7, 7000), SimStep([Chunk(8192, 0)])
    for step in (few, many):
        assert time(as_token(step)) == pytest.approx(alone(step))
    assert time(as_token(few)) > time(few)
    assert time(as_token(many)) < time(many)


def test_token_parallel_steps_of_a_group_are_launched_one_by_one() -> None:
    """Their exchanges too. So the steps of a small model take no less, whatever is in them."""
    machine = Modelled(models.load("llama-3-8b"), hardware.parse_devices("h200x8"))
    fitted = machine.kind.hardware.coefficients
    launch_s = machine.model.layers * fitted.eager_layer_s.value * (1 + EXCHANGES_LAUNCH)
    least_s = launch_s + fitted.step_overhead_s.value
    for tokens in (16, 64):
        step = SimStep([Chunk(tokens, 0)])
        assert machine.step_time(8, size=8)(as_token(step)) == pytest.approx(least_s)
        assert divided(machine, 1, 8)(step) < least_s


def system_of(policy: str, options: Options) -> System:
    """Our server with a 70B model on eight devices, engines of two."""
    return flying(LLAMA, 2, POLICIES[policy], options)


def kinds_of(steps: list[Step]) -> set[tuple[int, Parallelism]]:
    """Return the sizes of groups, and what steps of them divide."""
    return {step.kind for step in steps}


def test_a_server_measures_groups_of_several_both_ways() -> None:
    """Unless it is not to divide tokens: then all is as without this option, to the last digit."""
    plain, both = (list(system_of("auto", one).calibration) for one in (TENSOR, TOKEN))
    sizes = {1, 2, 4}
    assert kinds_of(plain) == {(size, Parallelism.TENSOR) for size in sizes}
    assert kinds_of(both) - kinds_of(plain) == {(2, Parallelism.TOKEN), (4, Parallelism.TOKEN)}
    assert [step for step in both if step.parallelism is Parallelism.TENSOR] == plain
    divided = [step for step in both if step.parallelism is Parallelism.TOKEN]
    assert min(step.prefill_tokens + step.sequences for step in divided) == 64


def first_token_s(options: Options, prompt_tokens: int) -> float:
    """When a lone request of a server that is one group has its first token."""
    ended = simulate(system_of("static-tp", options), [Request(0, 0.0, prompt_tokens, 2)]).ended
    return ended[0].first_token_s


@pytest.mark.parametrize(("prompt_tokens", "gains"), [(100, False), (8000, True)])
def test_a_group_divides_the_tokens_of_a_long_prompt(prompt_tokens: int, gains: bool) -> None:
    """Its first token comes earlier by what the step is shorter. A short one stays as it is."""
    time, step = LLAMA.step_time(8, size=4), SimStep([Chunk(prompt_tokens, 0)])
    gain_s = time(step) - time(as_token(step)) if gains else 0.0
    plain_s, both_s = (first_token_s(one, prompt_tokens) for one in (TENSOR, TOKEN))
    assert plain_s - both_s == pytest.approx(gain_s)
    assert (gain_s > 0.0) == gains


def test_leaders_choose_by_the_steps_of_the_start_and_report_it() -> None:
    system = system_of("auto", TOKEN)
    node, seen = SimNode(system, Clock()), list[Step]()
    node.controller.stepped = seen.extend  # type: ignore[method-assign]
    run(node, [Request(n, n / 4, 6000 if n % 3 else 40, 60) for n in range(30)])
    choice = ParallelismChoice([step.to_row() for step in system.calibration])
    groups = [step for step in seen if step.size > 1]
    for step in groups:
        counts = step.prefill_tokens, step.sequences, step.context_tokens, step.prefill_pairs
        assert step.parallelism is choice.choose(step.size, *counts)
        if not step.prefill_tokens:
            contents = SimStep([], step.sequences, step.context_tokens, [], step.parallelism)
            assert step.duration_s == system.step_time(step.size, contents)
    assert {step.parallelism for step in groups} == set(Parallelism)
    assert all(step.parallelism is Parallelism.TENSOR for step in seen if step.size == 1)


def test_a_measured_machine_and_one_that_lends_have_no_such_steps(tmp_path: Path) -> None:
    measured = flying(
        load_measured(machine_file(tmp_path / "machine.json")), 1, POLICIES["auto"], TOKEN
    )
    lending = system_of("auto", replace(TOKEN, lend_weights=True))
    for system in (measured, lending):
        assert {parallelism for _, parallelism in kinds_of(list(system.calibration))} == {
            Parallelism.TENSOR
        }
