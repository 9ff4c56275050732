"""What an engine reports counts all its lanes, and blocks that are lent only if a request of the
group holds them.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from vllm.v1.request import RequestStatus

from flying_serving.comm.board import StepBoard
from flying_serving.engine.messages import RunStep
from flying_serving.engine.report import REPORT_S, Report
from tests.with_vllm.engine.pairs import Pair
from tests.with_vllm.engine.schedulers import BLOCK, Hooks

BLOCKS = 12  # beside the null block


@pytest.fixture
def board(tmp_path: Path) -> Iterator[StepBoard]:
    """Yield the board of both engines, in which each sees what the other notes."""
    made = StepBoard(f"{tmp_path}/board", 2)
    yield made
    made.close()


def reports_of(pair: Pair, board: StepBoard) -> list[Report]:
    """Return the reports of both engines; the first leads the group."""
    reports = []
    for part in pair.parts:
        lanes = part.lanes(board)
        report = Report(lanes, board)
        for size, scheduler in lanes.schedulers.items():
            scheduler.hooks = Hooks(stats_made=partial(report.complete, size))
        reports.append(report)
    return reports


def usage(report: Report, now_s: float) -> float | None:
    """Return the usage that a report says before its engine waits, if it says anything."""
    stats = report.stats_if_changed(now_s)
    return None if stats is None else stats.kv_cache_usage


def step(pair: Pair) -> RunStep:
    """Let the group step, once it has the blocks."""
    pair.leader.plan_step(0.0)
    pair.serve_all(0.0)
    if pair.leader.ready(0.0):
        pair.leader.plan_step(0.0)
    message = pair.inboxes.of_engine[0][0]
    assert isinstance(message, RunStep)
    pair.finish_step()
    return message


def test_usage_is_the_share_of_the_engines_blocks_that_requests_hold(board: StepBoard) -> None:
    """Those of its own lane and those of the group; neither what is lent and free, nor what is not
    lent yet.
    """
    pair = Pair(lend_blocks=5)
    reports = reports_of(pair, board)
    assert [report.blocks_in_use() for report in reports] == [0, 0]
    pair.own[1].add("local", 2 * BLOCK, 8)
    pair.own[1].schedule()
    pair.scheduler.add("r", 3 * BLOCK - 1, 2)
    step(pair)
    assert [member.lent.lent_count for member in pair.members] == [5, 5]
    # one chunk each, of eight tokens
    assert [report.blocks_in_use() for report in reports] == [
        2,
        4,
    ]
    # whichever lane has stepped, vLLM's own figures are those of that lane alone
    stats = [pair.scheduler.make_stats(), pair.own[0].make_stats(), pair.own[1].make_stats()]
    assert [one.kv_cache_usage for one in stats] == [2 / BLOCKS, 2 / BLOCKS, 4 / BLOCKS]
    assert [(one.num_running_reqs, one.num_waiting_reqs) for one in stats] == [
        (1, 0),
        (1, 0),
        (1, 0),
    ]


def test_usage_is_none_when_nothing_runs_though_blocks_stay_lent(board: StepBoard) -> None:
    """As vLLM counts its own: what is only cached is free."""
    pair = Pair(lend_blocks=5)
    reports = reports_of(pair, board)
    pair.scheduler.add("r", BLOCK, 2)
    while pair.scheduler.has_requests():
        message = step(pair)
    assert not message.more
    assert [member.lent.lent_count for member in pair.members] == [5, 5]
    assert [report.blocks_in_use() for report in reports] == [0, 0]


def test_reserved_blocks_are_not_in_use(board: StepBoard) -> None:
    """Between a member's answer and the leader's message to lend them."""
    pair = Pair()
    reports = reports_of(pair, board)
    pair.scheduler.add("r", 3 * BLOCK - 1, 1)
    pair.leader.plan_step(0.0)
    pair.serve(1, 0.0)
    assert len(pair.members[1].lent.reserved) == 3
    assert reports[1].blocks_in_use() == 0


def test_a_member_reports_now_and_then_and_at_the_end(board: StepBoard) -> None:
    """It has no outputs of the group's steps; one message a step would be too many."""
    report = reports_of(Pair(), board)[1]
    assert report.stats_if_due(10.0, idle=False) is not None
    assert report.stats_if_due(10.0 + REPORT_S / 2, idle=False) is None
    assert report.stats_if_due(10.0 + REPORT_S / 2, idle=True) is not None
    assert report.stats_if_due(10.0 + REPORT_S, idle=False) is None
    assert report.stats_if_due(11.0 + REPORT_S, idle=False) is not None


