"""Migrations of four engines, everything around them made up: what is retained, what waits, what is copied when."""

import pytest

from flying_serving.layout.groups import Group
from flying_serving.migration.hold import HOLD_S
from flying_serving.migration.messages import MigrateKV, MigratingRequest
from flying_serving.migration.migrations import RETRY_S
from flying_serving.migration.source import RETAIN_S
from flying_serving.migration.target import PATIENCE_S
from flying_serving.wire import MigrationCounts
from tests.migration.nodes import Lane, Node, request

NOTHING = MigrationCounts(0, 0, 0)

PAIRS = [
    ((0,), (0, 1), (0, 1)),
    ((2, 3), (3,), (2, 3)),
    ((1,), (0,), (0, 1)),
    ((2, 3), (0, 1), (0, 1, 2, 3)),
    ((0, 1, 2, 3), (2,), (0, 1, 2, 3)),
    ((1,), (0, 1, 2, 3), (0, 1, 2, 3)),
]


def physical(engine: int, group: Group, blocks: list[int]) -> list[int]:
    """A group's blocks on one of its engines."""
    return Lane(engine, len(group)).physical(blocks)


@pytest.mark.parametrize(("source", "target", "group"), PAIRS)
@pytest.mark.parametrize("told_first", [True, False])
def test_a_request_arrives_with_its_kv(source: Group, target: Group, group: Group, told_first: bool) -> None:
    """Retained, then fetched; or fetched before its old group was told that it leaves."""
    node = Node()
    old, new = node.lane(source), node.lane(target)
    blocks = list(range(9, 9 - -(-30 // old.block_tokens), -1))
    old.run(request("a", 31, computed=30), blocks)
    if told_first:
        node.at(source).retain(["a"], 0.0)
        assert (old.requests, old.pinned) == ({}, [blocks])
    node.expect(request("a+1", 31), source, target)
    assert node.at(target)
    node.at(target).begin(0.0)
    blocks_aside = new.set_aside["a+1"]
    assert node.messages == [MigrateKV(group, source, target, [MigratingRequest("a", 0, 30, blocks_aside)])]
    assert node.at(target)
    assert not new.requests
    node.serve()
    for number, engine in enumerate(node.engines):
        mine = [(physical(number, source, blocks), range(30))] if number in source else None
        theirs = [(physical(number, target, blocks_aside), range(30))] if number in target else None
        assert engine.copied == ([(mine, theirs)] if number in group else [])
        assert engine.admitted == ([("a+1", len(target))] if number == target[0] else [])
        counts = MigrationCounts(1, 30, 0) if number == target[0] else NOTHING
        assert (engine.migrations.counts(), bool(engine.migrations)) == (counts, False)
    assert (old.requests, old.pinned, new.arrivals, new.released) == ({}, [], [("a+1", 30)], [])
    node.at(source).retain(["a"], 0.0)
    assert old.pinned == []
    assert node.at(source).retry_in_s(0.0) is None


def ready(computed: int = 10, in_flight: int = 0) -> Node:
    """Four engines; a request of engine 1 with three blocks is retained there, as far as it was computed."""
    node = Node()
    node.lane((1,)).run(request("a", 12, computed, in_flight), [7, 3, 5])
    node.at((1,)).retain(["a"], 0.0)
    return node


@pytest.mark.parametrize(
    ("computed", "in_flight", "cached", "copied"),
    [
        (10, 0, 0, range(10)),  # not all that it may have
        (10, 3, 0, range(7)),  # what a step under way computes is not there yet
        (12, 0, 0, range(11)),  # more than it may have: the last token has to be computed for the next
        (12, 1, 8, range(8, 11)),  # the prefix cache has some
        (10, 2, 8, None),  # or all that there is
        (3, 3, 0, None),
        (0, 0, 0, None),
    ],
)
def test_what_is_there_and_not_cached_is_copied(
    computed: int, in_flight: int, cached: int, copied: range | None
) -> None:
    """And if that is nothing, workers have nothing to do and the request is prefilled."""
    node = ready(computed, in_flight)
    source, target = node.engines[1], node.engines[0]
    assert source.lanes[1].requests == {}
    assert source.lanes[1].pinned == ([[7, 3, 5]] if computed > in_flight else [])
    target.lanes[1].cached = cached
    node.expect(request("a+1", 12), (1,), (0,))
    target.migrations.begin(0.0)
    assert node.serve().requests == [MigratingRequest("a", cached, 11, [50, 51, 52])]
    if copied is None:
        assert source.copied == target.copied == []
        assert (target.lanes[1].arrivals, target.lanes[1].released) == ([], ["a+1"])
        assert target.migrations.counts() == MigrationCounts(0, 0, 1)
    else:
        assert source.copied == [([([7, 3, 5], copied)], None)]
        assert target.copied == [(None, [([50, 51, 52], copied)])]
        assert (target.lanes[1].arrivals, target.lanes[1].released) == ([("a+1", copied.stop)], [])
        assert target.migrations.counts() == MigrationCounts(1, len(copied), 0)
    assert target.admitted == [("a+1", 1)]
    assert source.lanes[1].pinned == []


def test_a_request_cached_at_the_target_is_not_prefilled_again() -> None:
    """Nothing is exchanged, and it is counted neither as moved nor as prefilled."""
    node = ready()
    target = node.engines[0]
    target.lanes[1].cached = 11
    node.expect(request("a+1", 12), (1,), (0,))
    target.migrations.begin(0.0)
    node.serve()
    assert (target.copied, target.admitted, target.migrations.counts()) == ([], [("a+1", 1)], NOTHING)


def test_all_that_go_from_one_group_to_another_go_together() -> None:
    """In one exchange, of those whose KV is there; another pair of groups has a message of its own."""
    node = Node()
    lane = node.lane((2, 3))
    for name, computed, blocks in (("a", 15, [4, 2]), ("c", 9, [6, 1]), ("d", 4, [8])):
        lane.run(request(name, 20, computed), blocks)
    for name in ("a", "b", "c"):
        node.expect(request(f"{name}+1", 16), (2, 3), (0, 1), name)
    node.expect(request("d+1", 16), (2, 3), (0,), "d")
    node.at((0, 1)).begin(0.0)
    together, alone = node.messages
    assert [one.request_id for one in together.requests] == ["a", "b", "c"]
    assert [one.request_id for one in alone.requests] == ["d"]
    node.serve()
    ranges = [range(15), range(9)]
    assert [blocks for (mine, _) in node.engines[3].copied for blocks, _ in mine] == [[2304, 2302], [2306, 2301]]
    assert [tokens for (_, theirs) in node.engines[1].copied for _, tokens in theirs] == ranges
    assert node.at((0, 1)).counts() == MigrationCounts(2, 24, 1)
    assert list(lane.requests) == ["d"]
    node.serve()
    assert node.engines[0].admitted == [("a+1", 2), ("b+1", 2), ("c+1", 2), ("d+1", 1)]
    assert (lane.requests, lane.pinned) == ({}, [])


# ---- who waits


def test_where_there_is_no_room_requests_wait() -> None:
    """The engine is told what it lacks, and tries again; who comes later waits behind, but not in another lane."""
    node = Node()
    for name in ("a", "b", "c"):
        node.lane((2,)).run(request(name, 12, 8), [7, 3])
    at, lane = node.at((0,)), node.lane((0,))
    lane.missing = 2
    node.expect(request("a+1", 12), (2,), (0,), "a", 5.0)
    node.expect(request("b+1", 12), (2,), (0,), "b", 5.0)
    at.begin(5.0)
    assert (node.messages, node.engines[0].lacked, lane.asked) == ([], [(1, 2)], ["a+1"])
    assert at.retry_in_s(5.0) == RETRY_S
    assert at
    node.expect(request("c+1", 12), (2,), (0, 1), "c", 5.0)
    at.begin(5.0)
    assert [[one.request_id for one in message.requests] for message in node.messages] == [["c"]]
    lane.missing = 0
    at.begin(5.0 + 10 * PATIENCE_S)
    assert [[one.request_id for one in message.requests] for message in node.messages] == [["c"], ["a", "b"]]
    assert at.retry_in_s(5.0) is None
    assert at
    node.serve()
    node.serve()
    assert node.engines[0].admitted == [("c+1", 2), ("a+1", 1), ("b+1", 1)]
    assert at.counts() == MigrationCounts(3, 24, 0)


def test_who_has_waited_long_is_prefilled_again() -> None:
    """Its old group is told, so that it lets the KV go; who came later waits on."""
    node = ready()
    at, lane = node.at((0,)), node.lane((0,))
    lane.missing = 4
    node.expect(request("a+1", 12), (1,), (0,), "a", 0.0)
    node.expect(request("b+1", 12), (1,), (0,), "b", PATIENCE_S)
    at.begin(PATIENCE_S)
    assert node.messages == []
    at.begin(PATIENCE_S + 0.01)
    assert [message.requests for message in node.messages] == [[MigratingRequest("a", 0, 0, [])]]
    assert node.engines[0].lacked == [(1, 4), (1, 4)]
    assert node.engines[1].lanes[1].pinned == [[7, 3, 5]]
    node.serve()
    assert node.engines[1].lanes[1].pinned == []
    assert node.engines[0].copied == []
    assert (node.engines[0].admitted, lane.arrivals) == ([("a+1", 1)], [])
    assert at.counts() == MigrationCounts(0, 0, 1)
    assert at.retry_in_s(2.0) == RETRY_S


def test_a_request_that_ends_while_it_waits_is_forgotten() -> None:
    """And nobody is asked for its KV, which goes in time."""
    node = ready()
    at, lane = node.at((0,)), node.lane((0,))
    lane.missing = 1
    node.expect(request("a+1", 12), (1,), (0,))
    at.begin(0.0)
    lane.missing = 0
    at.target.abort(["other"])
    assert at
    at.target.abort(["a+1"])
    at.begin(0.1)
    assert not at
    assert (node.messages, lane.set_aside, node.engines[0].admitted) == ([], {}, [])
    node.at((1,)).begin(RETAIN_S + 0.1)
    assert node.lane((1,)).pinned == []


@pytest.mark.parametrize("computed", [10, 0])
def test_a_request_that_ends_on_its_way_is_released(computed: int) -> None:
    """By both groups, when its message is served; it is neither run nor counted."""
    node = ready(computed)
    at, lane = node.at((0,)), node.lane((0,))
    node.expect(request("a+1", 12), (1,), (0,))
    at.begin(0.0)
    at.target.abort(["a+1"])
    assert at
    node.serve()
    assert not at
    assert (lane.released, lane.arrivals, node.engines[0].admitted) == (["a+1"], [], [])
    assert at.counts() == NOTHING
    assert node.lane((1,)).pinned == []


def test_a_request_of_one_token_has_nothing_to_bring() -> None:
    """The only token that it has is computed for the next."""
    node = Node()
    node.expect(request("a+1", 1), (1,), (0,))
    node.at((0,)).begin(0.0)
    assert node.serve().requests == [MigratingRequest("a", 0, 0, [])]
    assert node.engines[0].admitted == [("a+1", 1)]


# ---- who is retained


def test_kv_that_is_not_fetched_is_released() -> None:
    """In time; the engine knows when to look."""
    node = Node()
    lane, at = node.lane((2, 3)), node.at((2, 3))
    for name, block in (("a", 4), ("b", 6)):
        lane.run(request(name, 9, 8), [block])
    assert at.retry_in_s(0.0) is None
    at.retain(["a"], 10.0)
    at.retain(["b", "unknown"], 12.0)
    assert at.retry_in_s(13.0) == RETAIN_S - 3.0
    at.begin(10.0 + RETAIN_S)
    assert lane.pinned == [[4], [6]]
    at.begin(10.01 + RETAIN_S)
    assert lane.pinned == [[6]]
    assert at.retry_in_s(20.0 + RETAIN_S) == 0.0
    at.begin(12.01 + RETAIN_S)
    assert lane.pinned == []
    assert at.retry_in_s(13.0) is None
    assert not at


def test_kv_that_is_retained_does_not_cost_others_theirs() -> None:
    """Where a running request would be preempted it goes at once; other lanes keep theirs."""
    node = Node()
    at = node.at((0,))
    for group, name in (((0,), "a"), ((0, 1), "b")):
        node.lane(group).run(request(name, 9, 8), [4])
    at.retain(["a", "b"], 0.0)
    node.lane((0, 1)).short = 1
    at.begin(0.0)
    assert (node.lane((0,)).pinned, node.lane((0, 1)).pinned) == ([[4]], [])
    node.expect(request("b+1", 9), (0, 1), (2,), "b")
    node.at((2,)).begin(0.0)
    node.serve()
    assert node.at((2,)).counts() == MigrationCounts(0, 0, 1)


# ---- who moves on before it has come


def test_a_request_that_goes_on_while_it_waits_does_not_stay() -> None:
    """It has nothing here, and nobody would hear of it."""
    node = ready()
    at, lane = node.at((0,)), node.lane((0,))
    lane.missing = 1
    node.expect(request("a+1", 12), (1,), (0,))
    at.begin(0.0)
    at.retain(["a+1"], 0.1)
    lane.missing = 0
    at.begin(0.2)
    assert not at
    assert (node.messages, node.engines[0].admitted) == ([], [])


@pytest.mark.parametrize("told_first", [True, False])
def test_a_request_that_goes_on_before_it_is_here_takes_its_kv_along(told_first: bool) -> None:
    """Its message is older than that of the group which it goes on to."""
    node = ready()
    node.expect(request("a+1", 12), (1,), (0,))
    node.at((0,)).begin(0.0)
    if told_first:
        node.at((0,)).retain(["a+1"], 0.0)
    node.expect(request("a+2", 12), (0,), (2,), "a+1")
    node.at((2,)).begin(0.0)
    node.serve()
    assert node.lane((0,)).pinned == ([[50, 51, 52]] if told_first else [])
    node.serve()
    assert (node.lane((0,)).requests, node.lane((0,)).pinned) == ({}, [])
    assert node.engines[2].copied == [(None, [([50, 51, 52], range(10))])]
    assert node.engines[2].admitted == [("a+2", 1)]
    assert node.at((2,)).counts() == MigrationCounts(1, 10, 0)


def test_after_an_order_engines_wait_for_the_announcement() -> None:
    """That nothing does is word enough; if none comes, they go on after a while."""
    at = Node().at((0,))
    at.hold.await_announcement(0.0)
    assert at.hold.holds(0.1)
    at.hold.announce(0, 0, 0.2)
    assert not at.hold.holds(0.2)
    at.hold.await_announcement(1.0)
    at.hold.announce(1, 1, 1.1)
    assert at.hold.holds(1.2)
    at.hold.await_announcement(2.0)
    assert at.hold.holds(2.1)
    assert not at.hold.holds(2.0 + HOLD_S)
    assert not at.hold.holds(2.1 + HOLD_S)


def test_announcements_in_a_row_hold_engines_no_longer_than_one() -> None:
    """Requests that go on before they have arrived bring no message: it is not awaited while layouts change."""
    node = Node()
    node.lane((0, 1)).run(request("a", 9, computed=8), [1])
    at = node.at((0,))
    at.hold.announce(1, 1, 0.0)
    for number in range(1, 4):
        at.hold.await_announcement(number * HOLD_S / 4)
        at.hold.announce(1, 1, number * HOLD_S / 4)
        assert at.hold.holds(number * HOLD_S / 4)
    node.expect(request("a+1", 9), (0, 1), (0,), "a")
    at.begin(HOLD_S / 2)
    assert (node.messages, at.hold.holds(HOLD_S)) == ([], False)
    at.begin(HOLD_S)
    assert len(node.messages) == 1
    at.hold.announce(1, 1, HOLD_S)
    assert at.hold.holds(HOLD_S)


def test_announced_copies_are_made_together() -> None:
    """No message before all have come, no step of its own before all messages are served; both only for a while."""
    node = Node()
    old = node.lane((0, 1))
    for number, name in enumerate(("a", "b", "c")):
        old.run(request(name, 9, computed=8), [3 * number + 1])
    at = node.at((0,))
    assert not at.hold.holds(0.0)
    at.hold.announce(2, 2, 0.0)
    node.expect(request("a+1", 9), (0, 1), (0,))
    at.begin(0.0)
    assert (node.messages, at.hold.holds(0.0)) == ([], True)
    node.expect(request("b+1", 9), (0, 1), (0,), "b")
    at.begin(0.1)
    assert [[one.request_id for one in message.requests] for message in node.messages] == [["a", "b"]]
    node.serve()
    assert at.hold.holds(0.1)
    node.expect(request("c+1", 9), (0, 1), (1,), "c")
    node.at((1,)).begin(0.1)
    node.serve()
    assert not at.hold.holds(0.1)
    at.hold.announce(5, 1, 1.0)
    old.run(request("d", 9, computed=8), [20])
    node.expect(request("d+1", 9), (0, 1), (0,), "d", 1.0)
    at.begin(1.0)
    assert (node.messages, at.hold.holds(1.0)) == ([], True)
    assert not at.hold.holds(1.0 + HOLD_S)
    at.begin(1.0 + HOLD_S)
    assert len(node.messages) == 1
