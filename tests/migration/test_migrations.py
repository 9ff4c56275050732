"""Migrations of two engines over vLLM's own schedulers: what is retained, pulled, admitted and let
go, and when.
"""

from collections.abc import Iterator

import pytest
from vllm.v1.request import Request, RequestStatus

from flying_serving.layout.groups import Group
from flying_serving.migration.messages import KVPulled, PullKV, ReleaseKV
from flying_serving.migration.migrations import RETRY_S
from flying_serving.migration.offers import KVSource, Offer
from flying_serving.migration.source import RETAIN_S
from flying_serving.migration.target import OPENING_S, PATIENCE_S, STALLED_S
from flying_serving.wire import MigrationCounts
from tests.migration.nodes import GROUPS, Node
from tests.vllm_adapter.lanes import make

NOTHING = MigrationCounts(0, 0, 0)
CLOSED = Offer(0, is_final=True, blocks=[])
A, B, BOTH = GROUPS
PAIRS = [(old, new) for old in GROUPS for new in GROUPS if old != new]


@pytest.fixture(autouse=True)
def quiet(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """vLLM reads a machine's cores when it makes a configuration."""
    monkeypatch.setenv("VLLM_CPU_OMP_THREADS_BIND", "nobind")
    yield


def node(blocks: dict[Group, int] | None = None) -> Node:
    """Two engines, with room."""
    return Node(dict.fromkeys(GROUPS, 20) | (blocks or {}), overlaps=False)


def begin(
    at: Node, group: Group, name: str = "a", prompt: int = 10, steps: int = 4, family: int = 3
) -> Request:
    """A request that has made some steps: two of them for its prompt."""
    made = make(name, family, prompt, 20)
    at.lanes[group].scheduler.add_request(made)
    for _ in range(steps):
        at.step(group)
    return made


def again(before: Request, name: str, outputs: int = 6) -> Request:
    """The same request as it goes on elsewhere."""
    family = before.prompt_token_ids[0] // 100
    return make(name, family, before.num_prompt_tokens, outputs, had=before.num_output_tokens)


def settle(at: Node, *, limit_s: float | None = None) -> None:
    """Let engines pull, and handle messages until there are none."""
    for engine in range(2):
        at.migrations[engine].advance(at.now_s, limit_s)
    while any(at.inboxes):
        for engine in range(2):
            at.serve(engine)


def all_free(at: Node) -> bool:
    """Whether nothing holds a block any more."""
    return all(lane.free() == lane.pool.total for lane in at.lanes.values())


def run_out(at: Node) -> None:
    """All requests end; their KV is checked then."""
    for _ in range(40):
        for group in GROUPS:
            at.step(group)
    assert all(lane.scheduler.requests == {} for lane in at.lanes.values())


# ---- there and away


@pytest.mark.parametrize(("old", "new"), PAIRS)
@pytest.mark.parametrize("told_first", [True, False])
def test_a_request_arrives_with_its_kv(old: Group, new: Group, told_first: bool) -> None:
    """Retained, then fetched; or expected before its old group was told that it leaves."""
    at = node()
    before = begin(at, old)
    assert before.num_tokens == 13
    if told_first:
        at.at(old).retain("a", 5)
        assert at.lanes[old].scheduler.requests == {}
    at.expect(again(before, "a+1"), new, KVSource(old, 5))
    assert at.at(new).incoming
    if not told_first:
        settle(at)
        assert (at.lanes[new].scheduler.requests, at.at(new).counts()) == ({}, NOTHING)
        at.at(old).retain("a", 5)
    settle(at)
    assert not at.at(new).incoming
    assert (at.at(new).counts(), at.at(old).source.retained) == (MigrationCounts(1, 12, 0), {})
    assert at.lanes[old].free() == at.lanes[old].pool.total
    assert at.lanes[new].scheduler.requests["a+1"].num_computed_tokens == 12
    run_out(at)
    assert ("a+1" in at.ended, all_free(at)) == (True, True)


def test_kv_of_a_lost_engine_is_not_copied() -> None:
    """Its memory is not mapped any more. A leader that has not heard of it gets its answer."""
    at = node()
    begin(at, B)
    at.lost = {1}
    before = list(at.lanes[BOTH].kv)
    at.migrations[0].handle(PullKV(BOTH, "a+1", KVSource(B, 5), [1, 2], [3, 4], range(8)))
    assert at.lanes[BOTH].kv == before
    assert list(at.inboxes[0]) == [KVPulled(BOTH, 0, "a+1")]


@pytest.mark.parametrize("steps", [0, 1])
def test_tokens_without_kv_are_prefilled(steps: int) -> None:
    """All of it, or what was not computed yet."""
    at = node()
    before = begin(at, A, steps=steps)
    at.at(A).retain("a", 5)
    at.expect(again(before, "a+1"), BOTH, KVSource(A, 5))
    for _ in range(2):
        settle(at)
    assert at.at(BOTH).counts() == (MigrationCounts(1, 8, 0) if steps else MigrationCounts(0, 0, 1))
    run_out(at)
    assert all_free(at)


def test_a_request_that_is_unknown_is_prefilled_at_once() -> None:
    """Its old group says that it has nothing."""
    at = node()
    at.at(A).retain("a", 5)
    at.expect(make("a+1", 3, 9, 2), B, KVSource(A, 5))
    settle(at)
    assert at.at(B).counts() == MigrationCounts(0, 0, 1)
    assert list(at.lanes[B].scheduler.requests) == ["a+1"]


def test_a_step_under_way_is_not_offered() -> None:
    """Its tokens are computed again."""
    at = node()
    before = begin(at, A)
    at.lanes[A].schedule()
    at.at(A).retain("a", 5)
    assert at.read(KVSource(A, 5)) == Offer(
        12, is_final=True, blocks=at.at(A).source.retained[5].blocks
    )
    at.expect(again(before, "a+1"), B, KVSource(A, 5))
    settle(at)
    at.lanes[A].settle()
    run_out(at)
    assert all_free(at)


def test_tokens_in_the_prefix_cache_are_not_pulled() -> None:
    """The rest is, into blocks that no other request uses."""
    at = node()
    other = begin(at, B, "other", prompt=9, steps=2)
    shared = at.lanes[B].pool.blocks_of("other")[:2]
    before = begin(at, A)
    at.at(A).retain("a", 5)
    at.expect(again(before, "a+1"), B, KVSource(A, 5))
    settle(at)
    assert at.at(B).counts() == MigrationCounts(1, 4, 0)
    assert at.lanes[B].pool.blocks_of("a+1")[:2] == shared
    assert at.lanes[B].has(3, shared, range(8))
    assert other.num_tokens == 10
    run_out(at)


@pytest.mark.parametrize("prompt", [1, 9])
def test_a_request_that_needs_no_kv_pulls_none(prompt: int) -> None:
    """One of a single token, or all in the prefix cache: it is neither moved nor prefilled
    again.
    """
    at = node()
    begin(at, B, "other", prompt=9, steps=2)
    before = begin(at, A, prompt=prompt, steps=0)
    at.at(A).retain("a", 5)
    at.expect(again(before, "a+1"), B, KVSource(A, 5))
    settle(at)
    assert ("a+1" in at.lanes[B].scheduler.requests, at.at(B).counts().migrated) == (True, 0)
    run_out(at)
    assert all_free(at)


def test_kv_of_a_request_that_gave_up_is_not_retained() -> None:
    """Its owner was in a step for so long that the request runs elsewhere by now."""
    at = node()
    before = begin(at, A)
    at.expect(again(before, "a+1"), B, KVSource(A, 5))
    at.now_s += OPENING_S + 0.1
    settle(at)
    assert at.at(B).counts() == MigrationCounts(0, 0, 1)
    at.at(A).retain("a", 5)
    assert (at.at(A).source.retained, at.lanes[A].free()) == ({}, at.lanes[A].pool.total)
    assert at.read(KVSource(A, 5)) == CLOSED


def test_a_request_without_offered_kv_does_not_wait_for_room() -> None:
    """It is prefilled when there is some, like any other."""
    at = node()
    taken = at.lanes[B].pool.take(19)
    at.at(A).retain("a", 5)
    at.expect(make("a+1", 3, 9, 2), B, KVSource(A, 5))
    settle(at)
    assert (list(at.lanes[B].scheduler.requests), at.asked) == (["a+1"], [])
    at.lanes[B].pool.give(taken)


# ---- chunks


@pytest.mark.parametrize("new", [B, BOTH])
def test_a_pull_takes_the_time_that_there_is(new: Group) -> None:
    """At least a block, then the next; a group's members each answer before it goes on."""
    at = node()
    before = begin(at, A)
    at.at(A).retain("a", 5)
    at.at(new).target.chunks.token_s = {len(new): 1.0}
    at.expect(again(before, "a+1"), new, KVSource(A, 5))
    arrival = at.at(new).incoming.by_id["a+1"]
    pulled, released = [], []
    for limit_s in (0.0, 5.0, 9.0):
        at.at(new).advance(at.now_s, limit_s)
        if new == BOTH:
            assert [type(message) for message in at.inboxes[1]] == [PullKV]
            at.at(new).advance(at.now_s, limit_s)
            at.serve(1)
            assert at.inboxes[0][1] == KVPulled(BOTH, 1, "a+1")
            before_tokens = arrival.pulled_tokens
            at.serve(0)
            at.serve(0)
            assert arrival.pulled_tokens == before_tokens
            at.serve(0)
        pulled.append(arrival.pulled_tokens)
        released.append(at.inboxes[0].popleft())
        at.migrations[0].handle(released[-1])
    assert pulled == [4, 9, 12]
    assert at.at(new).counts() == MigrationCounts(1, 12, 0)
    assert released == [ReleaseKV(A, 5, 4), ReleaseKV(A, 5, 9), ReleaseKV(A, 5)]
    settle(at)
    run_out(at)
    assert all_free(at)


def test_blocks_used_again_while_they_are_copied_do_not_count() -> None:
    """Whole blocks that came before it do; the rest is prefilled."""
    at = node()
    before = begin(at, A)
    at.at(A).retain("a", 5)
    at.at(BOTH).target.chunks.token_s = {2: 1.0}
    at.expect(again(before, "a+1"), BOTH, KVSource(A, 5))
    settle(at, limit_s=5.0)
    at.at(BOTH).advance(at.now_s, None)
    at.serve(1)
    at.at(A).source.release(5)
    at.lanes[A].kv[:] = [-2] * len(at.lanes[A].kv)
    settle(at)
    settle(at)
    assert at.at(BOTH).counts() == MigrationCounts(1, 4, 0)
    run_out(at)
    assert all_free(at)


# ---- ahead


def ahead(at: Node, early: bool = True) -> Request:
    """A request that ends in one group after three outputs, and is pulled ahead by the other."""
    made = make("a", 3, 10, 3)
    at.at(A).source.offer("a", 1, 5, early=early)
    at.lanes[A].scheduler.add_request(made)
    at.expect(make("b", 3, 10, 20), B, KVSource(A, 5), 12)
    return made


@pytest.mark.parametrize("early", [True, False])
def test_kv_is_pulled_while_it_is_computed(early: bool) -> None:
    """Then the request comes under the same name, and has all that there is at once."""
    at = node()
    made = ahead(at, early)
    pulled = []
    for _ in range(4):
        at.step(A)
        settle(at)
        pulled.append(at.at(B).incoming.by_id["b"].pulled_tokens)
    assert pulled == ([8, 10, 11, 12] if early else [0, 0, 0, 12])
    assert "a" in at.ended
    assert list(at.at(A).source.retained) == [5]
    at.expect(again(made, "b"), B, KVSource(A, 5))
    settle(at)
    assert (at.at(B).counts(), at.at(A).source.retained) == (MigrationCounts(1, 12, 0), {})
    run_out(at)
    assert all_free(at)


def test_an_aborted_prefetch_leaves_the_offer_of_a_running_request() -> None:
    """The request goes to a third group with it; if it has ended it may do so too, until its KV is
    overdue.
    """
    at = node()
    made = ahead(at)
    at.step(A)
    settle(at)
    at.abort("b", B)
    settle(at)
    assert (at.at(B).incoming.by_id, at.lanes[B].free()) == ({}, at.lanes[B].pool.total)
    while "a" not in at.ended:
        at.step(A)
    at.expect(again(made, "c"), BOTH, KVSource(A, 5))
    settle(at)
    assert at.at(BOTH).counts() == MigrationCounts(1, 12, 0)
    run_out(at)
    at = node()
    ahead(at)
    while "a" not in at.ended:
        at.step(A)
    settle(at)
    at.abort("b", B)
    settle(at)
    assert list(at.at(A).source.retained) == [5]
    at.now_s += RETAIN_S + 0.1
    settle(at)
    assert at.at(A).source.retained == {}
    assert all_free(at)


def test_a_request_waits_for_a_prefix_in_a_long_queue() -> None:
    """Its owner has it and says so, but has not come to it: only after STALLED_S is it
    prefilled.
    """
    at = node()
    at.at(A).source.offer("prefix", 1, 5, early=True)
    at.expect(make("a", 3, 10, 3), B, KVSource(A, 5))
    at.now_s += OPENING_S + 0.1
    settle(at)
    assert at.at(B).incoming
    assert at.lanes[B].free() == at.lanes[B].pool.total
    at.now_s += STALLED_S
    settle(at)
    assert at.at(B).counts() == MigrationCounts(0, 0, 1)
    assert "a" in at.lanes[B].scheduler.requests


def test_a_dropped_prefetch_is_pulled_when_its_request_arrives() -> None:
    """When nothing more came for long; the blocks are free meanwhile."""
    at = node()
    made = ahead(at)
    at.step(A)
    settle(at)
    at.now_s += STALLED_S
    settle(at)
    assert at.at(B).incoming
    at.now_s += 0.1
    settle(at)
    assert (at.at(B).incoming.by_id, at.lanes[B].free()) == ({}, at.lanes[B].pool.total)
    while "a" not in at.ended:
        at.step(A)
    at.expect(again(made, "b"), B, KVSource(A, 5))
    settle(at)
    assert at.at(B).counts() == MigrationCounts(1, 12, 0)
    run_out(at)


def test_a_request_with_all_its_blocks_needs_no_free_block() -> None:
    """Of a request that was pulled ahead the last tokens come when it is to run, however full the
    lane is then.
    """
    at = node()
    made = ahead(at)
    for _ in range(2):
        at.step(A)
        settle(at)
    (arrival,) = at.at(B).incoming.by_id.values()
    assert 8 < arrival.pulled_tokens < 12
    at.lanes[B].pool.take(at.lanes[B].free())
    while "a" not in at.ended:
        at.step(A)
    at.expect(again(made, "b"), B, KVSource(A, 5))
    settle(at)
    assert (at.at(B).counts(), at.asked) == (MigrationCounts(1, 12, 0), [])


def test_pulled_kv_of_a_preempted_request_stays() -> None:
    """It is offered no more, and when the request comes the rest is prefilled."""
    at = node()
    made = ahead(at)
    at.step(A)
    settle(at)
    assert at.lanes[A].scheduler.reset_prefix_cache(reset_running_requests=True)
    assert at.read(KVSource(A, 5)) == CLOSED
    while "a" not in at.ended:
        at.step(A)
        settle(at)
    assert at.at(A).source.retained == {}
    at.expect(again(made, "b"), B, KVSource(A, 5))
    settle(at)
    assert at.at(B).counts() == MigrationCounts(1, 8, 0)
    run_out(at)
    assert all_free(at)


# ---- who waits


def test_requests_wait_where_blocks_are_missing() -> None:
    """The engine is asked for blocks, and tries again; those who come later wait behind, in that
    lane.
    """
    at = node({B: 8})
    taken = at.lanes[B].pool.take(6)
    for number, name in enumerate("ab", 5):
        before = begin(at, A, name, family=number)
        at.at(A).retain(name, number)
        at.expect(again(before, f"{name}+1"), B, KVSource(A, number))
    before = begin(at, A, "c")
    at.at(A).retain("c", 7)
    at.expect(again(before, "c+1"), BOTH, KVSource(A, 7))
    settle(at)
    settle(at)
    assert (at.asked, at.lanes[B].free()) == ([(1, 3)], 0)
    assert at.at(B).retry_in_s(at.now_s) == RETRY_S
    assert list(at.lanes[BOTH].scheduler.requests) == ["c+1"]
    at.lanes[B].pool.give(taken)
    at.now_s += PATIENCE_S / 2
    settle(at)
    assert list(at.lanes[B].scheduler.requests) == ["a+1"]
    for _ in range(8):
        at.step(B)
    settle(at)
    assert at.at(B).counts() == MigrationCounts(2, 24, 0)


def test_no_block_is_asked_for_while_a_chunk_is_on_its_way() -> None:
    """Its owner has none to lend before the chunk is here, and would be asked again only after a
    while.
    """
    at = node({BOTH: 2})
    at.at(BOTH).target.chunks.blocks = 2
    for number, (name, owner) in enumerate((("a", A), ("b", B)), 5):
        before = begin(at, owner, name, family=number)
        at.at(owner).retain(name, number)
        at.expect(again(before, f"{name}+1"), BOTH, KVSource(owner, number))
    for _ in range(2):
        at.at(BOTH).advance(at.now_s, None)
    assert any(arrival.writers for arrival in at.at(BOTH).incoming.by_id.values())
    assert at.lanes[BOTH].free() == 0
    assert at.asked == []
    settle(at)
    at.at(BOTH).advance(at.now_s, None)
    assert {size for size, _ in at.asked} == {2}


def test_a_request_that_has_waited_long_is_prefilled() -> None:
    """Its old group is told; who came later waits on; who is pulled ahead holds up nobody."""
    at = node()
    taken = at.lanes[B].pool.take(19)
    at.at(A).source.offer("other", 1, 4, early=True)
    begin(at, A, "other", family=4)
    at.expect(make("ahead", 4, 10, 20), B, KVSource(A, 4), 30)
    before = begin(at, A)
    at.at(A).retain("a", 5)
    at.expect(again(before, "a+1"), B, KVSource(A, 5))
    settle(at)
    assert at.asked == [(1, 8), (1, 4)]
    at.now_s += PATIENCE_S
    later = begin(at, A, "b", family=5)
    at.at(A).retain("b", 6)
    at.expect(again(later, "b+1"), B, KVSource(A, 6))
    settle(at)
    assert (list(at.at(B).incoming.by_id), at.at(B).counts()) == (["ahead", "a+1", "b+1"], NOTHING)
    at.now_s += 0.01
    settle(at)
    assert list(at.at(B).incoming.by_id) == ["ahead", "b+1"]
    assert (at.at(B).counts(), list(at.at(A).source.retained)) == (MigrationCounts(0, 0, 1), [6])
    at.lanes[B].pool.give(taken)


def test_an_offer_that_is_never_made_is_not_awaited_for_ever() -> None:
    """A request then runs without; one that is pulled ahead gives its blocks back."""
    at = node()
    at.expect(make("a+1", 3, 9, 2), B, KVSource(A, 5))
    at.expect(make("ahead", 4, 9, 20), B, KVSource(A, 6), 12)
    at.now_s += OPENING_S
    settle(at)
    assert len(at.at(B).incoming.by_id) == 2
    at.now_s += 0.1
    settle(at)
    assert (at.at(B).incoming.by_id, at.at(B).counts()) == ({}, MigrationCounts(0, 0, 1))
    run_out(at)
    assert all_free(at)


# ---- who ends or leaves on the way


@pytest.mark.parametrize("new", [B, BOTH])
@pytest.mark.parametrize("when", ["before", "prepared", "pulling", "after"])
def test_a_request_that_ends_is_forgotten(new: Group, when: str) -> None:
    """Whenever its client goes; members that still write finish first, and both groups let go."""
    at = node()
    before = begin(at, A)
    if when != "prepared":
        at.at(A).retain("a", 5)
    at.expect(again(before, "a+1"), new, KVSource(A, 5))
    if when != "before":
        at.at(new).advance(at.now_s, None)
    if when == "after":
        settle(at)
    at.abort("other", new)
    at.abort("a+1", new)
    if when == "pulling" and new == BOTH:
        assert at.lanes[new].free() < at.lanes[new].pool.total
    settle(at)
    assert not at.at(new).incoming
    assert at.lanes[new].free() == at.lanes[new].pool.total
    if when == "prepared":
        at.at(A).retain("a", 5)
    assert (at.at(A).source.retained, at.lanes[new].scheduler.requests) == ({}, {})
    assert all_free(at)


@pytest.mark.parametrize("pulled", [0, 5, 12])
def test_a_forwarded_request_takes_its_kv_along(pulled: int) -> None:
    """As much of it as had come; the third group gets it."""
    at = node()
    before = begin(at, A)
    at.at(A).retain("a", 5)
    at.at(B).target.chunks.token_s = {1: 1.0}
    at.expect(again(before, "a+1"), B, KVSource(A, 5))
    if pulled:
        at.at(B).advance(at.now_s, float(pulled))
    at.at(B).source.offer("a+1", 1, 6, early=True)
    at.at(B).retain("a+1", 7)
    assert at.at(B).source.running == {}
    at.expect(again(before, "a+2"), BOTH, KVSource(B, 7))
    settle(at)
    settle(at)
    assert at.at(BOTH).counts() == (
        MigrationCounts(1, pulled, 0) if pulled else MigrationCounts(0, 0, 1)
    )
    assert (at.at(A).source.retained, at.at(B).source.retained) == ({}, {})
    run_out(at)
    assert all_free(at)


def test_a_request_that_leaves_while_members_write_is_kept_after_that() -> None:
    """With what they have written."""
    at = node()
    before = begin(at, B)
    at.at(B).retain("a", 5)
    at.expect(again(before, "a+1"), BOTH, KVSource(B, 5))
    at.at(BOTH).advance(at.now_s, None)
    at.at(BOTH).retain("a+1", 6)
    assert at.read(KVSource(BOTH, 6)) is None
    settle(at)
    found = at.read(KVSource(BOTH, 6))
    assert found is not None
    assert (found.tokens, found.is_final) == (12, True)
    at.expect(again(before, "a+2"), A, KVSource(BOTH, 6))
    settle(at)
    assert at.at(A).counts() == MigrationCounts(1, 12, 0)
    run_out(at)
    assert all_free(at)


# ---- a group that loses a member


@pytest.mark.parametrize("after", ["is retained", "arrives", "is being written", "is pulled ahead"])
def test_a_dissolved_group_leaves_no_kv(after: str) -> None:
    """Neither what leaves it nor what comes to it; other lanes of its engines keep theirs."""
    at = node()
    before, other = begin(at, BOTH), begin(at, A, "c", family=5)
    at.at(A).retain("c", 8)
    if after == "is retained":
        at.at(BOTH).retain("a", 5)
    else:
        at.at(BOTH).source.offer("a", 2, 6, early=True)
        at.at(BOTH).source.publish()
        source = KVSource(B, 5)
        made = begin(at, B, "b", family=4)
        at.at(B).retain("b", 5)
        ahead = 4 if after == "is pulled ahead" else None
        at.expect(again(made, "b+1"), BOTH, source, ahead)
        if after == "is being written":
            at.at(BOTH).advance(at.now_s, None)
            assert at.at(BOTH).is_pulling()
    at.at(BOTH).dissolve(2)
    at.lanes[BOTH].scheduler.finish_requests(None, RequestStatus.FINISHED_ABORTED)
    at.inboxes[0].clear()
    at.inboxes[1].clear()
    assert at.lanes[BOTH].free() == at.lanes[BOTH].pool.total
    assert not at.at(BOTH).incoming.by_id and not at.at(BOTH).is_pulling()
    assert list(at.at(A).source.retained) == [8]
    for number in (5, 6):
        offer = at.read(KVSource(BOTH, number))
        assert offer is None or offer == CLOSED
    assert (before.num_tokens, other.num_tokens) == (13, 13)


# ---- what is retained


def test_kv_that_is_not_fetched_is_released() -> None:
    """In time; the engine knows when to look, and who comes later is prefilled at once."""
    at = node()
    begin(at, A, "a")
    begin(at, A, "b", family=4)
    at.at(A).retain("a", 5)
    settle(at)
    assert at.at(A).retry_in_s(at.now_s) == RETAIN_S
    at.now_s += 2.0
    at.at(A).retain("b", 6)
    settle(at)
    assert at.at(A).retry_in_s(at.now_s) == RETAIN_S - 2.0
    at.now_s += RETAIN_S - 2.0
    settle(at)
    assert list(at.at(A).source.retained) == [5, 6]
    at.now_s += 0.01
    settle(at)
    assert list(at.at(A).source.retained) == [6]
    at.expect(make("a+1", 3, 9, 2), B, KVSource(A, 5))
    settle(at)
    assert (list(at.lanes[B].scheduler.requests), at.at(B).counts()) == (
        ["a+1"],
        MigrationCounts(0, 0, 1),
    )
    at.now_s += 2.0
    settle(at)
    assert (at.at(A).source.retained, at.at(A).retry_in_s(at.now_s)) == ({}, None)


def test_retained_kv_does_not_preempt_running_requests() -> None:
    """Where a running request would be preempted it goes at once; other lanes keep theirs."""
    at = node({A: 8})
    begin(at, A, "a", prompt=8, steps=1)
    begin(at, BOTH, "b")
    begin(at, A, "c", prompt=16, steps=3, family=4)
    at.at(A).retain("a", 5)
    at.at(A).retain("b", 6)
    while not at.lanes[A].pool.missing_for_running():
        settle(at)
        assert list(at.at(A).source.retained) == [5, 6]
        at.step(A)
    settle(at)
    assert list(at.at(A).source.retained) == [6]
    at.step(A)
    assert at.lanes[A].scheduler.running[0].num_preemptions == 0


@pytest.mark.parametrize("how", ["abort", "preempted"])
def test_the_offer_of_a_request_that_does_not_end_is_revoked(how: str) -> None:
    """Before its blocks are free; it is not made again."""
    at = node()
    at.at(A).source.offer("a", 1, 5, early=True)
    begin(at, A)
    offered = at.read(KVSource(A, 5))
    assert offered is not None
    assert (offered.tokens, offered.is_final) == (12, False)
    if how == "abort":
        at.abort("a", A)
    else:
        assert at.lanes[A].scheduler.reset_prefix_cache(reset_running_requests=True)
    for _ in range(3):
        assert at.read(KVSource(A, 5)) == CLOSED
        at.step(A)
    assert at.at(A).source.running == {}
    run_out(at)
    assert all_free(at)


def test_cached_tokens_are_not_offered_before_they_are_computed() -> None:
    """A second request shares blocks of the first, whose step is under way; another lane steps
    meanwhile.
    """
    at = node()
    at.at(A).source.offer("b", 1, 5, early=True)
    for name in "ab":
        at.lanes[A].scheduler.add_request(make(name, 3, 5, 3))
    at.lanes[A].schedule()
    assert at.lanes[A].scheduler.requests["b"].num_computed_tokens > 0
    at.at(A).source.publish()
    assert at.read(KVSource(A, 5)) == Offer(0, is_final=False, blocks=[])
    at.lanes[A].settle()
    at.at(A).source.publish()
    found = at.read(KVSource(A, 5))
    assert found is not None
    assert at.lanes[A].has(3, list(found.blocks), range(found.tokens))


def test_only_whole_blocks_count_when_the_rest_of_one_was_copied_in_vain() -> None:
    """Whole tiles are copied: tokens that had counted are written again, with whatever is there by
    then.
    """
    at = node({A: 5})
    before = begin(at, A)
    at.at(A).retain("a", 5)
    at.at(BOTH).target.chunks.token_s = {2: 1.0}
    at.expect(again(before, "a+1"), BOTH, KVSource(A, 5))
    arrival = at.at(BOTH).incoming.by_id["a+1"]
    for limit_s in (0.0, 5.0):
        settle(at, limit_s=limit_s)
    assert arrival.pulled_tokens == 9
    at.at(BOTH).advance(at.now_s, 9.0)
    at.at(A).source.release(5)
    begin(at, A, "b", prompt=14, family=4)
    settle(at)
    settle(at)
    assert (arrival.pulled_tokens, at.at(BOTH).counts()) == (8, MigrationCounts(1, 8, 0))
    at.abort("b", A)
    run_out(at)
    assert all_free(at)


@pytest.mark.parametrize(("old", "new"), PAIRS)
def test_pulled_blocks_are_freed_at_their_owner(old: Group, new: Group) -> None:
    """A chunk of one block at a time; the request has all of its KV at the end, and holds blocks
    for no more before.
    """
    at = Node(dict.fromkeys(GROUPS, 20), overlaps=False, chunk_blocks=1)
    before = begin(at, old, prompt=18, steps=6)
    at.at(old).retain("a", 5)
    at.expect(again(before, "a+1", outputs=9), new, KVSource(old, 5))
    arrival = at.at(new).incoming.by_id["a+1"]
    held = []
    while at.at(new).incoming:
        settle(at)
        held.append((arrival.pulled_tokens, 19 - at.lanes[old].free(), 19 - at.lanes[new].free()))
    assert held == [(4, 5, 1), (8, 4, 2), (12, 3, 3), (16, 2, 4), (20, 1, 5), (21, 0, 6)]
    assert at.at(new).counts() == MigrationCounts(1, before.num_tokens - 1, 0)
    run_out(at)
    assert all_free(at)


def test_a_request_is_prefilled_if_a_part_of_its_kv_has_no_room() -> None:
    """It lets go of what it has: else it could wait for ever for blocks that others hold in the
    same way.
    """
    at = Node(dict.fromkeys(GROUPS, 20), overlaps=False, chunk_blocks=2)
    before = begin(at, A, prompt=18, steps=6)
    taken = at.lanes[B].pool.take(16)
    at.at(A).retain("a", 5)
    at.expect(again(before, "a+1", outputs=9), B, KVSource(A, 5))
    for _ in range(4):
        settle(at)
    assert (at.lanes[A].free(), at.lanes[B].free(), at.asked[-1]) == (16, 0, (1, 3))
    at.now_s += PATIENCE_S + 0.1
    settle(at)
    assert (all_free(at), at.lanes[B].free(), at.at(B).counts()) == (
        False,
        3,
        MigrationCounts(0, 0, 1),
    )
    at.lanes[B].pool.give(taken)
    run_out(at)
    assert all_free(at)


def test_kv_is_kept_as_long_as_other_kv_is_pulled() -> None:
    """Nobody pulls what there is no room for yet."""
    at = Node(dict.fromkeys(GROUPS, 20), overlaps=False, chunk_blocks=1)
    first, second = begin(at, A, "a"), begin(at, A, "b", family=4)
    for number, one in ((5, first), (6, second)):
        at.at(A).retain(one.request_id, number)
    at.expect(again(first, "a+1"), B, KVSource(A, 5))
    for _ in range(4):
        settle(at)
        at.now_s += RETAIN_S - 1
    assert list(at.at(A).source.retained) == [6]
    at.now_s += 1.1
    settle(at)
    assert not at.at(A).source.retained
    run_out(at)
    assert all_free(at)


def test_kv_whose_blocks_were_replaced_is_copied_again() -> None:
    """It cannot revoke what its leader offers, and the blocks that it has left may be anybody's by
    then.
    """
    at = node()
    before = begin(at, A)
    at.at(A).retain("a", 5)
    places = iter([[1, 2, 3, 4], [9, 2, 3, 4], [9, 2, 3, 4]])
    copied = []
    at.physical = lambda *look: next(places)  # type: ignore[method-assign]
    at._copy = lambda engine, source, *rest: copied.append(source[1][0][0])  # type: ignore[method-assign]
    at.expect(again(before, "a+1"), B, KVSource(A, 5))
    settle(at)
    assert copied == [1, 9]
