"""Time stamps of group steps: the gaps between a step's output and the next launch."""

from collections.abc import Sequence
from pathlib import Path

import pytest

from benchmarks.stamped import BEGUN, OVER, RECORD, SENT, gaps_s, install, read
from flying_serving.engine import group_steps
from flying_serving.engine.channel import Channel
from flying_serving.engine.sampled import SampledTokens


def write(path: Path, records: Sequence[tuple[int, int, int, int, float]]) -> None:
    path.write_bytes(b"".join(RECORD.pack(*record) for record in records))


def test_gaps_are_of_steps_that_decode_by_their_requests(tmp_path: Path) -> None:
    prefill, first = (BEGUN, 1, 2, 64, 1.0), (OVER, 1, 0, 0, 2.0)
    write(tmp_path / "10", [prefill, first, (BEGUN, 2, 2, 2, 2.5), (OVER, 2, 0, 0, 3.0)])
    write(tmp_path / "11", [(OVER, 1, 0, 0, 2.0), (BEGUN, 2, 2, 2, 2.25)])
    assert sorted(gaps_s(tmp_path)[2]) == [0.25, 0.5]


def test_a_step_that_is_launched_before_the_output_has_no_gap(tmp_path: Path) -> None:
    records = [(BEGUN, 1, 1, 1, 1.0), (BEGUN, 2, 1, 1, 2.0), (OVER, 1, 0, 0, 3.0)]
    write(tmp_path / "10", records)
    assert gaps_s(tmp_path) == {}


def test_steps_are_read_with_when_each_member_began(tmp_path: Path) -> None:
    write(tmp_path / "10", [(SENT, 1, 3, 3, 1.0), (BEGUN, 1, 3, 3, 1.5), (OVER, 1, 0, 0, 2.0)])
    write(tmp_path / "11", [(BEGUN, 1, 3, 3, 1.75)])
    requests, tokens, sent_s, begun_s = read(tmp_path)[1]
    assert (requests, tokens, sent_s, sorted(begun_s)) == (3, 3, 1.0, [1.5, 1.75])


def test_what_is_stamped_is_there(monkeypatch: pytest.MonkeyPatch) -> None:
    stamped = (
        (Channel, "send"),
        (group_steps, "in_physical_blocks"),
        (SampledTokens, "note"),
    )
    before = [getattr(owner, name) for owner, name in stamped]
    for (owner, name), original in zip(stamped, before, strict=True):
        monkeypatch.setattr(owner, name, original)  # which puts all three back after the test
    install()
    for (owner, name), original in zip(stamped, before, strict=True):
        assert getattr(owner, name) is not original
