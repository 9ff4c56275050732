"""The measurement at start: what is measured, in how many steps, and that engines always agree on
the next one.
"""

import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from itertools import product
from types import SimpleNamespace
from typing import Any

import pytest

from flying_serving.errors import LaneError
from flying_serving.memory.kv_groups import KVGroup, KVGroups, one_group
from flying_serving.parallelism import Parallelism
from flying_serving.predict.probes import SHORT_TOKENS, Probe
from flying_serving.wire import CalibrationRow
from flying_serving.worker.calibration import (
    REPEATED_S,
    REPETITIONS,
    StepLimits,
    calibrate,
    calibrate_lanes,
    steps_of,
)

DECODE = [1, 1, 1, 0, 8, 8, 8, 0]
PIECE = [256, 256, 256, 0]
ONE = one_group(32)
SMALL = StepLimits(sequences=8, tokens=256, request_tokens=4096, groups=ONE)


class Machine:
    """Engines that run made-up steps in virtual time and vote in a barrier.

    Args:
        seconds: how long a step takes on an engine.
    """

    def __init__(self, engines: int, seconds: Callable[[int, Any], float]) -> None:
        self.now = [0.0] * engines
        self.ran: list[list[Any]] = [[] for _ in range(engines)]
        self._seconds = seconds
        self._votes = [False] * engines
        self._barrier = threading.Barrier(engines, timeout=30)

    def calibrate(self, limits: StepLimits) -> list[list[CalibrationRow]]:
        """Measure on all engines at once; what each has measured."""

        def one(engine: int) -> list[CalibrationRow]:
            run, together = (
                (lambda step: self._run(engine, step)),
                (lambda stop: self._together(engine, stop)),
            )
            return calibrate(2, limits, run, together, clock=lambda: self.now[engine])

        with ThreadPoolExecutor(len(self.now)) as pool:
            return [
                found.result()
                for found in [pool.submit(one, engine) for engine in range(len(self.now))]
            ]

    def _run(self, engine: int, step: Any) -> None:
        self.ran[engine].append(step)
        self.now[engine] += self._seconds(engine, step)

    def _together(self, engine: int, stop: bool) -> bool:
        self._votes[engine] = stop
        self._barrier.wait()
        anyone = any(self._votes)
        self._barrier.wait()
        return anyone


def scheduled(machine: Machine, engine: int) -> list[int]:
    """Return how many tokens each step of an engine had."""
    return [step.total_num_scheduled_tokens for step in machine.ran[engine]]


def test_each_batch_is_measured_and_its_requests_are_ended() -> None:
    """The fastest step counts."""
    fastest = (0.02, 0.04, 0.03, 0.06, 0.08, 0.14, 0.19)
    times = iter([time for least in fastest for time in (least + 0.01, least, least + 0.005, 0.0)])
    machine = Machine(1, lambda _, __: next(times))
    (measured,) = machine.calibrate(SMALL)
    assert measured == [
        CalibrationRow(2, pytest.approx(0.02), 1, False, 16),
        CalibrationRow(2, pytest.approx(0.04), 8, False, 16),
        CalibrationRow(2, pytest.approx(0.03), 1, False, 1024),
        CalibrationRow(2, pytest.approx(0.06), 8, False, 1024),
        CalibrationRow(2, pytest.approx(0.08), 64, True, 0),
        CalibrationRow(2, pytest.approx(0.14), 256, True, 0),
        CalibrationRow(2, pytest.approx(0.19), 256, True, 3839),
    ]
    assert scheduled(machine, 0) == [*DECODE, *DECODE, 64, 64, 64, 0, 256, 256, 256, 0, *PIECE]
    begun = {new.req_id for step in machine.ran[0] for new in step.scheduled_new_reqs}
    ended = {name for step in machine.ran[0] for name in step.finished_req_ids}
    assert begun == ended
    assert len(begun) == 2 * (1 + 8) + 3 * REPETITIONS


