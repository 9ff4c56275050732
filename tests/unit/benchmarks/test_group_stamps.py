"""Stamps of what processes do: written, and read again."""

from collections.abc import Callable
from pathlib import Path

import pytest

from benchmarks.group_stamps import BEGUN, FORMAT, SCHEDULER, Stamps
from benchmarks.group_steps import read


def test_work_within_other_work_counts_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("STAMPS", str(tmp_path))
    stamps = Stamps()
    inner = stamps.timed(SCHEDULER, lambda: None)
    outer = stamps.timed(SCHEDULER, inner)
    for _ in range(64):
        outer()
    assert len(read(tmp_path)[0]) == 64


def test_records_are_written_and_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("STAMPS", str(tmp_path))
    stamps = Stamps()
    work: Callable[[int], int] = stamps.timed(SCHEDULER, lambda value: value + 1)
    assert not stamps.has_scheduler
    assert work(1) == 2
    assert stamps.has_scheduler
    for _ in range(63):
        stamps.add(BEGUN, [1, 3])
    (written,) = read(tmp_path)
    assert [one.what for one in written] == [SCHEDULER] + 63 * [BEGUN]
    assert (written[1].requests, written[1].tokens) == (2, 4)
    assert FORMAT.size * 64 == next(tmp_path.iterdir()).stat().st_size
