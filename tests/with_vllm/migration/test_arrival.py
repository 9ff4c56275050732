"""Arrival: the phases of a request that arrives with its KV, and which may follow which."""

from itertools import product

import pytest

from flying_serving.errors import IntegrityError
from flying_serving.layout.groups import KVSource
from flying_serving.migration.arrival import TRANSITIONS, Arrival, ArrivalPhase
from flying_serving.migration.offers import Offer
from tests.with_vllm.engine.schedulers import Request

PAIRS = list(product(ArrivalPhase, ArrivalPhase))
ENDS = [ArrivalPhase.ADMITTED, ArrivalPhase.FORWARDED, ArrivalPhase.ABORTED, ArrivalPhase.DROPPED]


def arrival(
    phase: ArrivalPhase = ArrivalPhase.EXPECTED, prefetch_tokens: int | None = None
) -> Arrival:
    """A request of ten tokens that arrives in lane 1 from the second engine."""
    request = Request("a", 10, 5)
    source = KVSource((1,), 7)
    return Arrival(request, 1, source, 100.0, prefetch_tokens, phase)  # type: ignore[arg-type]


def test_the_table_has_a_row_for_each_phase() -> None:
    assert set(TRANSITIONS) == set(ArrivalPhase)


def test_each_phase_is_reached_from_the_first() -> None:
    reached = {ArrivalPhase.EXPECTED}
    while more := {after for phase in reached for after in TRANSITIONS[phase]} - reached:
        reached |= more
    assert reached == set(ArrivalPhase)


@pytest.mark.parametrize(
    ("before", "after"), [pair for pair in PAIRS if pair[1] in TRANSITIONS[pair[0]]]
)
def test_a_phase_of_the_table_follows(before: ArrivalPhase, after: ArrivalPhase) -> None:
    arriving = arrival(before)
    arriving.enter(after)
    assert arriving.phase is after


@pytest.mark.parametrize(
    ("before", "after"), [pair for pair in PAIRS if pair[1] not in TRANSITIONS[pair[0]]]
)
def test_wrong_phase_is_an_error_and_changes_no_arrival(
    before: ArrivalPhase, after: ArrivalPhase
) -> None:
    arriving = arrival(before)
    with pytest.raises(RuntimeError, match=f"a: from {before.value} to {after.value}"):
        arriving.enter(after)
    assert arriving.phase is before


def test_a_request_uses_all_tokens_but_its_last() -> None:
    assert arrival().usable_tokens == 9


def test_a_prefetch_uses_the_tokens_that_its_request_will_have() -> None:
    assert arrival(prefetch_tokens=12).usable_tokens == 12


def test_a_request_that_arrives_after_its_prefetch_keeps_the_phase() -> None:
    arriving = arrival(ArrivalPhase.RESERVED, prefetch_tokens=4)
    arriving.run_here(Request("a", 13, 5), 105.0)  # type: ignore[arg-type]
    assert arriving.phase is ArrivalPhase.RESERVED


def test_a_request_that_arrives_after_its_prefetch_uses_its_own_tokens() -> None:
    arriving = arrival(ArrivalPhase.RESERVED, prefetch_tokens=4)
    arriving.run_here(Request("a", 13, 5), 105.0)  # type: ignore[arg-type]
    assert arriving.usable_tokens == 12


def test_the_patience_of_a_request_begins_when_it_arrives() -> None:
    arriving = arrival(ArrivalPhase.RESERVED, prefetch_tokens=4)
    arriving.run_here(Request("a", 13, 5), 105.0)  # type: ignore[arg-type]
    assert arriving.waited_s(106.0) == 1.0


@pytest.mark.parametrize("end", ENDS)
def test_a_request_does_not_arrive_after_its_prefetch_has_ended(end: ArrivalPhase) -> None:
    with pytest.raises(IntegrityError, match=f"a arrives, and is {end.value}"):
        arrival(end, prefetch_tokens=4).run_here(Request("a", 13, 5), 105.0)  # type: ignore[arg-type]


@pytest.mark.parametrize(("is_final", "prefetch_tokens"), [(False, None), (True, 4), (False, 4)])
def test_a_request_that_may_run_at_its_owner_is_not_pulled_in_chunks(
    is_final: bool, prefetch_tokens: int | None
) -> None:
    assert not arrival(prefetch_tokens=prefetch_tokens).is_chunked(Offer(4, is_final, [1]))


def test_a_request_that_has_left_its_owner_is_pulled_in_chunks() -> None:
    assert arrival().is_chunked(Offer(4, is_final=True, blocks=[1]))