def test_members_that_differ_in_speed_run_the_same_steps() -> None:
    """A slow batch is repeated on no engine, and none tries a larger one of its kind: one was slow
    on one of them.
    """
    machine = Machine(
        4,
        lambda engine, step: (
            (1.1 if engine == 2 else 0.1) * REPEATED_S if step.scheduled_new_reqs else 0
        ),
    )
    measured = machine.calibrate(SMALL)
    for engine in range(4):
        took_s = pytest.approx((1.1 if engine == 2 else 0.1) * REPEATED_S)
        assert scheduled(machine, engine) == [1, 0, 1, 0, 64, 0, 256, 0]
        assert measured[engine] == [
            CalibrationRow(2, took_s, 1, False, 16),
            CalibrationRow(2, took_s, 1, False, 1024),
            CalibrationRow(2, took_s, 64, True, 0),
            CalibrationRow(2, took_s, 256, True, 3839),
        ]


def test_a_batch_is_repeated_until_it_took_long_enough() -> None:
    """Steps too slow to go on to a larger batch are made twice all the same: the first may have
    been disturbed.
    """
    machine = Machine(
        2, lambda _, step: 0.6 * REPEATED_S if step.total_num_scheduled_tokens == 64 else 0.0
    )
    machine.calibrate(SMALL)
    assert scheduled(machine, 1) == [*DECODE, *DECODE, 64, 64, 0, *PIECE]


def test_a_step_that_fails_ends_the_start_with_its_group_size() -> None:
    """A server that cannot run a step of a size that it will be asked for must not say that it is
    ready.
    """

    def seconds(_engine: int, step: Any) -> float:
        if step.total_num_scheduled_tokens == 64:
            raise RuntimeError("does not fit")
        return 0.1

    message = (
        "group size 2: a made-up step of 64 tokens of a prompt failed: RuntimeError: does not fit"
    )
    with pytest.raises(LaneError, match=message):
        Machine(1, seconds).calibrate(SMALL)


@pytest.mark.parametrize(
    ("limits", "expected"),
    [
        (SMALL, [(1, False), (8, False), (64, True), (256, True)]),
        (
            StepLimits(1024, 8192, 9000, ONE),
            [(count, False) for count in (1, 8, 64, 256)]
            + [(count, True) for count in (64, 256, 1024, 4096)],
        ),
        (StepLimits(1, 256, 4096, ONE), [(1, False), (64, True), (256, True)]),
        (StepLimits(4, 256, 4096, ONE), [(1, False), (4, False), (64, True), (256, True)]),
        (
            StepLimits(16, 100, 4096, ONE),
            [(1, False), (8, False), (16, False), (64, True), (100, True)],
        ),
        (StepLimits(16, 2048, 51, ONE), [(1, False), (8, False), (16, False), (50, True)]),
    ],
)
def test_calibration_batches_fit_in_a_step(
    limits: StepLimits, expected: list[tuple[int, bool]]
) -> None:
    """The most that it allows in place of what it does not."""
    found = [probe for probe in limits.probes() if probe.context_tokens <= SHORT_TOKENS]
    assert [(probe.tokens, probe.is_prefill) for probe in found] == expected


@pytest.mark.parametrize("request_tokens", [17, 100, 1024, 1025, 2048, 9000])
def test_no_request_exceeds_its_limit_with_the_token_that_is_drawn(request_tokens: int) -> None:
    """VLLM refuses the step else."""
    for probe in StepLimits(256, 8192, request_tokens, ONE).probes():
        for step in steps_of(probe, ONE):
            computed = {new.req_id: new.num_computed_tokens for new in step.scheduled_new_reqs}
            cached = step.scheduled_cached_reqs
            computed |= zip(cached.req_ids, cached.num_computed_tokens, strict=True)
            for name, tokens in step.num_scheduled_tokens.items():
                assert computed[name] + tokens + 1 <= request_tokens


def test_the_limits_of_a_lane() -> None:
    """One prompt fits the model's length and the blocks, the null block left out."""
    config = SimpleNamespace(
        scheduler_config=SimpleNamespace(max_num_seqs=5, max_num_batched_tokens=512),
        model_config=SimpleNamespace(max_model_len=1000, runner_type="generate"),
    )
    one = one_group(64)
    assert StepLimits.of(config, 100, one) == StepLimits(5, 512, 1000, one)
    assert StepLimits.of(config, 4, one) == StepLimits(5, 512, 192, one)


def test_a_request_of_a_step_leaves_blocks_for_its_state() -> None:
    config = SimpleNamespace(
        scheduler_config=SimpleNamespace(max_num_seqs=5, max_num_batched_tokens=512),
        model_config=SimpleNamespace(max_model_len=1000, runner_type="generate"),
    )
    groups = KVGroups((KVGroup(1000, has_state=True), KVGroup(1000, has_state=True), KVGroup(64)))
    assert StepLimits.of(config, 6, groups).request_tokens == 3 * 64


