"""Cutting and scaling keep what they should: order, indices, shared prefixes."""

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from flying_lab.errors import WorkloadError
from flying_lab.workload import shape
from flying_lab.workload.model import MAX_TOKENS, Request, Workload
from tests.unit.lab.workload.workloads import workloads

THREE = Workload(
    "three", 0, (Request(0, 0.0, 100, 10), Request(1, 5.0, 200, 20), Request(2, 10.0, 300, 30))
)


def test_window_is_half_open_and_shifts() -> None:
    """5 is inside [5, 10), 10 is not."""
    cut = shape.window(THREE, 5.0, 10.0)
    assert [(request.index, request.arrival_s) for request in cut.requests] == [(1, 0.0)]


@given(workload=workloads(), start=st.floats(0, 1e9), length=st.floats(1e-3, 1e9))
def test_windows_part_a_workload(workload: Workload, start: float, length: float) -> None:
    """What lies in a window is what a filter finds, in the same order."""
    inside = [
        request.index
        for request in workload.requests
        if start <= request.arrival_s < start + length
    ]
    assume(start < start + length)
    if not inside:
        with pytest.raises(WorkloadError, match="window"):
            shape.window(workload, start, start + length)
    else:
        assert [
            request.index for request in shape.window(workload, start, start + length).requests
        ] == inside


@given(workload=workloads(), factor=st.floats(1e-3, 1e3))
def test_scaling_time_changes_only_arrivals(workload: Workload, factor: float) -> None:
    for old, new in zip(
        workload.requests, shape.scale_time(workload, factor).requests, strict=True
    ):
        assert new.arrival_s == old.arrival_s * factor
        assert new.index == old.index
        assert new.prompt_tokens == old.prompt_tokens
        assert new.hash_ids == old.hash_ids


@given(workload=workloads(), prompt=st.floats(0.01, 4), output=st.floats(0.01, 4))
def test_lengths_scale_and_prefixes_with_them(
    workload: Workload, prompt: float, output: float
) -> None:
    """Lengths are within rounding; ids stay a prefix of what they were."""
    scaled = shape.scale_lengths(workload, prompt, output)
    for old, new in zip(workload.requests, scaled.requests, strict=True):
        assert new.output_tokens == max(1, round(old.output_tokens * output))
        assert new.hash_ids == old.hash_ids[: len(new.hash_ids)]
        assert bool(new.hash_ids) == bool(old.hash_ids)
        if not old.hash_ids:
            assert new.prompt_tokens == max(1, round(old.prompt_tokens * prompt))


def test_a_whole_factor_scales_hashed_prompts_exactly() -> None:
    """512-token blocks become 64-token blocks."""
    workload = Workload("hashed", 0, (Request(0, 0.0, 1200, 10, hash_ids=(4, 5, 6)),))
    scaled = shape.scale_lengths(workload, 0.125)
    assert scaled.block_tokens == 64
    assert scaled.requests[0].prompt_tokens == 150
    assert scaled.requests[0].hash_ids == (4, 5, 6)


@given(workload=workloads(), prompt=st.integers(1, 3000), output=st.integers(1, 3000))
def test_clip(workload: Workload, prompt: int, output: int) -> None:
    """Nothing is longer, what was short enough is as it was."""
    clipped = shape.clip(workload, prompt, output)
    for old, new in zip(workload.requests, clipped.requests, strict=True):
        assert new.prompt_tokens == min(old.prompt_tokens, prompt)
        assert new.output_tokens == min(old.output_tokens, output)
        if old.prompt_tokens <= prompt:
            assert new.hash_ids == old.hash_ids
    assert shape.clip(workload, MAX_TOKENS) == workload


def test_first() -> None:
    """More than there are is all."""
    assert len(shape.first(THREE, 2).requests) == 2
    assert shape.first(THREE, 10) == THREE


@pytest.mark.parametrize(
    ("cut", "field"),
    [
        (lambda: shape.first(THREE, 0), "requests"),
        (lambda: shape.window(THREE, 5.0, 5.0), "window"),
        (lambda: shape.window(THREE, -1.0, 5.0), "window"),
        (lambda: shape.scale_time(THREE, 0.0), "time_scale"),
        (lambda: shape.scale_time(THREE, float("nan")), "time_scale"),
        (lambda: shape.scale_lengths(THREE, -1.0), "prompt_scale"),
        (lambda: shape.scale_lengths(THREE, 1.0, float("inf")), "output_scale"),
        (lambda: shape.clip(THREE, 0), "clip"),
    ],
)
def test_parameters_out_of_range_are_named_by_field(cut: object, field: str) -> None:
    assert callable(cut)
    with pytest.raises(WorkloadError) as refused:
        cut()
    assert refused.value.field == field


def test_the_begin_of_a_low_phase_after_a_burst_has_its_own_name() -> None:
    """Low to 4, burst to 6, after to 7, low to 10, and again."""
    times = (0.0, 3.9, 4.0, 6.0, 6.9, 7.0, 10.0, 12.0)
    phases = ("low", "low", "burst", "low", "low", "low", "burst", "low")
    drawn = THREE.having(
        Request(number, at_s, 1, 1, phase=phase)
        for number, (at_s, phase) in enumerate(zip(times, phases, strict=True))
    )
    named = shape.with_after(drawn, low_s=4.0, burst_s=2.0, after_s=1.0)
    assert [one.phase for one in named.requests] == [
        *("low", "low", "burst"),
        *("after", "after", "low"),
        *("burst", "after"),
    ]