def test_blocks_that_are_freed_without_a_step_are_reported_by_all_members(board: StepBoard) -> None:
    """KV that is retained is in use; when it is released no step of the group follows whose output
    would say so.
    """
    pair = Pair(lend_blocks=5)
    reports = reports_of(pair, board)
    pair.scheduler.add("r", 2 * BLOCK, 4)
    step(pair)
    pinned = pair.leader.pool.pin("r")
    pair.scheduler.finish_requests(["r"], RequestStatus.FINISHED_ABORTED)
    while pair.scheduler.has_requests():
        step(pair)
    assert [usage(report, 10.0) for report in reports] == [len(pinned) / BLOCKS] * 2
    pair.leader.pool.unpin(pinned)
    assert [usage(report, 10.0) for report in reports] == [0.0, 0.0]


def test_news_repeat_no_reported_figure(board: StepBoard) -> None:
    """Nothing twice, nothing that the output of a step has said, and at most now and then while
    blocks are in use.
    """
    pair = Pair()
    report = reports_of(pair, board)[0]
    assert usage(report, 10.0) == 0.0
    assert usage(report, 20.0) is None
    taken = pair.pools[0].take(3)
    assert usage(report, 30.0) == 3 / BLOCKS
    taken += pair.pools[0].take(1)
    assert usage(report, 30.0 + REPORT_S / 2) is None
    assert usage(report, 30.0 + REPORT_S) == 4 / BLOCKS
    pair.pools[0].give(taken)
    assert usage(report, 30.0 + REPORT_S) == 0.0
    pair.own[0].add("r", BLOCK, 2)
    assert pair.own[0].make_stats().num_waiting_reqs == 1
    assert report.stats_if_changed(40.0) is None


def test_a_request_that_leaves_without_a_step_is_reported(board: StepBoard) -> None:
    pair = Pair()
    report = reports_of(pair, board)[0]
    pair.own[0].add("r", BLOCK, 2)
    assert report.stats_if_changed(10.0).num_waiting_reqs == 1
    pair.own[0].end("r")
    assert report.stats_if_changed(10.0).num_waiting_reqs == 0


def test_blocks_of_a_lost_leader_are_not_in_use(board: StepBoard) -> None:
    """Its members have all blocks back, and it cannot say so."""
    pair = Pair(lend_blocks=5)
    reports = reports_of(pair, board)
    pair.scheduler.add("r", 2 * BLOCK, 4)
    step(pair)
    assert [report.blocks_in_use() for report in reports] == [2, 2]
    pair.members[1].dissolve()
    assert usage(reports[1], 10.0) == 0.0


def test_no_statistics_with_disable_log_stats(
    board: StepBoard, monkeypatch: pytest.MonkeyPatch
) -> None:
    """vLLM's scheduler makes none then."""
    pair = Pair()
    nothing: Any = None
    monkeypatch.setattr(pair.own[1], "make_stats", lambda: nothing)
    report = reports_of(pair, board)[1]
    assert report.stats_if_due(10.0, idle=True) is None
    assert report.stats_if_changed(10.0) is None


def test_requests_and_lent_blocks_are_counted_for_each_lane(board: StepBoard) -> None:
    """For the admin route."""
    pair = Pair(lend_blocks=5)
    reports = reports_of(pair, board)
    pair.scheduler.add("r", 3 * BLOCK - 1, 2)
    step(pair)
    pair.own[0].add("local", BLOCK, 8)
    assert reports[0].counts() == {1: (0, 1), 2: (1, 0)}
    assert reports[0].lent_blocks() == {2: 5}
    assert reports[1].counts() == {1: (0, 0)}


def test_prefix_caches_are_counted_for_each_lane(board: StepBoard) -> None:
    """vLLM's figures are of the steps since the last ones, and of the engine, whichever lane they
    come from.
    """
    pair = Pair(lend_blocks=5)
    report = reports_of(pair, board)[0]
    assert report.prefix_cache == {1: (0, 0), 2: (0, 0)}
    for size, queries, hits in ((2, 100, 32), (1, 10, 0), (2, 50, 18)):
        stats = pair.own[0].make_stats()
        stats.prefix_cache_stats.record(queries, hits, preempted=False)
        before = dict(report.prefix_cache)
        report.complete(size, stats)
        assert report.prefix_cache[size] == (before[size][0] + queries, before[size][1] + hits)
    assert report.prefix_cache == {1: (10, 0), 2: (150, 50)}
