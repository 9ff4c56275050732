"""What stays offered of a request that leaves while it is offered, or has just ended."""

import pytest

from flying_serving.migration.offers import OfferTable
from flying_serving.migration.source import Source
from tests.vllm_adapter.lanes import Lane, make

NUMBER, NEXT = 7, 8
PROMPT = 10


class Owner:
    """An engine with a lane of its own, which offers the KV of a request there."""

    def __init__(self, outputs: int, stop_at: int | None = None) -> None:
        self.lane = Lane(overlaps=False)
        self.table = OfferTable(memoryview(bytearray(OfferTable.size_bytes(20, 40))), 20, 40)
        self.source = Source({1: self.lane.pool}, self.table)
        self.source.offer("a", 1, NUMBER, early=True)
        self.lane.scheduler.add_request(make("a", 3, PROMPT, outputs, stop_at=stop_at))

    def step(self) -> None:
        """A step of its lane."""
        self.lane.step()
        self.source.publish()

    def offered(self, number: int) -> tuple[int, bool] | None:
        """How many tokens, each with its KV, and whether no more come."""
        offer = self.table.read(number)
        if offer is None:
            return None
        assert self.lane.has(3, list(offer.blocks), range(offer.tokens))
        return offer.tokens, offer.is_final


@pytest.fixture(autouse=True)
def quiet(monkeypatch: pytest.MonkeyPatch) -> None:
    """vLLM reads a machine's cores when it makes a configuration."""
    monkeypatch.setenv("VLLM_CPU_OMP_THREADS_BIND", "nobind")


@pytest.mark.parametrize("number", [NUMBER, NEXT])
def test_what_a_request_has_when_it_leaves_stays_offered(number: int) -> None:
    """Under the number under which it was offered, as a prefix that is not waited for, or under another."""
    owner = Owner(outputs=20)
    for _ in range(3):
        owner.step()
    before = owner.offered(NUMBER)
    assert before is not None and not before[1]
    owner.source.retain("a", number)
    assert owner.offered(number) == (before[0], True)
    assert number == NUMBER or owner.offered(NUMBER) == (0, True)
    assert owner.lane.scheduler.requests == {}
    owner.source.release(number)
    assert owner.lane.free() == owner.lane.pool.total


def test_a_request_that_has_just_ended_stays_offered_when_it_is_to_leave() -> None:
    """It was told to before the API server knew of its end."""
    owner = Owner(outputs=1)
    while owner.lane.scheduler.requests:
        owner.step()
    assert owner.offered(NUMBER) == (PROMPT, True)
    owner.source.retain("a", NUMBER)
    assert owner.offered(NUMBER) == (PROMPT, True)


def test_a_request_that_stops_has_nothing_to_offer() -> None:
    """It goes on nowhere, so its blocks are free at once."""
    owner = Owner(outputs=20, stop_at=PROMPT + 3)
    while owner.lane.scheduler.requests:
        owner.step()
    assert owner.offered(NUMBER) == (0, True)
    assert (owner.source.retained, owner.lane.free()) == ({}, owner.lane.pool.total)


def test_an_unknown_request_has_nothing_to_offer() -> None:
    owner = Owner(outputs=20)
    owner.source.retain("b", NEXT)
    assert owner.offered(NEXT) == (0, True)