@pytest.mark.parametrize(("blocks", "sequences"), [(100, 5), (16, 5), (15, 4), (4, 1), (1, 1)])
def test_requests_of_a_step_have_a_state_each(blocks: int, sequences: int) -> None:
    """Three blocks for each request, beside the null block."""
    config = SimpleNamespace(
        scheduler_config=SimpleNamespace(max_num_seqs=5, max_num_batched_tokens=512),
        model_config=SimpleNamespace(max_model_len=1000, runner_type="generate"),
    )
    groups = KVGroups((KVGroup(1000, has_state=True), KVGroup(1000, has_state=True), KVGroup(64)))
    assert StepLimits.of(config, blocks, groups).sequences == sequences


def test_a_pooling_model_is_measured_with_whole_prompts_alone() -> None:
    config = SimpleNamespace(
        scheduler_config=SimpleNamespace(max_num_seqs=5, max_num_batched_tokens=512),
        model_config=SimpleNamespace(max_model_len=1000, runner_type="pooling"),
    )
    limits = StepLimits.of(config, 100, ONE)
    assert limits.probes() == [Probe(64, True), Probe(256, True), Probe(512, True)]


@pytest.mark.parametrize(
    ("probe", "block_tokens"),
    [
        (Probe(1, False, 16), 16),
        (Probe(8, False, 1024), 32),
        (Probe(8, False, 2), 32),
        (Probe(64, True), 32),
        (Probe(100, True), 64),
        (Probe(100, True, 300), 32),
    ],
)
def test_every_step_has_blocks_for_its_tokens_and_follows_the_one_before(
    probe: Probe, block_tokens: int
) -> None:
    """As vLLM's scheduler would order them: a decoding request computes its next token."""
    computed: dict[str, int] = {}
    room: dict[str, int] = {}
    for step in steps_of(probe, one_group(block_tokens)):
        for new in step.scheduled_new_reqs:
            assert new.block_ids[0] == list(range(1, len(new.block_ids[0]) + 1))
            room[new.req_id] = len(new.block_ids[0]) * block_tokens
            computed[new.req_id] = new.num_computed_tokens
            prompt = len(new.prompt_token_ids)
            assert prompt - new.num_computed_tokens == step.num_scheduled_tokens[new.req_id]
        cached = step.scheduled_cached_reqs
        assert dict(zip(cached.req_ids, cached.num_computed_tokens, strict=True)) == {
            name: computed[name] for name in cached.req_ids
        }
        for name, tokens in step.num_scheduled_tokens.items():
            computed[name] += tokens
            assert computed[name] <= room[name]
        assert step.total_num_scheduled_tokens == sum(step.num_scheduled_tokens.values())


def test_lanes_are_measured_in_all_kinds_of_steps_and_by_what_they_compute() -> None:
    """The widest group, in which all engines are, ends each measurement."""
    stepped, votes = list[tuple[int, Any]](), list[int]()

    def lane(size: int, kind: str, *parallelisms: Parallelism) -> Any:
        def pool(_step: Any) -> None:
            stepped.append((size, "pooled"))

        def step(_step: Any, parallelism: Parallelism) -> None:
            stepped.append((size, parallelism))

        def any_of(stop: bool) -> bool:
            votes.append(size)
            return stop

        config = SimpleNamespace(
            scheduler_config=SimpleNamespace(max_num_seqs=8, max_num_batched_tokens=256),
            model_config=SimpleNamespace(max_model_len=512, runner_type=kind),
        )
        kv = SimpleNamespace(groups=ONE)
        return SimpleNamespace(
            config=config, kv=kv, parallelisms=parallelisms, pool=pool, step=step, any_of=any_of
        )

    both = Parallelism.TENSOR, Parallelism.TOKEN
    lanes = {1: lane(1, "generate", *both[:1]), 2: lane(2, "generate", *both)}
    rows = calibrate_lanes(lanes, 100)
    assert {(row.size, row.parallelism) for row in rows} == {(1, both[0]), *product([2], both)}
    assert list(dict.fromkeys(stepped)) == [(1, both[0]), (2, both[0]), (2, both[1])]
    assert set(votes) == {2}

    calibrate_lanes({1: lane(1, "pooling", both[0])}, 100)
    assert stepped[-1] == (1, "pooled")
