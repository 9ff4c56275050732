"""Clocks that are read together belong together."""

import time

import pytest

from flying_serving.bench import clock


def test_a_wait_between_two_readings_does_not_set_them_apart(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of all pairs but one, the process waits for a processor between the readings."""
    now = [100.0]
    waits = [0.3, 0.2, 1e-6, 0.4, 0.5]

    def wall() -> float:
        at = now[0] + 1e9
        now[0] += waits.pop(0)
        return at

    monkeypatch.setattr(time, "perf_counter", lambda: now[0])
    monkeypatch.setattr(time, "time", wall)
    monotonic_s, wall_s = clock.together()
    assert wall_s - monotonic_s == pytest.approx(1e9, abs=1e-5)
    assert not waits
