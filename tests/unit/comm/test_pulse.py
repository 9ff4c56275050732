"""Pulse: counters that rise while their process runs; Silence: for how long one has not."""

import multiprocessing
import signal
import time
from pathlib import Path
from tempfile import TemporaryDirectory

import pytest
from hypothesis import given
from hypothesis import strategies as st

from flying_serving.comm.pulse import BEAT_S, Pulse, Silence
from harness.live import wait_until


@pytest.mark.parametrize(("devices", "processes"), [(1, 1), (2, 3)])
def test_each_process_of_an_engine_has_a_counter(devices: int, processes: int) -> None:
    """An engine of several devices is a process itself, beside one for each; one of one device is
    one process.
    """
    with TemporaryDirectory(dir="/dev/shm") as run_dir:
        watched, mine = Pulse(run_dir, 2, devices), Pulse(run_dir, 2, devices)
        assert [list(watched.of(engine)) for engine in (0, 1)] == [[0] * processes] * 2
        mine.beat(1)
        for device in range(devices) if devices > 1 else ():
            mine.beat(1, device)
        wait_until(lambda: min(watched.of(1)) >= 3)
        assert list(watched.of(0)) == [0] * processes
        assert Path(run_dir, "pulse").stat().st_mode & 0o777 == 0o600


def test_end_of_an_engine_is_noted_for_that_engine_alone() -> None:
    """That it ends, as it says itself, and that it is lost, as the server says."""
    with TemporaryDirectory(dir="/dev/shm") as run_dir:
        watched, mine = Pulse(run_dir, 4, 2), Pulse(run_dir, 4, 2)
        mine.leave(3)
        watched.declare_lost(0)
        assert [watched.has_left(engine) for engine in range(4)] == [False, False, False, True]
        assert [mine.is_lost(engine) for engine in range(4)] == [True, False, False, False]
        watched.declare_back(0)
        assert not any(mine.is_lost(engine) for engine in range(4))


@given(st.lists(st.tuples(st.floats(0.0, 3.0), st.sets(st.sampled_from([0, 1, 2]))), max_size=30))
def test_silence_is_that_of_the_most_silent_counter(looks: list[tuple[float, set[int]]]) -> None:
    """Time for which nobody looked counts as one second at most: the watcher may have been stopped
    itself.
    """
    silence, now_s, counters = Silence(longest_look_s=1.0), 100.0, [5, 5, 5]
    silence.look(counters, now_s)
    expected_s = [0.0, 0.0, 0.0]
    for passed_s, rising in looks:
        now_s += passed_s
        for which in range(3):
            counters[which] += which in rising
            expected_s[which] = 0.0 if which in rising else expected_s[which] + min(passed_s, 1.0)
        assert silence.look(counters, now_s) == pytest.approx(max(expected_s), abs=1e-6)


def test_an_engine_that_ends_gives_no_signs_of_life() -> None:
    """From when it has said so; another process of it neither."""
    with TemporaryDirectory(dir="/dev/shm") as run_dir:
        pulse = Pulse(run_dir, 2, 2)
        for place in ((0,), (0, 0), (0, 1), (1,)):
            pulse.beat(*place)
        wait_until(lambda: min(pulse.of(0)) >= 1)
        pulse.leave(0)
        time.sleep(3 * BEAT_S)
        last, other = pulse.of(0), min(pulse.of(1)[:1])
        wait_until(lambda: min(pulse.of(1)[:1]) >= other + 3)
        assert pulse.of(0) == last


def test_device_that_has_not_begun_is_not_silent_while_its_engine_starts() -> None:
    """Its own process has; from when it has started all count."""
    silence = Silence(longest_look_s=10.0)
    silence.look([1, 1, 1], 0.0, starts=True)
    assert silence.look([1, 1, 1], 1.0, starts=True) == 1.0
    assert silence.look([2, 1, 1], 2.0, starts=True) == 0.0
    assert silence.look([3, 2, 1], 3.0, starts=True) == 0.0
    assert silence.look([4, 2, 1], 5.0, starts=True) == 2.0
    assert silence.look([5, 3, 1], 6.0, starts=True) == 0.0
    assert silence.look([6, 4, 1], 9.0) == 3.0


def test_first_look_finds_no_silence() -> None:
    assert Silence().look([3, 7], time.monotonic()) == 0.0


def test_a_device_lives_until_its_process_has_ended() -> None:
    """In whatever way it ends; that of no other engine or device is meant."""
    with TemporaryDirectory(dir="/dev/shm") as run_dir:
        watched, context = Pulse(run_dir, 2, 2), multiprocessing.get_context("fork")
        process = context.Process(target=beat_for_ever, args=(run_dir, 1, 0))
        process.start()
        wait_until(lambda: watched.living_devices(1))
        assert watched.living_devices(1) == [0]
        assert watched.living_devices(0) == []
        process.kill()
        process.join()
        assert watched.living_devices(1) == []


def beat_for_ever(run_dir: str, engine: int, device: int) -> None:
    """Be the process of a device."""
    Pulse(run_dir, 2, 2).beat(engine, device)
    signal.pause()
